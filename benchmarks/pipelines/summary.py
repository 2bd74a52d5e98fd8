"""All scenarios in one table, from their reports' files: a ratio, its target, and what was met."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.pipelines.report import schedule_in_words
from benchmarks.pipelines.scenarios import Scenario, has_own_sizes

__all__ = ["SummaryRow", "summary_row", "summary_table", "without_report"]

MET, MISSED, OTHER_SIZES, NOT_RUN = "met", "missed", "other sizes", "not run"
_HEAD = (
    *("scenario", "target", "best of ours", "K", "lookahead", "x stock", "by round"),
    *("others of ours", "best stock", "exposed, stock", "exposed, ours", "step / floor"),
    *("loss diff.", "verdict"),
)


@dataclass(frozen=True, kw_only=True)
class SummaryRow:
    """One scenario's answer. What is ``None`` or empty was not measured.

    Args:
        name: Of the scenario.
        target: Least ratio to the best stock variant.
        verdict: ``"met"``, ``"missed"``, ``"other sizes"`` if it ran with sizes that the target is
            not for, or ``"not run"``.
        reason: Why it did not run.
        best: Of our variants.
        num_micro_batches: That the best used, in words.
        lookahead: Whether the best used it, in words.
        ratios: Of our variants to the best stock one.
        ratio_by_round: Least and largest one of the best.
        best_stock: Whom they are compared to.
        exposed_share_of_stock: 0 to 1, of the best stock variant.
        exposed_share: Of the best of ours.
        step_over_floor: Its step over the larger floor.
        max_loss_difference: Of ours to stock.
        date_utc: Of the measurement.
    """

    name: str
    target: float
    verdict: str
    reason: str = ""
    best: str = ""
    num_micro_batches: str = "-"
    lookahead: str = "-"
    ratios: dict[str, float]
    ratio_by_round: tuple[float, float] | None = None
    best_stock: str = ""
    exposed_share_of_stock: float | None = None
    exposed_share: float | None = None
    step_over_floor: float | None = None
    max_loss_difference: float | None = None
    date_utc: str = ""


def summary_row(scenario: Scenario, document: Mapping[str, Any]) -> SummaryRow:
    """The answer of a scenario, from its report.

    Args:
        scenario: Which one.
        document: Its report, as read from the file.
    """
    found = document["variants"]
    ours = {name: of for name, of in found.items() if not of["is_stock"]}
    if not ours:
        return without_report(scenario, "none of our variants ran")
    best = max(ours, key=lambda name: ours[name]["ratio"])
    stock = {name: of for name, of in found.items() if of["is_stock"]}
    best_stock = max(stock, key=lambda name: stock[name]["ratio"])
    judged = [of["ratio"] for of in ours.values()] if scenario.each_of_ours else []
    least = min(judged, default=ours[best]["ratio"])
    verdict = MET if least >= scenario.target else MISSED
    if not has_own_sizes(scenario, document["question"]):
        verdict = OTHER_SIZES
    of = ours[best]
    micro, ahead = schedule_in_words(of["is_interleaved"], of["num_micro_batches"], of["lookahead"])
    return SummaryRow(
        name=scenario.name,
        target=scenario.target,
        verdict=verdict,
        best=best,
        num_micro_batches=micro,
        lookahead=ahead,
        ratios={name: of["ratio"] for name, of in ours.items()},
        ratio_by_round=(min(of["ratio_by_round"]), max(of["ratio_by_round"])),
        best_stock=best_stock,
        exposed_share_of_stock=stock[best_stock]["exposed_share"],
        exposed_share=of["exposed_share"],
        step_over_floor=document["floors"]["step_over_floor"],
        max_loss_difference=max(of["max_loss_difference"] for of in ours.values()),
        date_utc=str(document["environment"].get("date_utc", "")),
    )


def without_report(scenario: Scenario, reason: str) -> SummaryRow:
    """A scenario that there is no answer to, and why."""
    return SummaryRow(
        name=scenario.name, target=scenario.target, verdict=NOT_RUN, reason=reason, ratios={}
    )


def summary_table(rows: Sequence[SummaryRow]) -> str:
    """The scenarios as a Markdown table, padded so that it reads as plain text too.

    Args:
        rows: Of all scenarios.
    """
    lines = [_HEAD, *(_cells(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(_HEAD))]
    head, *body = [_line(cell.ljust(width) for cell, width in zip(c, widths)) for c in lines]
    return "\n".join([head, _line("-" * width for width in widths), *body]) + "\n"


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cells(row: SummaryRow) -> tuple[str, ...]:
    target = f">= {row.target:g}"
    if row.ratio_by_round is None:
        verdict = f"{row.verdict}: {row.reason}".replace("|", "/")
        return (row.name, target, *("-" for _ in _HEAD[3:]), verdict)
    low, high = row.ratio_by_round
    others = (f"{name} {ratio:.2f}" for name, ratio in row.ratios.items() if name != row.best)
    return (
        *(row.name, target, row.best, row.num_micro_batches, row.lookahead),
        *(f"{row.ratios[row.best]:.2f}", f"{low:.2f} to {high:.2f}", ", ".join(others) or "-"),
        *(row.best_stock, f"{row.exposed_share_of_stock:.0%}", f"{row.exposed_share:.0%}"),
        *(f"{row.step_over_floor:.2f}", f"{row.max_loss_difference:.0e}", row.verdict),
    )
