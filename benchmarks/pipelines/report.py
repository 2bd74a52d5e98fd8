"""The answer as a table and as a file."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.pipelines.question import Question
from benchmarks.pipelines.rankings import Standing
from torchrec_picasso.app.cli.outputs import write_result

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_LEAST_EXPOSED = 0.05
_MB = 1e6
FIGURES_HEAD = (
    f"{'samples/s':>10}{'x stock':>9}{'by round':>14}{'step ms':>9}"
    f"{'quartiles':>17}{'CPU s':>8}{'link MB':>9}{'meter MB':>10}{'calls':>7}{'exposed':>9}"
    f"{'peak MB':>9}{'loss diff.':>12}{'K':>6}{'ahead':>7}"
)


@dataclass(frozen=True, kw_only=True)
class Report:
    """Results of a comparison, as they are written.

    Args:
        question: Settings of the comparison.
        variants: Figures of the final run.
        probe_ms: Step time of every stock variant that was probed.
        left_out: Reason why a requested variant did not run.
        floors: Lower bounds by :func:`benchmarks.pipelines.floors.floors`.
    """

    question: Question
    variants: dict[str, Standing]
    probe_ms: dict[str, float]
    left_out: dict[str, str]
    floors: dict[str, float | None]


def write_report(report: DataclassInstance, path: str | Path) -> None:
    """Writes all numbers of a report, and a description of the machine."""
    write_result(dataclasses.asdict(report), path)


def print_report(report: Report) -> None:
    """Prints the table, and what stands out in it."""
    question, found = report.question, report.variants
    print(
        f"{question.data}: {question.hosts} hosts x {question.ranks_per_host} ranks x "
        f"{question.batch_size} samples, dim {question.dim}, {question.towers} towers, "
        f"{question.link}"
    )
    if report.probe_ms:
        probes = (f"{name} {ms:.0f}" for name, ms in report.probe_ms.items())
        print(f"  stock variants alone, ms per step: {', '.join(probes)}")
    for name, reason in report.left_out.items():
        print(f"  left out: {name} ({reason})")
    width = max(22, *(len(name) + 3 for name in found))
    print(f"  {'':<{width}}{FIGURES_HEAD}")
    for name, standing in found.items():
        label = name if standing.trains_same_model else f"{name} *"
        print(f"  {label:<{width}}{figures_line(standing)}")
    if not all(standing.trains_same_model for standing in found.values()):
        print("  * tables cut by columns have a row-wise Adagrad state per cut: another optimizer")
    for name, standing in found.items():
        if not standing.is_stock:
            kinds = ", ".join(f"{count} {kind}" for kind, count in standing.tables.items())
            print(f"  {name}: {kinds}; {standing.hot_rows} hot rows")
    bounds = report.floors
    wire = "-" if bounds["wire_ms"] is None else f"{bounds['wire_ms']:.0f} ms"
    print(
        f"  floors of a step: wire {wire}, compute {bounds['compute_ms']:.0f} ms; our best takes "
        f"{bounds['step_ms']:.0f} ms, {bounds['step_over_floor']:.2f} of the larger one"
    )
    exposed = max(standing.exposed_share for standing in found.values() if standing.is_stock)
    if exposed < _LEAST_EXPOSED:
        print(f"  stock waits for {exposed:.0%} of its step: no placement or pipeline can win here")


def schedule_in_words(
    is_interleaved: bool, num_micro_batches: int | None, lookahead: bool | None
) -> tuple[str, str]:
    """Micro-batches K and lookahead: ``-`` without them, ``auto`` where the choice is not told."""
    if not is_interleaved:
        return "-", "-"
    ahead = "auto" if lookahead is None else "yes" if lookahead else "no"
    return "auto" if num_micro_batches is None else str(num_micro_batches), ahead


def figures_line(standing: Standing) -> str:
    """One variant's figures, under :data:`FIGURES_HEAD`."""
    low, middle, high = standing.step_ms
    rounds = f"{min(standing.ratio_by_round):.2f} to {max(standing.ratio_by_round):.2f}"
    link_mb = f"{standing.link_bytes_per_step / _MB:.2f}" if standing.link_bytes_per_step else "-"
    peak_mb = f"{standing.peak_bytes / _MB:.0f}" if standing.peak_bytes else "-"
    micro, ahead = schedule_in_words(
        standing.is_interleaved, standing.num_micro_batches, standing.lookahead
    )
    return (
        f"{standing.samples_per_s:>10.0f}{standing.ratio:>9.2f}{rounds:>14}{middle:>9.1f}"
        f"{f'{low:.1f} to {high:.1f}':>17}{standing.cpu_s_per_step:>8.3f}{link_mb:>9}"
        f"{standing.metered_bytes_per_step / _MB:>10.2f}{standing.collectives_per_step:>7.0f}"
        f"{standing.exposed_share:>9.0%}{peak_mb:>9}"
        f"{standing.max_loss_difference:>12.0e}{micro:>6}{ahead:>7}"
    )
