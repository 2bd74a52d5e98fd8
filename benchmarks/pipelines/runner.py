"""One variant on the clock, on one rank.

All variants of a run live in the same ranks and take turns. A turn is a block of steps between
two barriers: the pipeline has read ahead when its turn comes, and what it sent ahead has arrived,
so the block's first step is cheaper than a step of a running training and is not timed. The steps
behind it are: each inherits as much work in flight as it leaves behind.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
import subprocess
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader
from torchrec.datasets.utils import Batch
from torchrec.distributed.train_pipeline import TrainPipeline
from torchrec.distributed.types import ShardingPlan

from benchmarks.cluster.enter_host import HOST_INTERFACE
from benchmarks.cluster.namespaces import tool_path
from benchmarks.pipelines.memory import PeakMemory
from benchmarks.pipelines.question import COUNTED_STEPS, WARMUP_STEPS, Settings
from benchmarks.pipelines.variants import Variant, pipeline_maker
from benchmarks.turns import in_turns
from torchrec_picasso.app.config import TrainConfig
from torchrec_picasso.app.launch.progress import Progress
from torchrec_picasso.app.runs.pipelines import is_settled
from torchrec_picasso.app.runs.placements import Placement
from torchrec_picasso.app.runs.trainer import Trainer
from torchrec_picasso.app.runs.wire_meter import WireMeter
from torchrec_picasso.app.zoo.data.source import BatchSource
from torchrec_picasso.placement import Form, HotColdParams
from torchrec_picasso.schedule.schedule import NUM_BATCHES
from torchrec_picasso.train_pipeline.micro_batch_policy import is_due

_SETTLE_S = 0.02
_CHOICE_STEPS = 100
"""More than any pipeline takes to choose its micro-batches."""
_LAST_EARLY_CHECK = 64
"""The check of the cut after it comes in step 256."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """Measurements of one rank in one turn.

    Args:
        step_s: Wall seconds of each timed step.
        thread_s: CPU seconds of the thread that trains, in the same steps.
        cpu_s: CPU seconds of the whole process per step of the block.
        link_bytes: Bytes that this rank's host put on its link per step of the block; ``None`` on
            loopback.
    """

    step_s: list[float]
    thread_s: list[float]
    cpu_s: float
    link_bytes: float | None


@dataclass(frozen=True, kw_only=True)
class RankResult:
    """Measurements of one rank and one variant.

    Args:
        variant: Measured variant.
        blocks: Measurements of each turn.
        losses: This rank's loss of every step until its data ended.
        metered_bytes: Bytes that this rank sent per step, by the byte meter.
        collectives: Collectives per step.
        tables: Number of tables by sharding type.
        hot_rows: Number of replicated rows.
        trains_same_model: Whether it trains what an unsharded model would.
        peak_bytes: Most memory of this rank that it took, up to its counted steps; ``None`` where
            the system does not tell.
        num_micro_batches: Number that an interleaved pipeline used; ``None`` if it does not say.
        lookahead: Lookahead that it used; ``None`` as above.
    """

    variant: Variant
    blocks: list[Block]
    losses: list[float]
    metered_bytes: float
    collectives: float
    tables: dict[str, int]
    hot_rows: int
    trains_same_model: bool
    peak_bytes: int | None = None
    num_micro_batches: int | None = None
    lookahead: bool | None = None


class Trains(Protocol):
    """A model with its pipeline, such as :class:`torchrec_picasso.app.runs.trainer.Trainer`."""

    placement: Placement

    @property
    def pipeline(self) -> TrainPipeline:
        """The train pipeline."""
        ...

    def steps(self, batches: Iterable[Batch]) -> Iterator[Tensor]:
        """This rank's loss of each step, until the batches end."""
        ...


