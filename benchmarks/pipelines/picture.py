"""The answer as a picture."""

from __future__ import annotations

from pathlib import Path

from benchmarks.pipelines.report import Report
from torchrec_picasso.app.cli.outputs import new_picture, save_picture

__all__ = ["draw_report"]

_STOCK_COLOR, _OURS_COLOR = "#9aa5b1", "#0b7285"


def draw_report(report: Report, path: str | Path) -> None:
    """Bars of samples per second, with the ratio to the best stock variant on each."""
    found = report.variants
    figure, axes = new_picture(width=2.5 + 1.2 * len(found))
    bars = axes.bar(
        [_in_lines(name) for name in found],
        [of.samples_per_s for of in found.values()],
        color=[_STOCK_COLOR if of.is_stock else _OURS_COLOR for of in found.values()],
        width=0.6,
    )
    axes.bar_label(bars, [f"{of.ratio:.2f} x" for of in found.values()], padding=3)
    axes.margins(y=0.12)
    question = report.question
    link = f"links of {question.rate_mbit:g} Mbit/s" if question.rate_mbit else "loopback"
    axes.set(
        ylabel="samples per second",
        title=f"{question.hosts} x {question.ranks_per_host} ranks x {question.batch_size} "
        f"samples, dim {question.dim}, {question.towers} towers, {link}",
    )
    save_picture(figure, axes, path)


def _in_lines(name: str) -> str:
    return name.replace("+", "\n+ ").replace("_no_", "\nno ").replace(":", "\n", 1)
