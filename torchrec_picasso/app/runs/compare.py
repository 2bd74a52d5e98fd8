"""Compares stock TorchRec with this package: equal batches and initial weights, alternating blocks.

Both models live in the same ranks and alternate, so that other load of the machine affects both.
Stock trains under its own pipeline, this package under the configured one. What the configuration
leaves open, a stock placement or pipeline settings, is chosen before on models that are discarded.
Steps are of three kinds: warm-up (lazy set-up, DDP's bucket rebuild), counted (under the byte
meter, which slows them) and timed. Losses of all steps are recorded.
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
from torchrec_picasso.app.launch.progress import Progress
from torchrec_picasso.app.launch.quiet import quiet_upstream
from torchrec_picasso.app.runs.placements import STOCK_PLACEMENTS, Placement
from torchrec_picasso.app.runs.trainer import Trainer
from torchrec_picasso.app.runs.wire_meter import WireCount, WireMeter, loopback_sent_bytes
from torchrec_picasso.app.zoo.data.source import BatchSource
from torchrec_picasso.app.zoo.registry import make_source
from torchrec_picasso.schedule.schedule import Setting

_STOCK_PIPELINE = PipelineConfig(kind="sparse_dist")
_COUNTED_STEPS, _BLOCK_STEPS = 2, 5
_PROBE_WARMUP_STEPS, _PROBE_STEPS = 2, 3
_MOST_TUNING_STEPS = 250
"""Steps in which the interleaved pipeline must choose its settings."""


@dataclass(frozen=True, kw_only=True)
class CompareSpec:
    """Parameters of a comparison.

    Args:
        config: The run; ``steps`` is the number of steps of each side.
        stock: Stock placements; if several, they are probed and the fastest is compared.
        warmup_steps: First steps, neither counted nor timed.
        budget_s: Seconds from the start after which no further block begins, except the first;
            ``None`` = no limit.
    """

    config: TrainConfig
    stock: tuple[str, ...] = STOCK_PLACEMENTS
    warmup_steps: int = 3
    budget_s: float | None = None

    @property
    def num_blocks(self) -> int:
        """Timed blocks after the warm-up and the counted steps."""
        rest = self.config.steps - self.warmup_steps - _COUNTED_STEPS
        return max(0, rest) // _BLOCK_STEPS

    @property
    def num_steps(self) -> int:
        """Steps of each side: whole blocks."""
        return self.warmup_steps + _COUNTED_STEPS + self.num_blocks * _BLOCK_STEPS


@dataclass(frozen=True, kw_only=True)
class SideResult:
    """Measurements of one side over all ranks.

    Args:
        placement: Name of the placement.
        hot_cold_tables: Number of hot/cold tables.
        losses: Losses of the global batches.
        sent_bytes_per_step: Bytes sent per rank and step, mean over ranks.
        sent_bytes_by_kind: The same by kind of collective.
        collectives_per_step: Collectives of rank 0 per step.
        step_ms: Wall time of a step, median over blocks.
        cpu_s_per_step: CPU seconds of all ranks, median over blocks.
        loopback_bytes_per_step: The kernel's byte count of ``lo`` per rank and step, if available.
        hot_share: Share of lookups served by a replica, 0 to 1.
    """

    placement: str
    hot_cold_tables: int
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

    Returns:
        ``stock`` and ``ours`` as :class:`SideResult`; ``probe_ms``, the step time of each probed
        stock placement; ``pipeline``, a description of our pipeline.
    """
    start_s = time.monotonic()
    quiet_upstream()
    source = make_source(spec.config.data, spec.config.seed)
    probe_steps = _PROBE_WARMUP_STEPS + _PROBE_STEPS
    num_probes = len(spec.stock) if len(spec.stock) > 1 else 0
    progress = Progress("compare", 2 * spec.num_steps + num_probes * probe_steps, shown=rank == 0)
    batches = list(
        itertools.islice(source.batches(rank, world_size), max(spec.num_steps, probe_steps))
    )
    # our side first, so that hot rows that do not fit end the run early
    pipeline = _tuned_pipeline(spec, source, batches, progress)
    gc.collect()
    ours = _Side("hot_cold", spec, source, pipeline)
    probe_ms: dict[str, float] = {}
    for name in spec.stock if num_probes else ():
        progress.tell(f"probing {name}")
        probe_ms[name] = _probe(name, spec, source, batches, progress)
    sides = [_Side(_fastest_equal(spec, probe_ms), spec, source, _STOCK_PIPELINE), ours]
    _run_sides(sides, spec, batches[: spec.num_steps], progress, start_s)
    progress.close()
    stock_result, our_result = (side.result(batches) for side in sides)
    return {
        "stock": stock_result,
        "ours": our_result,
        "pipeline": _described(pipeline),
        "probe_ms": probe_ms,
    }


