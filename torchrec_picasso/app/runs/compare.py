"""Stock TorchRec against this package: equal batches and first weights, alternating blocks.

Both models live in the same ranks and take turns, so that whatever else the machine does hits both.
Stock trains under its own pipeline, this package under the configured one. What either side leaves
open, a placement or the pipeline's settings, is probed first, on a model that is thrown away.
Steps come in three kinds: warm-up (lazy set-up, DDP bucket rebuild), counted (under the byte meter,
which slows them) and timed. Losses are kept of all of them.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.datasets.utils import Batch

from torchrec_picasso.app.config import PipelineConfig, TrainConfig
from torchrec_picasso.app.launch.loopback import loopback_sent_bytes
from torchrec_picasso.app.launch.progress import Progress
from torchrec_picasso.app.launch.quiet import quiet_upstream
from torchrec_picasso.app.runs.placements import STOCK_PLACEMENTS, Placement
from torchrec_picasso.app.runs.trainer import Trainer
from torchrec_picasso.app.zoo.data.source import BatchSource
from torchrec_picasso.app.zoo.registry import make_source
from torchrec_picasso.exchange.meter import WireCount, WireMeter
from torchrec_picasso.schedule.schedule import Setting
from torchrec_picasso.train_pipeline.interleaved import InterleavedTrainPipeline

__all__ = ["CompareSpec", "SideResult", "compare_on_rank"]

_STOCK_PIPELINE = PipelineConfig(kind="sparse_dist")


@dataclass(frozen=True, kw_only=True)
class CompareSpec:
    """What to compare and for how long.

    Args:
        config: The run; ``steps`` is all steps of each side.
        stock: Stock placements to choose from; more than one are probed and the fastest is taken.
        warmup_steps: First steps, neither counted nor timed.
        counted_steps: Next steps, under the byte meter.
        block_steps: Steps of one timed block.
        probe_steps: Timed steps of each probed stock placement.
        most_choice_steps: Steps in which the interleaved pipeline must choose what the
            configuration leaves to it.
        budget_s: Seconds from the start after which no further block begins, but the first;
            ``None`` = no limit.
    """

    config: TrainConfig
    stock: tuple[str, ...] = STOCK_PLACEMENTS
    warmup_steps: int = 3
    counted_steps: int = 2
    block_steps: int = 5
    probe_steps: int = 3
    most_choice_steps: int = 250
    budget_s: float | None = None

    @property
    def num_blocks(self) -> int:
        """Timed blocks that fit behind the warm-up and the counted steps."""
        rest = self.config.steps - self.warmup_steps - self.counted_steps
        return max(0, rest) // self.block_steps

    @property
    def num_steps(self) -> int:
        """Steps that each side really takes: whole blocks."""
        return self.warmup_steps + self.counted_steps + self.num_blocks * self.block_steps


@dataclass(frozen=True, kw_only=True)
class SideResult:
    """What one side of the comparison did, over all ranks.

    Args:
        placement: Its placement.
        losses: Of every global batch.
        sent_bytes_per_step: Bytes that a rank sends per step, mean over ranks.
        sent_bytes_by_kind: The same by collective.
        collectives_per_step: Collectives that rank 0 takes part in per step.
        step_ms: Wall time of a step, median over blocks.
        cpu_s_per_step: CPU seconds of all ranks per step, median over blocks.
        block_cpu_s_per_step: The same for each block.
        samples_per_s: Of all ranks together.
        loopback_bytes_per_step: What the kernel counted on ``lo``, per rank and step; ``None``
            where it does not count.
        hot_share: Share of lookups that a replica served, 0 to 1.
    """

    placement: str
    losses: list[float]
    sent_bytes_per_step: float
    sent_bytes_by_kind: Mapping[str, float]
    collectives_per_step: float
    step_ms: float
    cpu_s_per_step: float
    block_cpu_s_per_step: list[float]
    samples_per_s: float
    loopback_bytes_per_step: float | None
    hot_share: float


def compare_on_rank(rank: int, world_size: int, spec: CompareSpec) -> dict[str, Any]:
    """Runs the comparison. Collective: the main function of every rank.

    Args:
        rank: This rank.
        world_size: Ranks in the default process group.
        spec: What to compare.

    Returns:
        ``stock`` and ``ours`` as :class:`SideResult`, ``probe_ms``, the step time of each stock
        placement that was probed, and ``pipeline``, what trains ours.
    """
    start_s = time.monotonic()
    quiet_upstream()
    source = make_source(spec.config.data, spec.config.seed)
    progress = Progress("compare", _total_steps(spec), shown=rank == 0)
    probe_steps = spec.warmup_steps + spec.probe_steps
    batches = list(
        itertools.islice(source.batches(rank, world_size), max(spec.num_steps, probe_steps))
    )
    # ours first, so that hot rows that do not fit end the run
    pipeline = _chosen_pipeline(spec, source, batches, progress)
    gc.collect()
    ours = _Side("hot_cold", spec, source, pipeline)
    probe_ms: dict[str, float] = {}
    if len(spec.stock) > 1:
        for name in spec.stock:
            progress.tell(f"probing {name}")
            probe_ms[name] = _probe(name, spec, source, batches, progress)
    sides = [_Side(_fastest_equal(spec, probe_ms), spec, source, _STOCK_PIPELINE), ours]
    _run_sides(sides, spec, batches[: spec.num_steps], progress, start_s)
    progress.close()
    results = [side.result(batches) for side in sides]
    told = {"pipeline": _spelled(pipeline), "probe_ms": probe_ms}
    return {"stock": results[0], "ours": results[1], **told}


def _chosen_pipeline(
    spec: CompareSpec, source: BatchSource, batches: list[Batch], progress: Progress
) -> PipelineConfig:
    """The configured pipeline with what it chooses filled in, the same on every rank."""
    asked = spec.config.pipeline
    if asked.kind != "interleaved" or None not in (asked.num_micro_batches, asked.lookahead):
        return asked
    trainer = Trainer(spec.config, source, placement="hot_cold")
    pipeline = trainer.pipeline
    assert isinstance(pipeline, InterleavedTrainPipeline)

    def until_settled() -> Iterator[Batch]:
        for step, batch in zip(range(spec.most_choice_steps), itertools.cycle(batches)):
            if pipeline.is_settled:
                return
            progress.tell(f"choosing micro-batches, step {step}")
            progress.advance(0)
            yield batch

    trainer.train(until_settled())
    return dataclasses.replace(
        asked,
        num_micro_batches=pipeline.num_micro_batches,
        lookahead=pipeline.lookahead,
    )


def _spelled(pipeline: PipelineConfig) -> str:
    if pipeline.num_micro_batches is None or pipeline.lookahead is None:
        return pipeline.kind
    setting = Setting(pipeline.num_micro_batches, pipeline.lookahead)
    return f"{pipeline.kind}, {setting}"


def _fastest_equal(spec: CompareSpec, probe_ms: Mapping[str, float]) -> str:
    """The fastest stock placement that trains what the configuration asks for.

    Column-wise sharding gives each column shard a row-wise Adagrad state of its own, which is
    another optimizer with other losses; it is probed, but not compared with.
    """
    is_rowwise = spec.config.optimizer.embedding_optimizer == "rowwise_adagrad"
    equal = [name for name in spec.stock if not (is_rowwise and name == "column_wise")]
    equal = equal or list(spec.stock)
    return min(equal, key=lambda name: probe_ms.get(name, 0.0))


def _total_steps(spec: CompareSpec) -> int:
    probed = len(spec.stock) if len(spec.stock) > 1 else 0
    return 2 * spec.num_steps + probed * (spec.warmup_steps + spec.probe_steps)


def _probe(
    name: str, spec: CompareSpec, source: BatchSource, batches: list[Batch], progress: Progress
) -> float:
    """Milliseconds per step of one stock placement, the slowest rank's."""
    trainer = Trainer(_with_pipeline(spec, _STOCK_PIPELINE), source, placement=name)
    trainer.train(batches, spec.warmup_steps)
    dist.barrier()
    start_s = time.perf_counter()
    trainer.train(batches[spec.warmup_steps :], spec.probe_steps)
    wall_s = torch.tensor(time.perf_counter() - start_s)
    dist.all_reduce(wall_s, dist.ReduceOp.MAX)
    progress.advance(spec.warmup_steps + spec.probe_steps)
    del trainer
    gc.collect()
    return float(wall_s) / spec.probe_steps * 1e3


