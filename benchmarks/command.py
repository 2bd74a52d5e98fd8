"""Helpers of the benchmarks' commands: numeric options, and outcomes of an earlier run."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


def command_parser(module: str, description: str | None) -> argparse.ArgumentParser:
    """Parser of ``python -m module``, whose help shows the description as it is written."""
    return argparse.ArgumentParser(
        prog=f"python -m {module}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def at_least(least: int) -> Callable[[str], int]:
    """Parses a whole number that is not below ``least``."""

    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least} on")
        return int(text)

    return number


def read_lines(path: Path) -> dict[str, dict[str, Any]]:
    """Outcomes of a file of JSON lines, by name; a line that was cut off counts for nothing."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    found = [json.loads(line) for line in lines if line.endswith("}\n")]
    return {line["name"]: line for line in found}


def append_line(path: Path, outcome: Mapping[str, Any]) -> None:
    """Adds an outcome to a file of JSON lines."""
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(outcome) + "\n")
