"""Reports of the parts, their medians and ratios, and how they are printed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median, quantiles
from typing import Any


@dataclass(frozen=True, kw_only=True)
class PartReport:
    """One part's outcome.

    Args:
        name: The part.
        rows: Lines of its table: column to text, the same columns in each.
        notes: Lines below the table.
        problems: Failed checks; if there is one, the command ends with exit code 1.
        facts: Everything measured, for JSON.
    """

    name: str
    rows: Sequence[Mapping[str, str]] = ()
    notes: Sequence[str] = ()
    problems: Sequence[str] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Step times of one variant.

    Args:
        median_ms: Over rounds.
        low_ms: Lower quartile.
        high_ms: Upper quartile.
        ratio: Median over rounds of its time to the reference's in the same round.
        ratio_range: The smallest and the largest such ratio.
    """

    median_ms: float
    low_ms: float
    high_ms: float
    ratio: float
    ratio_range: tuple[float, float]


def timings(step_ms: Mapping[str, Sequence[float]], reference: str) -> dict[str, Timing]:
    """Medians, spread and ratios; a round's ratio compares turns that were close in time."""
    found = {}
    for name, ms in step_ms.items():
        low, middle, high = quantiles(ms, n=4, method="inclusive")
        ratios = [mine / theirs for mine, theirs in zip(ms, step_ms[reference])]
        found[name] = Timing(
            median_ms=middle,
            low_ms=low,
            high_ms=high,
            ratio=median(ratios),
            ratio_range=(min(ratios), max(ratios)),
        )
    return found


def format_table(rows: Sequence[Mapping[str, str]]) -> str:
    """Rows of equal columns as text, the first column to the left and the others to the right."""
    if not rows:
        return ""
    columns = list(rows[0])
    lines = [columns, *([row[column] for column in columns] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    return "\n".join(
        "  ".join(
            text.rjust(width) if i else text.ljust(width)
            for i, (text, width) in enumerate(zip(line, widths))
        ).rstrip()
        for line in lines
    )


def describe_parts(reports: Sequence[PartReport]) -> str:
    """All parts as text."""
    blocks = []
    for report in reports:
        lines = [report.name]
        if report.rows:
            lines += [f"  {line}" for line in format_table(report.rows).splitlines()]
        lines += [f"  {note}" for note in report.notes]
        lines += [f"  PROBLEM: {problem}" for problem in report.problems]
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)
