"""Files that commands write: refused before the work, not after it; pictures in one style."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from torchrec_picasso.errors import ConfigError

__all__ = ["check_outputs", "new_picture", "save_picture"]


def check_outputs(args: argparse.Namespace, *flags: str) -> None:
    """Refuses files that cannot be written.

    Args:
        args: Arguments of the command.
        *flags: Names of those that hold a file to write; ``plot`` is a picture.

    Raises:
        ConfigError: If a folder does not exist, or nothing can draw the format.
    """
    for flag in flags:
        value = getattr(args, flag)
        if value is None:
            continue
        folder = Path(value).parent
        if not folder.is_dir():
            raise ConfigError(
                f"--{flag} {value}: there is no folder {folder}; make it or name another"
            )
        if flag == "plot":
            figure, _ = new_picture()
            known = figure.canvas.get_supported_filetypes()
            if Path(value).suffix.removeprefix(".") not in known:
                raise ConfigError(
                    f"--plot {value}: expected a name that ends in one of {', '.join(known)}"
                )


def new_picture(width: float = 6.5, height: float = 4.2) -> tuple[Any, Any]:
    """A figure and its axes, for :func:`save_picture`.

    Args:
        width: Inches.
        height: Inches.
    """
    from matplotlib.figure import Figure  # here, because only a picture needs it; slow to import

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()


def save_picture(figure: Any, axes: Any, path: str | Path) -> None:
    """Finishes a picture and writes it; its name says the format."""
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.set_axisbelow(True)
    figure.savefig(path, dpi=150)
