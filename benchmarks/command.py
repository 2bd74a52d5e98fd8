"""Helpers of the benchmarks' commands: parsers, options, pictures that do not change."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

from torchrec_picasso.app.cli.outputs import check_outputs
from torchrec_picasso.errors import PicassoError

SVG_STYLE = {"svg.fonttype": "none", "svg.hashsalt": "simulations"}
"""matplotlib's settings for letters as text, and names of parts that do not change."""
SVG_OPTIONS: dict[str, Any] = {"metadata": {"Date": None, "Creator": None}}
"""Options of ``save_picture``: equal results give an equal file."""


def command_parser(module: str, description: str | None) -> argparse.ArgumentParser:
    """Parser of ``python -m module``, whose help shows the description as it is written."""
    return argparse.ArgumentParser(
        prog=f"python -m {module}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def add_numbers(parser: argparse.ArgumentParser, *options: tuple[str, int, int, str]) -> None:
    """Adds options of a whole number: name, default, least number, and what it is."""
    for name, default, least, what in options:
        what = f"{what} (default: {default})"
        parser.add_argument(name, type=at_least(least), default=default, metavar="N", help=what)


def can_write(args: argparse.Namespace, *names: str) -> bool:
    """Whether the files of these options can be written; prints why not."""
    try:
        check_outputs(args, *names)
    except PicassoError as error:
        print(f"error: {error}", file=sys.stderr)
        return False
    return True


def at_least(least: int) -> Callable[[str], int]:
    """Parses a whole number that is not below ``least``."""

    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least} on")
        return int(text)

    return number
