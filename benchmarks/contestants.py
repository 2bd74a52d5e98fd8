"""One contestant of ``benchmarks.pipelines``: a placement under a train pipeline, on the clock.

All contestants of a run live in the same ranks and take turns. A turn is a block of steps between
two barriers: the pipeline has read ahead when its turn comes, and what it sent ahead has arrived,
so the block's first step is cheaper than a step of a running training and is not timed. The steps
behind it are: each inherits as much work in flight as it leaves behind.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median, quantiles
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torchrec.datasets.utils import Batch
from torchrec.distributed.train_pipeline import TrainPipelineFusedSparseDist

from benchmarks.cluster.enter_host import HOST_INTERFACE
from torchrec_picasso.config import PLACEMENTS, TrainConfig
from torchrec_picasso.errors import ConfigError
from torchrec_picasso.exchange.meter import WireMeter
from torchrec_picasso.placement import HotColdParams
from torchrec_picasso.workloads.placements import Placement
from torchrec_picasso.workloads.source import BatchSource
from torchrec_picasso.workloads.training import MakePipeline, Trainer

__all__ = [
    "Block",
    "Contestant",
    "RankResult",
    "Runner",
    "Standing",
    "interleaved_is_missing",
    "parse_contestant",
    "standings",
]

_SETTLE_S = 0.02
_HELP = (
    "NAME is one of table_wise, row_wise, column_wise, planner, fused, hot_cold, "
    "hot_cold:HOT_ROWS, interleaved:MICRO_BATCHES, interleaved:MICRO_BATCHES:HOT_ROWS"
)


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """A placement and the pipeline that trains it.

    Args:
        name: As given on the command line.
        placement: One of :data:`torchrec_picasso.config.PLACEMENTS`; empty = the best stock one.
        pipeline: ``"sparse_dist"``, ``"fused"`` or ``"interleaved"``.
        hot_rows: Of a hot/cold placement; ``None`` = the planner's own choice.
        num_micro_batches: Of the interleaved pipeline.
    """

    name: str
    placement: str
    pipeline: str = "sparse_dist"
    hot_rows: int | None = None
    num_micro_batches: int = 1

    @property
    def is_stock(self) -> bool:
        """Whether nothing of this package is in it."""
        return self.placement != "hot_cold"

    @property
    def needs_curves(self) -> bool:
        """Whether the planner weighs measured curves for it."""
        return not self.is_stock and self.hot_rows is None


@dataclass(frozen=True, kw_only=True)
class Block:
    """What one rank measured in one turn.

    Args:
        step_s: Wall seconds of each timed step.
        thread_s: CPU seconds of the thread that trains, in the same steps.
        cpu_s: CPU seconds of the whole process per step of the block, the untimed one included.
        link_bytes: Bytes that this rank's host put on its link per step of the block; ``None`` on
            loopback.
    """

    step_s: list[float]
    thread_s: list[float]
    cpu_s: float
    link_bytes: float | None


@dataclass(frozen=True, kw_only=True)
class RankResult:
    """What one rank measured of one contestant.

    Args:
        contestant: Which one.
        blocks: Its turns.
        losses: This rank's loss of every step.
        metered_bytes: Bytes that this rank sent per step, by the byte meter.
        collectives: Collectives per step.
        tables: How many tables are sharded in which way.
        hot_rows: Replicated rows.
        trains_same_model: Whether it trains what an unsharded model would.
    """

    contestant: Contestant
    blocks: list[Block]
    losses: list[float]
    metered_bytes: float
    collectives: float
    tables: dict[str, int]
    hot_rows: int
    trains_same_model: bool


@dataclass(frozen=True, kw_only=True)
class Standing:
    """One contestant's numbers over all ranks; ``benchmarks.pipelines`` says how each is defined.

    Args:
        samples_per_s: Of all ranks together.
        ratio: Of its samples per second to the best stock contestant's.
        ratio_by_round: The same, round by round.
        step_ms: Quartiles: 25, 50 and 75 %.
        cpu_s_per_step: Of all ranks.
        link_bytes_per_step: Of the busiest host; ``None`` on loopback.
        metered_bytes_per_step: Mean over ranks.
        collectives_per_step: That rank 0 takes part in.
        exposed_share: 0 to 1.
        max_loss_difference: Largest relative one to the stock contestant that trains this model.
        trains_same_model: ``False`` where row-wise Adagrad is cut by columns.
        is_stock: Whether nothing of this package is in it.
        tables: How many tables are sharded in which way.
        hot_rows: Replicated rows.
        block_step_ms: Time of every timed step, block by block.
        losses: Of every global batch.
    """

    samples_per_s: float
    ratio: float
    ratio_by_round: list[float]
    step_ms: tuple[float, float, float]
    cpu_s_per_step: float
    link_bytes_per_step: float | None
    metered_bytes_per_step: float
    collectives_per_step: float
    exposed_share: float
    max_loss_difference: float
    trains_same_model: bool
    is_stock: bool
    tables: dict[str, int]
    hot_rows: int
    block_step_ms: list[list[float]]
    losses: list[float]


class Runner:
    """A contestant at work. Collective: every rank makes one and calls the same methods.

    Args:
        contestant: What to train.
        config: The run, without placement and hot rows.
        source: Tells the tables, and the held-out samples that hot rows are chosen from.
        batches: This rank's batches, used again and again.
        num_steps: Steps that it will take in all.
        curves: File of measured curves, for the planner.
        on_links: Whether this rank's host has a link of its own, whose bytes can be counted.
    """

    def __init__(
        self,
        contestant: Contestant,
        config: TrainConfig,
        source: BatchSource,
        batches: Sequence[Batch],
        num_steps: int,
        curves: str | None = None,
        on_links: bool = False,
    ) -> None:
        self.contestant = contestant
        self._on_links = on_links
        trainer = Trainer(
            _with_sharding(config, contestant, curves),
            source,
            placement=contestant.placement,
            make_pipeline=_pipeline_maker(contestant),
        )
        self._placement = trainer.placement
        self._steps = trainer.steps(itertools.cycle(batches), num_steps)
        self._losses: list[Tensor] = []
        self._blocks: list[Block] = []
        self._metered = (0.0, 0.0)

    def train(self, num_steps: int) -> None:
        """Takes steps that nobody looks at."""
        for _ in range(num_steps):
            self._losses.append(next(self._steps))

    def count(self, num_steps: int) -> None:
        """Takes steps under the byte meter, which slows them."""
        with WireMeter() as meter:
            self.train(num_steps)
        count = meter.count
        self._metered = (count.sent_bytes / num_steps, count.num_collectives / num_steps)

    def block(self, num_steps: int) -> Block:
        """Takes one turn: a step that is not timed, and ``num_steps`` that are."""
        link_bytes, cpu_s = self._counters()
        step_s, thread_s = [], []
        self.train(1)
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
            cpu_s=(end_cpu_s - cpu_s) / (num_steps + 1),
            link_bytes=(end_link_bytes - link_bytes) / (num_steps + 1) if has_link else None,  # type: ignore[operator]
        )
        self._blocks.append(block)
        return block

    def result(self) -> RankResult:
        """What this rank measured; call it when all steps are taken."""
        assert next(self._steps, None) is None, "the pipeline still holds batches"
        tables, hot_rows, is_exact = _describe(self._placement)
        return RankResult(
            contestant=self.contestant,
            blocks=self._blocks,
            losses=[float(loss) for loss in self._losses],
            metered_bytes=self._metered[0],
            collectives=self._metered[1],
            tables=tables,
            hot_rows=hot_rows,
            trains_same_model=is_exact,
        )

    def _counters(self) -> tuple[int | None, float]:
        """Link bytes and CPU seconds so far, between two barriers and with the link at rest."""
        dist.barrier()
        link_bytes = _settled_link_bytes() if self._on_links else None
        cpu_s = time.process_time()
        dist.barrier()
        return link_bytes, cpu_s


def parse_contestant(name: str) -> Contestant:
    """A contestant from its name on the command line.

    Raises:
        ConfigError: If there is none of this name.
    """
    kind, *numbers = name.split(":")
    at_most = {"hot_cold": 1, "interleaved": 2}.get(kind, 0)
    known = kind in (*PLACEMENTS, "fused", "interleaved")
    if not known or len(numbers) > at_most or not all(text.isdecimal() for text in numbers):
        raise ConfigError(f"--contestants: got {name!r}; {_HELP}")
    values = [int(text) for text in numbers]
    if kind == "fused":
        return Contestant(name=name, placement="", pipeline="fused")
    if kind == "hot_cold":
        return Contestant(name=name, placement=kind, hot_rows=values[0] if values else None)
    if kind == "interleaved":
        if not values or values[0] < 1:
            raise ConfigError(f"--contestants: got {name!r}, without micro-batches; {_HELP}")
        return Contestant(
            name=name,
            placement="hot_cold",
            pipeline="interleaved",
            num_micro_batches=values[0],
            hot_rows=values[1] if len(values) > 1 else None,
        )
    return Contestant(name=name, placement=kind)


def interleaved_is_missing() -> str | None:
    """Why the interleaved pipeline cannot take part, or ``None``."""
    try:
        _interleaved_pipeline()
    except ImportError:
        return "this torchrec_picasso has no InterleavedTrainPipeline"
    return None


def _interleaved_pipeline() -> Any:
    from torchrec_picasso import InterleavedTrainPipeline  # here: a package without it still runs

    return InterleavedTrainPipeline


def _pipeline_maker(contestant: Contestant) -> MakePipeline | None:
    makers: dict[str, Callable[..., Any] | None] = {
        "sparse_dist": None,
        "fused": TrainPipelineFusedSparseDist,
        "interleaved": lambda model, optimizer, device: _interleaved_pipeline()(
            model, optimizer, device, num_micro_batches=contestant.num_micro_batches
        ),
    }
    return makers[contestant.pipeline]


def _with_sharding(config: TrainConfig, contestant: Contestant, curves: str | None) -> TrainConfig:
    if contestant.is_stock:
        return config
    sharding = dataclasses.replace(
        config.sharding,
        hot_rows=contestant.hot_rows,
        curves=curves if contestant.needs_curves else None,
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


def standings(
    results_RC: Sequence[Sequence[RankResult]], batch_size: int, ranks_per_host: int
) -> dict[str, Standing]:
    """What the ranks measured, by contestant.

    Args:
        results_RC: By rank, then by contestant.
        batch_size: Samples per rank and step.
        ranks_per_host: Ranks that share a link.
    """
    results_CR = list(zip(*results_RC))
    block_s = {of[0].contestant.name: _block_step_s(of) for of in results_CR}
    losses = {of[0].contestant.name: _mean_losses(of) for of in results_CR}
    stock = [of[0] for of in results_CR if of[0].contestant.is_stock]
    best_stock = min((r.contestant.name for r in stock), key=lambda name: median(block_s[name]))
    reference = next((r for r in stock if r.trains_same_model), stock[0]).contestant.name
    found = {}
    for ranks in results_CR:
        name = ranks[0].contestant.name
        blocks = [block for result in ranks for block in result.blocks]
        block_step_ms = [
            [max(steps) * 1e3 for steps in zip(*(result.blocks[turn].step_s for result in ranks))]
            for turn in range(len(ranks[0].blocks))
        ]
        low, middle, high = quantiles(itertools.chain.from_iterable(block_step_ms), n=4)
        wall_s = sum(sum(block.step_s) for block in blocks)
        thread_s = sum(sum(block.thread_s) for block in blocks)
        found[name] = Standing(
            samples_per_s=batch_size * len(ranks) / median(block_s[name]),
            ratio=median(block_s[best_stock]) / median(block_s[name]),
            ratio_by_round=[theirs / s for theirs, s in zip(block_s[best_stock], block_s[name])],
            step_ms=(low, middle, high),
            cpu_s_per_step=sum(median(b.cpu_s for b in result.blocks) for result in ranks),
            link_bytes_per_step=_busiest_link_bytes(ranks[::ranks_per_host]),
            metered_bytes_per_step=fmean(result.metered_bytes for result in ranks),
            collectives_per_step=ranks[0].collectives,
            exposed_share=max(0.0, 1 - thread_s / wall_s),
            max_loss_difference=max(
                abs(loss - of_stock) / abs(of_stock)
                for loss, of_stock in zip(losses[name], losses[reference])
            ),
            trains_same_model=ranks[0].trains_same_model,
            is_stock=ranks[0].contestant.is_stock,
            tables=ranks[0].tables,
            hot_rows=ranks[0].hot_rows,
            block_step_ms=block_step_ms,
            losses=losses[name],
        )
    return found


def _block_step_s(ranks: Sequence[RankResult]) -> list[float]:
    """Seconds per step of every block, the slowest rank's."""
    blocks_BR = zip(*(result.blocks for result in ranks))
    return [max(fmean(block.step_s) for block in blocks_R) for blocks_R in blocks_BR]


def _mean_losses(ranks: Sequence[RankResult]) -> list[float]:
    """Losses of the global batches: ranks have equal batches."""
    return [fmean(losses_R) for losses_R in zip(*(result.losses for result in ranks))]


def _busiest_link_bytes(hosts: Sequence[RankResult]) -> float | None:
    by_host = [[b.link_bytes for b in host.blocks if b.link_bytes is not None] for host in hosts]
    return max(median(host) for host in by_host) if all(by_host) else None


def _settled_link_bytes() -> int:
    """Bytes that this rank's host has put on its link, once nothing is under way."""
    seen = -1
    while (now := _link_bytes()) != seen:
        seen = now
        time.sleep(_SETTLE_S)
    return seen


def _link_bytes() -> int:
    command = ("tc", "-s", "-j", "qdisc", "show", "dev", HOST_INTERFACE)
    (queue,) = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    return queue["bytes"]