class Runner:
    """A variant at work. Collective: every rank makes one and calls the same methods.

    Args:
        variant: Measured variant.
        trainer: Model and pipeline of the variant.
        batches: This rank's batches, used again and again.
        on_links: Whether this rank's host has a link of its own, whose bytes can be counted.
        memory: Begun before the trainer was made.
    """

    def __init__(
        self,
        variant: Variant,
        trainer: Trains,
        batches: Sequence[Batch],
        on_links: bool = False,
        memory: PeakMemory | None = None,
    ) -> None:
        self.variant = variant
        self._on_links, self._memory = on_links, memory
        self._peak_bytes: int | None = None
        self._placement, self._pipeline = trainer.placement, trainer.pipeline
        self._batches = _UntilEnded(_loaded(variant, trainer.pipeline, batches))
        self._steps = trainer.steps(self._batches)
        self._losses: list[Tensor] = []
        self._blocks: list[Block] = []
        self._num_metered = self._sent_bytes = self._num_collectives = 0

    def train(self, num_steps: int) -> None:
        """Trains steps without measuring them."""
        for _ in range(num_steps):
            self._losses.append(next(self._steps))

    def settle(self, num_ahead: int) -> None:
        """Lets a pipeline that chooses its micro-batches choose, and check them on early batches.

        A check of the cut takes two steps' time or three and comes in steps 1, 2, 4, 8, 16, 64, 256
        and ever more rarely: among some tens of timed steps one would count as in no training.
        """
        for _ in range(_CHOICE_STEPS):
            if is_settled(self._pipeline):
                break
            self.train(1)
        else:
            raise AssertionError(f"{self.variant.name} chose nothing in {_CHOICE_STEPS} steps")
        if self.variant.chooses:
            self.train(NUM_BATCHES)  # those in flight have the last setting that was tried
        if (schedule_used(self.variant, self._pipeline)[0] or 1) > 1:
            self.train(steps_past_checks(len(self._losses), num_ahead))

    def warm_up(self, num_ahead: int) -> None:
        """Takes the steps before the turns, ``num_ahead`` of which follow in all."""
        self.train(WARMUP_STEPS)
        self.settle(num_ahead)
        self.count(COUNTED_STEPS)

    def count(self, num_steps: int) -> None:
        """Takes steps under the byte meter, which slows them."""
        self._train_metered(num_steps)
        self._peak_bytes = self._memory.read() if self._memory is not None else None

    def block(self, num_steps: int) -> Block:
        """Takes one turn: a step that is metered, not timed, and ``num_steps`` that are timed."""
        self._train_metered(1)
        link_bytes, cpu_s = self._counters()
        step_s, thread_s = [], []
        for _ in range(num_steps):
            start_s, start_thread_s = time.perf_counter(), time.thread_time()
            self.train(1)
            thread_s.append(time.thread_time() - start_thread_s)
            step_s.append(time.perf_counter() - start_s)
        end_link_bytes, end_cpu_s = self._counters()
        has_link = link_bytes is not None and end_link_bytes is not None
        block = Block(
            step_s=step_s,
            thread_s=thread_s,
            cpu_s=(end_cpu_s - cpu_s) / num_steps,
            link_bytes=(end_link_bytes - link_bytes) / num_steps if has_link else None,  # type: ignore[operator]
        )
        self._blocks.append(block)
        return block

    def result(self) -> RankResult:
        """Measurements of this rank. Ends the data: batches that were read ahead are trained."""
        self._batches.end()
        collections.deque(self._steps, maxlen=0)
        tables, hot_rows, is_exact = _describe(self._placement)
        num_micro_batches, lookahead = schedule_used(self.variant, self._pipeline)
        return RankResult(
            variant=self.variant,
            blocks=self._blocks,
            losses=[float(loss) for loss in self._losses],
            metered_bytes=self._sent_bytes / max(1, self._num_metered),
            collectives=self._num_collectives / max(1, self._num_metered),
            tables=tables,
            hot_rows=hot_rows,
            trains_same_model=is_exact,
            peak_bytes=self._peak_bytes,
            num_micro_batches=num_micro_batches,
            lookahead=lookahead,
        )

    def _train_metered(self, num_steps: int) -> None:
        """Takes steps of which bytes and collectives count; batches differ, so more say more."""
        with WireMeter() as meter:
            self.train(num_steps)
        self._num_metered += num_steps
        self._sent_bytes += meter.count.sent_bytes
        self._num_collectives += meter.count.num_collectives

    def _counters(self) -> tuple[int | None, float]:
        """Link bytes and CPU seconds so far, between two barriers and with the link at rest."""
        dist.barrier()
        link_bytes = _settled_link_bytes() if self._on_links else None
        cpu_s = time.process_time()
        dist.barrier()
        return link_bytes, cpu_s