def _tuned_pipeline(
    spec: CompareSpec, source: BatchSource, batches: list[Batch], progress: Progress
) -> PipelineConfig:
    """The configured pipeline with automatic settings filled in, equal on all ranks."""
    config = spec.config.pipeline
    if config.kind != "interleaved" or None not in (config.num_micro_batches, config.lookahead):
        return config
    trainer = Trainer(spec.config, source, placement="hot_cold")
    pipeline = trainer.interleaved
    assert pipeline is not None

    def until_settled() -> Iterator[Batch]:
        for step, batch in zip(range(_MOST_TUNING_STEPS), itertools.cycle(batches)):
            if pipeline.is_settled:
                return
            progress.tell(f"choosing micro-batches, step {step}")
            progress.advance(0)
            yield batch

    for _ in trainer.steps(until_settled()):
        pass
    return dataclasses.replace(
        config, num_micro_batches=pipeline.num_micro_batches, lookahead=pipeline.lookahead
    )


def _described(pipeline: PipelineConfig) -> str:
    if pipeline.num_micro_batches is None or pipeline.lookahead is None:
        return pipeline.kind
    return f"{pipeline.kind}, {Setting(pipeline.num_micro_batches, pipeline.lookahead)}"


def _fastest_equal(spec: CompareSpec, probe_ms: Mapping[str, float]) -> str:
    """The fastest stock placement that is numerically equivalent.

    Column-wise sharding keeps a row-wise Adagrad state per column shard, which is another
    optimizer; it is probed, but not compared.
    """
    is_rowwise = spec.config.optimizer.embedding_optimizer == "rowwise_adagrad"
    equal = [name for name in spec.stock if not (is_rowwise and name == "column_wise")]
    return min(equal or spec.stock, key=lambda name: probe_ms.get(name, 0.0))


def _probe(
    name: str, spec: CompareSpec, source: BatchSource, batches: list[Batch], progress: Progress
) -> float:
    """Step time of a stock placement in ms, that of the slowest rank."""
    trainer = Trainer(_with_pipeline(spec, _STOCK_PIPELINE), source, placement=name)
    trainer.train(batches, _PROBE_WARMUP_STEPS)
    dist.barrier()
    start_s = time.perf_counter()
    trainer.train(batches[_PROBE_WARMUP_STEPS:], _PROBE_STEPS)
    wall_s = torch.tensor(time.perf_counter() - start_s)
    dist.all_reduce(wall_s, dist.ReduceOp.MAX)
    progress.advance(_PROBE_WARMUP_STEPS + _PROBE_STEPS)
    del trainer
    gc.collect()
    return float(wall_s) / _PROBE_STEPS * 1e3


def _with_pipeline(spec: CompareSpec, pipeline: PipelineConfig) -> TrainConfig:
    return dataclasses.replace(spec.config, pipeline=pipeline)


