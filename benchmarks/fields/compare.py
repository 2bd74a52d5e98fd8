"""Work of every rank: curves and statistics, then all variants in turns."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import nn

from benchmarks.fields.columns import ColumnsWorkload
from benchmarks.fields.generated import FieldsWorkload
from benchmarks.fields.plans import (
    Planned,
    decide_hot_cold,
    plan_bags,
    plan_hot_cold,
    plan_in_parts,
    plan_stock,
    plan_table_wise,
)
from benchmarks.fields.predicted import Predicted, mean_of, predict
from benchmarks.fields.question import Question
from benchmarks.fields.sequences import SequencesWorkload
from benchmarks.fields.trainer import VariantTrainer
from benchmarks.fields.variants import named
from benchmarks.fields.workload import Workload
from benchmarks.fields.zoo import ZooWorkload
from benchmarks.pipelines.memory import PeakMemory
from benchmarks.pipelines.runner import RankResult, Runner, take_turns
from benchmarks.pipelines.variants import Variant
from torchrec_picasso import CommCurves, FrequencyStats
from torchrec_picasso.app.launch.progress import Progress
from torchrec_picasso.app.launch.quiet import quiet_upstream
from torchrec_picasso.app.runs.dense_probe import measure_dense_of
from torchrec_picasso.app.runs.local_probe import measure_local_costs
from torchrec_picasso.app.runs.pipelines import describe_pipeline
from torchrec_picasso.planner.decision import Decision

_MAX_BATCHES = 32


@dataclass(frozen=True, kw_only=True)
class RankAnswer:
    """Results of one rank.

    Args:
        results: Measurements of every variant.
        says: Prediction of each variant's planner, on the first rank.
        chose: Description of each pipeline's modules and settings.
        predicted: Cost model's price of each variant, in its micro-batches, by curves from
            before and after the turns; variants without a price are missing.
        dense_bytes: Sent per step to sum dense gradients.
        dense_ms: Forward and backward of the dense part, where it was measured.
    """

    results: list[RankResult]
    says: dict[str, str]
    chose: dict[str, str]
    predicted: dict[str, Predicted]
    dense_bytes: float
    dense_ms: float


def make_workload(question: Question) -> Workload:
    """The workload of a question."""
    if question.zoo is not None:
        return ZooWorkload(question.zoo, question.hosts)
    if question.model == "sequences":
        return SequencesWorkload(question)
    if question.model == "columns":
        return ColumnsWorkload(question)
    return FieldsWorkload(question)


def compare_on_rank(
    rank: int, world_size: int, question: Question, curves: CommCurves | None = None
) -> RankAnswer:
    """Measures the links, plans, and lets the variants take turns.

    Collective: the main function of every rank.
    """
    quiet_upstream()
    variants = named(question.variants)
    bench = _Bench(rank, world_size, question, curves)
    progress = Progress(question.model, len(variants) * (question.rounds + 1), shown=rank == 0)
    runners, says, trainers = [], {}, {}
    for variant in variants:
        progress.tell(f"{variant.name}, building and warming up")
        runner, trainer, says[variant.name] = bench.make(variant)
        trainers[variant.name] = trainer
        runner.warm_up(question.num_steps)
        runners.append(runner)
        progress.advance()
    take_turns(runners, question, progress)
    results = [runner.result() for runner in runners]
    return RankAnswer(
        results=results,
        says=says,
        chose={name: describe_pipeline(trainer.pipeline) for name, trainer in trainers.items()},
        predicted=bench.predict(results, trainers),
        dense_bytes=bench.decision.dense.parameter_bytes * 2 * (world_size - 1) / world_size,
        dense_ms=bench.decision.dense.total_ms,
    )


class _Bench:
    """State shared by all variants: workload, batches, statistics and curves. Collective."""

    def __init__(
        self, rank: int, world_size: int, question: Question, curves: CommCurves | None
    ) -> None:
        pg = dist.group.WORLD
        assert pg is not None
        self._pg, self._question = pg, question
        self._workload = make_workload(question)
        self._batches = self._workload.training(rank, min(_MAX_BATCHES, question.num_steps))
        heldout = self._workload.heldout(world_size, question.heldout_steps)
        self._stats = FrequencyStats.collect(heldout, self._workload.model())
        self._given_curves = curves
        self._curves = self._measure()
        self.decision = self._decide(self._curves)

    def _measure(self) -> CommCurves:
        """Measures curves of the links, unless given, and the ranks' own work where asked for."""
        dist.barrier()  # nothing else uses the cores, and nothing is on the wire
        curves = self._given_curves or CommCurves.measure(self._pg)
        if self._question.local_costs:
            curves = dataclasses.replace(curves, local=measure_local_costs())
        if self._question.dense:
            model, size = self._workload.model(), self._question.batch_size
            dense = measure_dense_of(model, self._batches[0], size)
            curves = dataclasses.replace(curves, dense=dense)
        return curves

    def _decide(self, curves: CommCurves) -> Decision:
        model, size = self._workload.model(), self._question.batch_size
        return decide_hot_cold(model, self._pg, size, self._stats, curves)

    def predict(
        self, results: Sequence[RankResult], trainers: Mapping[str, VariantTrainer]
    ) -> dict[str, Predicted]:
        """Prices of the variants by the cost model, once their turns are over.

        A machine's pace may change within the turns, so curves are measured once more, and the
        prediction is the mean of both.
        """
        later = self._decide(self._measure())
        dist.barrier()  # no rank leaves while another is at work
        predicted = {}
        for result in results:
            name = result.variant.name
            pieces = result.num_micro_batches if result.variant.pipeline == "interleaved" else None
            placement = trainers[name].placement
            prices = [predict(by, placement, pieces) for by in (self.decision, later)]
            known = [price for price in prices if price is not None]
            if known:
                predicted[name] = mean_of(known)
        return predicted

    def make(self, variant: Variant) -> tuple[Runner, VariantTrainer, str]:
        """A variant at work, its trainer, and what its planner says."""
        memory = PeakMemory()
        model = self._workload.model()
        planned = self._plan(variant, model)
        asked = self._question
        trainer = VariantTrainer(variant, model, planned, self._pg, asked.seed, asked.optimizer)
        runner = Runner(
            variant,
            trainer,
            self._batches,
            on_links=self._question.rate_mbit is not None,
            memory=memory,
        )
        return runner, trainer, planned.says

    def _plan(self, variant: Variant, model: nn.Module) -> Planned:
        size, tables = self._question.batch_size, self._workload.tables
        if variant.placement == "table_wise":
            return plan_table_wise(tables, model, self._pg)
        if variant.placement in ("row_wise", "column_wise"):
            return plan_in_parts(variant.placement, tables, model, self._pg)
        if variant.placement == "bags":
            return plan_bags(tables, model, self._pg)
        if variant.placement == "planner":
            return plan_stock(tables, model, self._pg, size)
        return plan_hot_cold(model, self._pg, size, variant.hot_rows, self._stats, self._curves)
