"""The answer as a table and as a file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.fields.predicted import Errors, Predicted
from benchmarks.fields.question import Question
from benchmarks.fields.workload import ModelTable
from benchmarks.pipelines.rankings import Standing
from benchmarks.pipelines.report import FIGURES_HEAD, figures_line


@dataclass(frozen=True, kw_only=True)
class Report:
    """Results of a comparison, as they are written.

    Args:
        question: Settings of the comparison.
        trained: Description of the workload.
        tables: Tables of the model.
        variants: Figures of each variant, by name.
        says: Prediction of each variant's planner.
        chose: Description of each pipeline's modules and settings.
        predicted: Cost model's price of each variant that has one.
        errors: Errors of these prices.
        dense_ms: Forward and backward of the dense part, where it was measured.
    """

    question: Question
    trained: str
    tables: Sequence[ModelTable]
    variants: dict[str, Standing]
    says: dict[str, str]
    chose: dict[str, str]
    predicted: dict[str, Predicted]
    errors: Errors | None
    dense_ms: float = 0.0


def print_report(report: Report) -> None:
    """Prints the table, and each variant's plan."""
    question, found = report.question, report.variants
    ids = sum(table.ids_per_sample for table in report.tables)
    print(
        f"{report.trained}, {len(report.tables)} tables, {ids:.0f} ids per sample: "
        f"{question.hosts} hosts x {question.batch_size} samples, {question.link}"
    )
    width = max(16, *(len(name) + 2 for name in found))
    print(f"  {'':<{width}}{FIGURES_HEAD}")
    for name, standing in found.items():
        print(f"  {name:<{width}}{figures_line(standing)}")
    for line in _predictions(report):
        print(line)
    for name, standing in found.items():
        print(f"  plan of {name}: {plan_in_words(standing, report.says[name])}")
    for name, standing in found.items():
        if standing.is_interleaved:
            print(f"  pipeline of {name}: {'; '.join(report.chose[name].splitlines())}")


def _predictions(report: Report) -> Iterator[str]:
    errors = report.errors
    if errors is None:
        return
    for name, prediction in report.predicted.items():
        yield (
            f"  predicted for {name}: {prediction.step_ms:.1f} ms ({errors.step[name]:+.0%}), "
            f"{prediction.wire_ms:.1f} on the wire, {prediction.compute_ms:.1f} of work, "
            f"bytes {errors.sent_bytes[name]:+.1%}"
        )
    yield (
        f"  predictions are off by {errors.median_step:.0%} in the median and "
        f"{errors.worst_step:.0%} at worst; bytes by {errors.worst_bytes:.1%} at worst"
    )
    if errors.ours_over_best is not None:
        yield f"  ours takes {errors.ours_over_best:.3f} of the fastest other's step"


def plan_in_words(standing: Standing, says: str) -> str:
    """One line: tables by kind, hot rows, and what the planner predicts."""
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(standing.tables.items()))
    hot = f" with {standing.hot_rows} hot rows" if "hot_cold" in standing.tables else ""
    return f"{kinds}{hot}{'; ' if says else ''}{says}"