def _run_sides(
    sides: list[_Side],
    spec: CompareSpec,
    batches: list[Batch],
    progress: Progress,
    start_s: float,
) -> None:
    counted = spec.warmup_steps + _COUNTED_STEPS
    for side in sides:
        progress.tell(f"{side.name}, warm-up")
        side.train(batches[: spec.warmup_steps], progress)
        side.count(batches[spec.warmup_steps : counted], progress)
    for block in range(spec.num_blocks):
        if block and spec.budget_s is not None:
            elapsed_s = torch.tensor(time.monotonic() - start_s)
            dist.all_reduce(elapsed_s, dist.ReduceOp.MAX)  # all ranks stop at the same block
            if elapsed_s > spec.budget_s:
                return
        start = counted + block * _BLOCK_STEPS
        for side in sides if block % 2 == 0 else sides[::-1]:
            progress.tell(f"{side.name}, timed")
            side.time(batches[start : start + _BLOCK_STEPS], progress)


class _Side:
    """A model under comparison, with its measurements on this rank."""

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
        self._loopback_bytes: list[int] = []

    def train(self, batches: list[Batch], progress: Progress) -> None:
        self._losses.append(self._trainer.train(batches))
        progress.advance(len(batches))

    def count(self, batches: list[Batch], progress: Progress) -> None:
        with WireMeter() as meter:
            self.train(batches, progress)
        self._count = meter.count

    def time(self, batches: list[Batch], progress: Progress) -> None:
        dist.barrier()
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        start_bytes = loopback_sent_bytes()
        dist.barrier()  # no rank sends before all have read the kernel's counter
        self.train(batches, progress)
        dist.barrier()
        end_bytes = loopback_sent_bytes()
        self._wall_s.append((time.perf_counter() - start_s) / len(batches))
        self._cpu_s.append((time.process_time() - start_cpu_s) / len(batches))
        if start_bytes is not None and end_bytes is not None:
            self._loopback_bytes.append(end_bytes - start_bytes)

    def result(self, batches: list[Batch]) -> SideResult:
        """Combines the measurements of all ranks. Collective."""
        world_size = dist.get_world_size()
        hot, lookups = _hot_lookups(self._trainer.placement, batches[: self._spec.num_steps])
        ranks: list[Any] = [None] * world_size
        dist.all_gather_object(
            ranks, (self._wall_s, self._cpu_s, self._count.bytes_by_kind, hot, lookups)
        )
        wall_s, cpu_s, sent_bytes, hot_lookups, all_lookups = zip(*ranks)
        bytes_by_kind = {
            kind: sum(counts.get(kind, 0) for counts in sent_bytes) / world_size / _COUNTED_STEPS
            for kind in sorted({kind for counts in sent_bytes for kind in counts})
        }
        # A block ends at a barrier, so its wall time is that of the slowest rank.
        block_wall_s = [max(walls) for walls in zip(*wall_s)]
        block_cpu_s = [sum(cpus) for cpus in zip(*cpu_s)]
        step_s = statistics.median(block_wall_s) if block_wall_s else float("nan")
        loopback_bytes = None
        if self._loopback_bytes:
            loopback_bytes = statistics.median(self._loopback_bytes) / _BLOCK_STEPS / world_size
        return SideResult(
            placement=self.name,
            hot_cold_tables=len(self._trainer.placement.hot_rows),
            losses=self._trainer.mean_over_ranks(torch.cat(self._losses)),
            sent_bytes_per_step=sum(bytes_by_kind.values()),
            sent_bytes_by_kind=bytes_by_kind,
            collectives_per_step=self._count.num_collectives / _COUNTED_STEPS,
            step_ms=step_s * 1e3,
            cpu_s_per_step=statistics.median(block_cpu_s) if block_cpu_s else float("nan"),
            block_cpu_s_per_step=block_cpu_s,
            samples_per_s=self._spec.config.data.batch_size * world_size / step_s,
            loopback_bytes_per_step=loopback_bytes,
            hot_share=sum(hot_lookups) / max(1, sum(all_lookups)),
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
