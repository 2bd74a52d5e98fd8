"""From what the ranks measured to each variant's numbers: arithmetic only."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median, quantiles

from benchmarks.pipelines.runner import RankResult


@dataclass(frozen=True, kw_only=True)
class Standing:
    """One variant's numbers over all ranks; the command's help says how each is defined.

    Args:
        samples_per_s: Samples per second of all ranks together.
        ratio: Samples per second over the best stock variant's.
        ratio_by_round: Ratio of each round.
        step_ms: Quartiles: 25, 50 and 75 %.
        cpu_s_per_step: CPU seconds of all ranks.
        thread_ms: CPU time of a thread that trains, over steps and ranks: quartiles, as above.
        link_bytes_per_step: Bytes of the busiest host; ``None`` on loopback.
        metered_bytes_per_step: Mean over ranks.
        collectives_per_step: Collectives that rank 0 takes part in.
        exposed_share: 0 to 1.
        peak_bytes: Most memory that it took on a rank; ``None`` where the system does not tell.
        max_loss_difference: Largest relative one to the stock variant that trains this model.
        trains_same_model: ``False`` where row-wise Adagrad is cut by columns.
        is_stock: Whether others are compared with it, as :attr:`.Variant.is_stock`.
        tables: Number of tables by sharding type.
        hot_rows: Replicated rows.
        is_interleaved: Whether its pipeline is the interleaved one.
        num_micro_batches: Of an interleaved pipeline; ``None`` if it chose and does not say.
        lookahead: Lookahead that it used; ``None`` as above.
        block_step_ms: Time of every timed step, block by block.
        losses: Loss of every global batch.
    """

    samples_per_s: float
    ratio: float
    ratio_by_round: list[float]
    step_ms: tuple[float, float, float]
    cpu_s_per_step: float
    thread_ms: tuple[float, float, float]
    link_bytes_per_step: float | None
    metered_bytes_per_step: float
    collectives_per_step: float
    exposed_share: float
    peak_bytes: int | None
    max_loss_difference: float
    trains_same_model: bool
    is_stock: bool
    tables: dict[str, int]
    hot_rows: int
    is_interleaved: bool
    num_micro_batches: int | None
    lookahead: bool | None
    block_step_ms: list[list[float]]
    losses: list[float]


def rankings(
    results_RC: Sequence[Sequence[RankResult]], batch_size: int, ranks_per_host: int
) -> dict[str, Standing]:
    """Figures of all ranks together, by variant."""
    results_CR = list(zip(*results_RC))
    block_s = {ranks[0].variant.name: _block_step_s(ranks) for ranks in results_CR}
    losses = {ranks[0].variant.name: _mean_losses(ranks) for ranks in results_CR}
    stock = [ranks[0] for ranks in results_CR if ranks[0].variant.is_stock]
    best_stock = min((r.variant.name for r in stock), key=lambda name: median(block_s[name]))
    reference = next((r for r in stock if r.trains_same_model), stock[0]).variant.name
    found = {}
    for ranks in results_CR:
        name = ranks[0].variant.name
        blocks = [block for result in ranks for block in result.blocks]
        block_step_ms = [
            [max(steps) * 1e3 for steps in zip(*(result.blocks[turn].step_s for result in ranks))]
            for turn in range(len(ranks[0].blocks))
        ]
        thread = quantiles([1e3 * s for block in blocks for s in block.thread_s], n=4)
        low, middle, high = quantiles(itertools.chain.from_iterable(block_step_ms), n=4)
        wall_s = sum(sum(block.step_s) for block in blocks)
        thread_s = sum(sum(block.thread_s) for block in blocks)
        found[name] = Standing(
            samples_per_s=batch_size * len(ranks) / median(block_s[name]),
            ratio=median(block_s[best_stock]) / median(block_s[name]),
            ratio_by_round=[theirs / s for theirs, s in zip(block_s[best_stock], block_s[name])],
            step_ms=(low, middle, high),
            cpu_s_per_step=sum(median(b.cpu_s for b in result.blocks) for result in ranks),
            thread_ms=(thread[0], thread[1], thread[2]),
            link_bytes_per_step=_busiest_link_bytes(ranks[::ranks_per_host]),
            metered_bytes_per_step=fmean(result.metered_bytes for result in ranks),
            collectives_per_step=ranks[0].collectives,
            exposed_share=max(0.0, 1 - thread_s / wall_s),
            peak_bytes=max((result.peak_bytes or 0 for result in ranks), default=0) or None,
            max_loss_difference=max(
                abs(loss - stock_loss) / abs(stock_loss)
                for loss, stock_loss in zip(losses[name], losses[reference])
            ),
            trains_same_model=ranks[0].trains_same_model,
            is_stock=ranks[0].variant.is_stock,
            tables=ranks[0].tables,
            hot_rows=ranks[0].hot_rows,
            is_interleaved=ranks[0].variant.pipeline == "interleaved",
            num_micro_batches=ranks[0].num_micro_batches,
            lookahead=ranks[0].lookahead,
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
