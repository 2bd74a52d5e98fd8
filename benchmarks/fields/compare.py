"""What every rank runs: curves and statistics, then all contestants in turns."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch.distributed as dist
from torch import nn

from benchmarks.fields.columns import ColumnsWorkload
from benchmarks.fields.contestants import named
from benchmarks.fields.generated import FieldsWorkload
from benchmarks.fields.plans import (
    Planned,
    decide_hot_cold,
    plan_bags,
    plan_hot_cold,
    plan_stock,
    plan_table_wise,
)
from benchmarks.fields.predicted import Predicted, predict
from benchmarks.fields.question import COUNTED_STEPS, WARMUP_STEPS, Question
from benchmarks.fields.trainer import ContestantTrainer
from benchmarks.fields.workload import Workload
from benchmarks.pipelines.contestants import Contestant
from benchmarks.pipelines.memory import PeakMemory
from benchmarks.pipelines.runner import RankResult, Runner
from benchmarks.sequences.workload import SequencesWorkload
from torchrec_picasso import CommCurves, FrequencyStats
from torchrec_picasso.launch.progress import Progress
from torchrec_picasso.launch.quiet import quiet_upstream
from torchrec_picasso.runs.dense_probe import measure_dense_of
from torchrec_picasso.runs.local_probe import measure_local_costs
from torchrec_picasso.runs.pipelines import describe_pipeline

__all__ = ["RankAnswer", "compare_on_rank", "make_workload"]

_MAX_BATCHES = 32
_CHOICE_STEPS = 100
"""Most steps of a pipeline's choice between all its settings."""


@dataclass(frozen=True, kw_only=True)
class RankAnswer:
    """What one rank brings home.

    Args:
        results: Of the contestants.
        says: What the planner of each predicts, on the first rank.
        chose: What each pipeline says of its modules and its choice.
        predicted: What the cost model says of each, in its micro-batches; without those it has no
            price for.
        dense_bytes: Sent per step to sum dense gradients.
    """

    results: list[RankResult]
    says: dict[str, str]
    chose: dict[str, str]
    predicted: dict[str, Predicted]
    dense_bytes: float


def make_workload(question: Question) -> Workload:
    """What the question's contestants train."""
    if question.model == "sequences":
        return SequencesWorkload(
            question.data,
            question.batch_size,
            question.seed,
            question.max_rows,
            question.hosts,
        )
    if question.model == "columns":
        return ColumnsWorkload(question)
    return FieldsWorkload(question)


def compare_on_rank(
    rank: int, world_size: int, question: Question, curves: CommCurves | None = None
) -> RankAnswer:
    """Measures the links, plans, and lets the contestants take turns.

    Collective: the main function of every rank.

    Args:
        rank: This rank.
        world_size: Ranks in the default process group.
        question: What to measure.
        curves: Of the links; ``None`` = they are measured.
    """
    quiet_upstream()
    contestants = named(question.contestants)
    bench = _Bench(rank, world_size, question, curves)
    progress = Progress(question.model, len(contestants) * (question.rounds + 1), shown=rank == 0)
    runners, says, trainers = [], {}, {}
    for contestant in contestants:
        progress.tell(f"{contestant.name}, building and warming up")
        runner, trainer, says[contestant.name] = bench.make(contestant)
        trainers[contestant.name] = trainer
        runner.train(WARMUP_STEPS)
        runner.settle()
        runner.count(COUNTED_STEPS)
        runners.append(runner)
        progress.advance()
    for turn in range(question.rounds):
        for runner in runners if turn % 2 == 0 else runners[::-1]:
            progress.tell(f"{runner.contestant.name}, round {turn + 1} of {question.rounds}")
            runner.block(question.block_steps)
            progress.advance()
    progress.close()
    results = [runner.result() for runner in runners]
    dist.barrier()  # what pipelines read ahead is on the wire: no rank leaves before the others
    prices = {
        of.contestant.name: bench.predict(
            trainers[of.contestant.name],
            of.num_micro_batches if of.contestant.pipeline == "interleaved" else None,
        )
        for of in results
    }
    return RankAnswer(
        results=results,
        says=says,
        chose={name: describe_pipeline(of.pipeline) for name, of in trainers.items()},
        predicted={name: of for name, of in prices.items() if of is not None},
        dense_bytes=bench.decision.dense.parameter_bytes * 2 * (world_size - 1) / world_size,
    )


class _Bench:
    """What all contestants share: fields, batches, statistics and curves. Collective."""

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
        dist.barrier()  # nothing else uses the cores while the links are measured
        self._curves = curves or CommCurves.measure(pg)
        if question.local_costs:
            local = measure_local_costs()
            self._curves = dataclasses.replace(self._curves, local=local)
        if question.dense:
            model = self._workload.model()
            dense = measure_dense_of(model, self._batches[0], question.batch_size)
            self._curves = dataclasses.replace(self._curves, dense=dense)
        self.decision = decide_hot_cold(
            self._workload.model(), pg, question.batch_size, self._stats, self._curves
        )

    def predict(
        self, trainer: ContestantTrainer, num_micro_batches: int | None
    ) -> Predicted | None:
        """What the cost model says of a contestant."""
        return predict(self.decision, trainer.placement, num_micro_batches)

    def make(self, contestant: Contestant) -> tuple[Runner, ContestantTrainer, str]:
        """A contestant at work, its trainer, and what its planner says."""
        memory = PeakMemory()
        model = self._workload.model()
        planned = self._plan(contestant, model)
        trainer = ContestantTrainer(
            contestant, model, self._workload.tables, planned, self._pg, self._question.seed
        )
        runner = Runner(
            contestant,
            trainer,
            self._batches,
            self._question.num_steps,
            choice_steps=_CHOICE_STEPS,
            on_links=self._question.rate_mbit is not None,
            memory=memory,
        )
        return runner, trainer, planned.says

    def _plan(self, contestant: Contestant, model: nn.Module) -> Planned:
        size, tables = self._question.batch_size, self._workload.tables
        if contestant.placement == "table_wise":
            return plan_table_wise(tables, model, self._pg)
        if contestant.placement == "bags":
            return plan_bags(tables, model, self._pg)
        if contestant.placement == "planner":
            return plan_stock(tables, model, self._pg, size)
        return plan_hot_cold(model, self._pg, size, contestant.hot_rows, self._stats, self._curves)
