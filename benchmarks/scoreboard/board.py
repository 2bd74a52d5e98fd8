"""Table of the measured models."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_OURS = "ours"
_MB = 1e6
_NOT_DENSE = 0.05
"""Up to this share of the work outside the dense part, the dense part hides the exchange."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """Figures of one model; those without a unit are ratios.

    Args:
        name: Name of the model.
        times_stock: Samples per second, ours over the best stock variant's.
        stock: Name of that variant.
        stock_ms: Step of the best stock variant.
        ours_ms: Step of ours.
        compute_ms: CPU time of a rank in it, of all its threads: no schedule is faster on a core.
        wire_ms: Predicted time on the wire: no schedule is faster, either.
        predicted_ms: Price of our step by the planner's cost model.
        stock_bytes: Bytes that stock sends per rank and step.
        ours_bytes: Bytes that ours sends per rank and step.
        collectives: Number of ours, per step.
        exposed: Part of our step in which the thread that trains waits.
        dense_share: Part of that work which is the dense part's.
        peak_bytes: Most memory of a rank that ours took.
        setting: Micro-batches and lookahead.
    """

    name: str
    times_stock: float
    stock: str
    stock_ms: float
    ours_ms: float
    compute_ms: float
    wire_ms: float
    predicted_ms: float
    stock_bytes: float
    ours_bytes: float
    collectives: float
    exposed: float
    dense_share: float
    peak_bytes: float
    setting: str

    @property
    def why(self) -> str:
        """Why it is not more."""
        if self.ours_ms <= 1.1 * self.compute_ms:
            return "the core has no more to give"
        if self.dense_share > 1 - _NOT_DENSE:
            return "the dense part hides all of the exchange, stock's too"
        return ""


def read_line(name: str, path: Path) -> Line:
    """Reads what :func:`benchmarks.pipelines.report.write_report` wrote."""
    document: dict[str, Any] = json.loads(path.read_text())
    found, predicted = document["variants"], document["predicted"]
    stock = max(
        (name for name in found if found[name]["is_stock"]),
        key=lambda name: found[name]["samples_per_s"],
    )
    ours, best, price = found[_OURS], found[stock], predicted[_OURS]
    compute_ms = 1e3 * ours["cpu_s_per_step"] / document["question"]["hosts"]
    return Line(
        name=name,
        times_stock=ours["samples_per_s"] / best["samples_per_s"],
        stock=stock,
        stock_ms=best["step_ms"][1],
        ours_ms=ours["step_ms"][1],
        compute_ms=compute_ms,
        wire_ms=price["wire_ms"],
        predicted_ms=price["step_ms"],
        stock_bytes=best["metered_bytes_per_step"],
        ours_bytes=ours["metered_bytes_per_step"],
        collectives=ours["collectives_per_step"],
        exposed=ours["exposed_share"],
        dense_share=min(1.0, document["dense_ms"] / compute_ms),
        peak_bytes=ours["peak_bytes"] or 0.0,
        setting=f"K={ours['num_micro_batches']}{'' if ours['lookahead'] else ', no lookahead'}",
    )


def print_board(lines: Sequence[Line]) -> None:
    """Prints the table."""
    print(
        f"{'':<12}{'x stock':>8}{'stock ms':>10}{'ours ms':>9}{'work':>7}{'wire':>7}"
        f"{'predicted':>11}{'stock MB':>10}{'ours MB':>9}{'calls':>7}{'exposed':>9}{'dense':>7}"
        f"{'peak MB':>9}  {'setting':<18}"
    )
    for line in lines:
        print(
            f"{line.name:<12}{line.times_stock:>8.2f}{line.stock_ms:>10.0f}{line.ours_ms:>9.0f}"
            f"{line.compute_ms:>7.0f}{line.wire_ms:>7.0f}{line.predicted_ms:>11.0f}"
            f"{line.stock_bytes / _MB:>10.2f}{line.ours_bytes / _MB:>9.2f}{line.collectives:>7.0f}"
            f"{line.exposed:>9.0%}{line.dense_share:>7.0%}{line.peak_bytes / _MB:>9.0f}"
            f"  {line.setting:<18} {line.why}"
        )