def _with_pipeline(spec: CompareSpec, pipeline: PipelineConfig) -> TrainConfig:
    return dataclasses.replace(spec.config, pipeline=pipeline)


def _run_sides(
    sides: list[_Side],
    spec: CompareSpec,
    batches: list[Batch],
    progress: Progress,
    start_s: float,
) -> None:
    counted = spec.warmup_steps + spec.counted_steps
    for side in sides:
        progress.tell(f"{side.name}, warm-up")
        side.warm_up(batches[: spec.warmup_steps], progress)
        side.count(batches[spec.warmup_steps : counted], progress)
    for block in range(spec.num_blocks):
        if block and spec.budget_s is not None:
            elapsed_s = torch.tensor(time.monotonic() - start_s)
            dist.all_reduce(elapsed_s, dist.ReduceOp.MAX)  # all ranks stop at the same block
            if elapsed_s > spec.budget_s:
                return
        start = counted + block * spec.block_steps
        # Each side goes first in every other block.
        for side in sides if block % 2 == 0 else sides[::-1]:
            progress.tell(f"{side.name}, timed")
            side.time(batches[start : start + spec.block_steps], progress)


class _Side:
    """One model under comparison and what was measured of it."""

    def __init__(
        self, name: str, spec: CompareSpec, source: BatchSource, pipeline: PipelineConfig
    ) -> None:
        self.name = name
        self._spec = spec
        self._trainer = Trainer(_with_pipeline(spec, pipeline), source, placement=name)
        self._losses: list[Tensor] = []
        self._count = WireCount(num_collectives=0, sent_bytes=0)
        self._wall_s: list[float] = []
        self._cpu_s: list[float] = []
        self._loopback_bytes: list[int | None] = []

    def warm_up(self, batches: list[Batch], progress: Progress) -> None:
        self._train(batches, progress)

    def count(self, batches: list[Batch], progress: Progress) -> None:
        with WireMeter() as meter:
            self._train(batches, progress)
        self._count = meter.count

    def time(self, batches: list[Batch], progress: Progress) -> None:
        dist.barrier()
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        start_bytes = loopback_sent_bytes()
        dist.barrier()  # nobody sends before every rank has read the kernel's counter
        self._train(batches, progress)
        dist.barrier()
        end_bytes = loopback_sent_bytes()
        self._wall_s.append((time.perf_counter() - start_s) / len(batches))
        self._cpu_s.append((time.process_time() - start_cpu_s) / len(batches))
        is_counted = start_bytes is not None and end_bytes is not None
        self._loopback_bytes.append(end_bytes - start_bytes if is_counted else None)  # type: ignore[operator]

    def _train(self, batches: list[Batch], progress: Progress) -> None:
        self._losses.append(self._trainer.train(batches))
        progress.advance(len(batches))

    def result(self, batches: list[Batch]) -> SideResult:
        """Brings all ranks' numbers together. Collective."""
        world_size = dist.get_world_size()
        num_counted = max(1, self._spec.counted_steps)
        hot, lookups = _hot_lookups(self._trainer.placement, batches[: self._spec.num_steps])
        mine = {
            "wall_s": self._wall_s,
            "cpu_s": self._cpu_s,
            "bytes": self._count.bytes_by_kind,
            "hot": hot,
            "lookups": lookups,
        }
        ranks: list[Any] = [None] * world_size
        dist.all_gather_object(ranks, mine)
        bytes_by_kind = {
            kind: sum(rank["bytes"].get(kind, 0) for rank in ranks) / world_size / num_counted
            for kind in sorted({kind for rank in ranks for kind in rank["bytes"]})
        }
        # Blocks end at barriers: the slowest rank's wall time counts, and the CPU time of all.
        block_wall_s = [max(walls) for walls in zip(*(rank["wall_s"] for rank in ranks))]
        block_cpu_s = [sum(cpus) for cpus in zip(*(rank["cpu_s"] for rank in ranks))]
        step_s = statistics.median(block_wall_s) if block_wall_s else float("nan")
        samples = self._spec.config.data.batch_size * world_size
        kernel = [count for count in self._loopback_bytes if count is not None]
        kernel_steps = self._spec.block_steps * world_size
        return SideResult(
            placement=self.name,
            losses=self._trainer.mean_over_ranks(torch.cat(self._losses)),
            sent_bytes_per_step=sum(bytes_by_kind.values()),
            sent_bytes_by_kind=bytes_by_kind,
            collectives_per_step=self._count.num_collectives / num_counted,
            step_ms=step_s * 1e3,
            cpu_s_per_step=statistics.median(block_cpu_s) if block_cpu_s else float("nan"),
            block_cpu_s_per_step=block_cpu_s,
            samples_per_s=samples / step_s,
            loopback_bytes_per_step=statistics.median(kernel) / kernel_steps if kernel else None,
            hot_share=sum(r["hot"] for r in ranks) / max(1, sum(r["lookups"] for r in ranks)),
        )


def _hot_lookups(placement: Placement, batches: list[Batch]) -> tuple[int, int]:
    """Lookups of hot rows, and all lookups, of this rank's batches."""
    hot = lookups = 0
    for batch in batches:
        for feature, jagged in batch.sparse_features.to_dict().items():
            lookups += jagged.values().numel()
            rows = placement.hot_rows.get(f"t_{feature}")
            if rows is not None and rows.numel():
                hot += int(torch.isin(jagged.values(), rows).sum())
    return hot, lookups
