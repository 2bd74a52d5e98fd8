"""Files that commands write: checked before the work starts; JSON results; style of pictures."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torchrec_picasso.app.launch.environment import describe_environment
from torchrec_picasso.errors import ConfigError

STOCK_COLOR, OURS_COLOR = "#9aa5b1", "#0b7285"
_PICTURES = ("plot", "profile_out")


def check_outputs(args: argparse.Namespace, *names: str) -> None:
    """Checks files that a command will write.

    Args:
        args: Arguments of the command.
        *names: Arguments that name a file; ``plot`` and ``profile_out`` are pictures.

    Raises:
        ConfigError: If a folder does not exist, the file is one, or matplotlib cannot write it.
    """
    for name in names:
        path, flag = getattr(args, name), f"--{name.replace('_', '-')}"
        if path is None:
            continue
        folder = Path(path).parent
        if not folder.is_dir():
            raise ConfigError(
                f"{flag} {path}: there is no folder {folder}; make it or name another"
            )
        if Path(path).is_dir():
            raise ConfigError(f"{flag} {path}: is a folder; name a file")
        if name in _PICTURES:
            figure, _ = new_picture()
            formats = figure.canvas.get_supported_filetypes()
            if Path(path).suffix.removeprefix(".") not in formats:
                raise ConfigError(
                    f"{flag} {path}: expected a name that ends in one of {', '.join(formats)}"
                )


def write_result(content: Mapping[str, Any], path: str | Path) -> None:
    """Writes a result with its environment as JSON, atomically."""
    path = Path(path)
    temporary = path.with_name(path.name + ".tmp")
    document = {"environment": describe_environment(), **content}
    temporary.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def print_table(*rows: Sequence[str]) -> None:
    """Prints rows of text, the first column left-aligned, the others right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    for first, *cells in rows:
        aligned = [cell.rjust(width) for cell, width in zip(cells, widths[1:])]
        print("  " + "  ".join([first.ljust(widths[0]), *aligned]).rstrip())


def new_picture(
    width: float = 6.5, height: float = 4.2, num_axes: int = 1, num_lines: int = 1
) -> tuple[Any, Any]:
    """A figure of a size in inches and its axes, side by side in lines, for
    :func:`save_picture`."""
    from matplotlib.figure import Figure  # slow to import

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(num_lines, num_axes)


def save_picture(figure: Any, path: str | Path, **options: Any) -> None:
    """Applies the style and writes a picture, with options of matplotlib's ``savefig``; the suffix
    determines the format."""
    for axes in figure.axes:
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
        axes.set_axisbelow(True)
    figure.savefig(path, dpi=150, **options)