def take_turns(runners: Sequence[Runner], settings: Settings, progress: Progress) -> None:
    """Runs every runner's blocks in turns. Collective."""
    for turn, runner in in_turns(runners, settings.rounds):
        progress.tell(f"{runner.variant.name}, round {turn + 1} of {settings.rounds}")
        runner.block(settings.block_steps)
        progress.advance()
    progress.close()


def _loaded(variant: Variant, pipeline: Any, batches: Sequence[Batch]) -> Iterator[Any]:
    """Cycles through batches, those of a DataLoader if the variant has one."""
    if variant.num_workers is None:
        return itertools.cycle(batches)
    loader = DataLoader(
        batches,  # type: ignore[arg-type]
        batch_size=None,
        sampler=itertools.cycle(range(len(batches))),
        collate_fn=pipeline.preparation() if variant.prepares else lambda batch: batch,
        num_workers=variant.num_workers,
        multiprocessing_context="fork" if variant.num_workers else None,
    )
    return iter(loader)


class _UntilEnded:
    """Gives batches until :meth:`end`."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches, self._is_ended = batches, False

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._is_ended:
            raise StopIteration
        return next(self._batches)

    def end(self) -> None:
        """Gives no more."""
        self._is_ended = True


def dlrm_trainer(
    variant: Variant, config: TrainConfig, source: BatchSource, curves: str | None = None
) -> Trainer:
    """Trainer of a DLRM for a variant. Collective."""
    return Trainer(
        _with_sharding(config, variant, curves),
        source,
        placement=variant.placement,
        make_pipeline=pipeline_maker(variant),
        change_plan=None if variant.form is None else partial(_set_form, variant.form),
    )


def _set_form(form: Form, plan: ShardingPlan) -> None:
    """Gives the row-exchanged tables of a plan another form."""
    for module_plan in plan.plan.values():
        for sharding in module_plan.values():  # type: ignore[attr-defined]
            params = sharding.cache_params
            if isinstance(params, HotColdParams) and params.form != "bags":
                params.form = form


def schedule_used(variant: Variant, pipeline: Any) -> tuple[int | None, bool | None]:
    """Micro-batches and lookahead as the pipeline tells them, or as it was told."""
    if variant.pipeline != "interleaved":
        return None, None
    return (
        getattr(pipeline, "num_micro_batches", variant.num_micro_batches),
        getattr(pipeline, "lookahead", variant.lookahead),
    )


def steps_past_checks(num_taken: int, num_ahead: int) -> int:
    """Steps to take so that of the ones after them none begins with a check, as far as step 64."""
    past = num_taken
    while past < _LAST_EARLY_CHECK and any(is_due(past + 1 + step) for step in range(num_ahead)):
        past += 1
    return past - num_taken


def _with_sharding(config: TrainConfig, variant: Variant, curves: str | None) -> TrainConfig:
    if variant.is_stock:
        return config
    sharding = dataclasses.replace(
        config.sharding,
        hot_rows=variant.hot_rows,
        curves=curves if variant.needs_curves else None,
        num_waves=variant.num_waves,
    )
    return dataclasses.replace(config, sharding=sharding)


def _describe(placement: Placement) -> tuple[dict[str, int], int, bool]:
    """Tables by kind, hot rows, and whether the plan trains what an unsharded model would.

    A table cut into columns gets a row-wise Adagrad state per cut, which is another optimizer.
    """
    tables: dict[str, int] = {}
    hot_rows, is_exact = 0, True
    for module_plan in placement.plan.plan.values():
        for sharding in module_plan.values():
            is_ours = isinstance(sharding.cache_params, HotColdParams)
            kind = "hot_cold" if is_ours else sharding.sharding_type
            tables[kind] = tables.get(kind, 0) + 1
            hot_rows += sharding.cache_params.num_hot_rows if is_ours else 0
            is_exact &= kind != "column_wise" or len(sharding.sharding_spec.shards) == 1
    return tables, hot_rows, is_exact


def _settled_link_bytes() -> int:
    """Bytes that this rank's host has put on its link, once nothing is under way."""
    seen = -1
    while (now := _link_bytes()) != seen:
        seen = now
        time.sleep(_SETTLE_S)
    return seen


def _link_bytes() -> int:
    command = (tool_path("tc"), "-s", "-j", "qdisc", "show", "dev", HOST_INTERFACE)
    (queue,) = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    return queue["bytes"]
