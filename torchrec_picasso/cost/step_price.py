"""The predicted duration of a whole step under the schedule that runs it.

The cost of hot/cold tables is assigned to the operations of the interleaved schedule (K
micro-batches, rows of the next batch on the wire while this batch computes, chunks of first use),
and the schedule is simulated (:mod:`.schedule_time`). Stock tables in the same model are computed
once per batch, and nothing hides their exchanges of rows and gradients. A model without hot/cold
tables runs under TorchRec's ``TrainPipelineSparseDist``, which hides only the exchange of ids.

Shape letters: K micro-batches, X points of a batch with a known number of used rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from torchrec_picasso.batches.split import micro_batch_sizes
from torchrec_picasso.cost.curves import CommCurves
from torchrec_picasso.cost.dense import DenseTimes
from torchrec_picasso.cost.exchange_totals import HotColdTotals
from torchrec_picasso.cost.hot_cold import (
    bag_costs_ms,
    exchange_bytes,
    exchange_work,
    ids_cost_ms,
    packs_cost_ms,
)
from torchrec_picasso.cost.schedule_time import Message, OpTime, step_length
from torchrec_picasso.cost.step_cost import StepCost
from torchrec_picasso.cost.table_work import EARLY_SHARES
from torchrec_picasso.schedule.schedule import Setting
from torchrec_picasso.schedule.setting_choice import NUM_MICRO_BATCHES

__all__ = ["StepPrice", "StepPricer"]

_PART_MS = 2.5
_PART_FEATURE_MS = 0.09
"""Overhead of each additional micro-batch, and per feature: operators of the dense part and of
pooling run once more, and every feature is split. On one core 26 features took 4 to 7 ms, 40 took
7 ms, 130 took 5 to 20 ms."""
_LAYOUT_SHARE = 1 / 3
"""Share of the layout, which follows the exchange of ids, in the local work on ids."""
_MARK_BYTES = 1


@dataclass(frozen=True, kw_only=True)
class StepPrice:
    """A predicted step.

    Args:
        num_micro_batches: Number of micro-batches; 1 if nothing is interleaved.
        step_ms: Duration of the whole step, including the dense part.
        wire_ms: Sum of all messages, a lower bound of the duration.
        compute_ms: Sum of all computations, a lower bound of the duration.
    """

    num_micro_batches: int = 1
    step_ms: float
    wire_ms: float
    compute_ms: float


class StepPricer:
    """Predicts steps of one model on one network.

    Args:
        curves: Measured communication and local work.
        world_size: Number of ranks.
        dense: Times of the dense part; ``None`` = those of the curves, or 0.
        micro_batch_counts: Allowed numbers of micro-batches.
    """

    def __init__(
        self,
        curves: CommCurves,
        world_size: int,
        dense: DenseTimes | None = None,
        micro_batch_counts: Sequence[int] = NUM_MICRO_BATCHES,
    ) -> None:
        self.curves, self.world_size = curves, world_size
        self.dense = dense if dense is not None else curves.dense or DenseTimes()
        self._micro_batch_counts = micro_batch_counts
        # bytes that a rank sends in a bandwidth-optimal all-reduce of the dense gradients
        dense_bytes = 2 * (world_size - 1) / world_size * self.dense.parameter_bytes
        self._reduce = self._message("all_reduce", dense_bytes)

    def price(
        self,
        totals: HotColdTotals,
        stock: StepCost | None = None,
        *,
        num_packs: int = 1,
        uneven_bags: float = 1.0,
        num_bag_waves: int = 1,
        micro_batch_counts: Sequence[int] | None = None,
    ) -> StepPrice:
        """Predicts the fastest step over the allowed numbers of micro-batches.

        Among equal durations, the smallest number is returned.

        Args:
            totals: Work of the hot/cold tables.
            stock: Cost of the stock tables, without overlap; ``None`` = no stock tables.
            num_packs: Number of packs of the hot/cold tables.
            uneven_bags: Bags of the busiest home rank divided by the mean over ranks.
            num_bag_waves: Number of waves of owner-pooled packs, which follow the wave of rows.
            micro_batch_counts: Numbers of micro-batches to try; ``None`` = all allowed numbers.
        """
        stock = stock or StepCost()
        if not totals.features:
            return self.sparse_dist(stock)
        prices = [
            self._interleaved(totals, stock, count, num_packs, uneven_bags, num_bag_waves)
            for count in micro_batch_counts or self._micro_batch_counts
        ]
        return min(prices, key=lambda price: (price.step_ms, price.num_micro_batches))

    def sparse_dist(self, cost: StepCost) -> StepPrice:
        """Predicts a step under TorchRec's ``TrainPipelineSparseDist``.

        Computation hides the exchange of ids, but no exchange of rows, gradients or dense sums.

        Args:
            cost: Cost of all tables, without overlap.
        """
        reduce_ms = self._reduce.ms if self._reduce is not None else 0.0
        wire_ms = cost.forward_comms_ms + cost.backward_comms_ms + reduce_ms
        compute_ms = cost.total_ms - cost.wire_ms + self.dense.total_ms
        hidden_ms = min(cost.input_dist_wire_ms, compute_ms)
        return StepPrice(
            step_ms=wire_ms + compute_ms + cost.input_dist_wire_ms - hidden_ms,
            wire_ms=wire_ms + cost.input_dist_wire_ms,
            compute_ms=compute_ms,
        )

    def _message(self, collective: str, num_bytes: float) -> Message | None:
        """Returns the message of a collective on one rank; ``None`` if nothing is sent."""
        if num_bytes <= 0 or self.world_size == 1:
            return None
        ms = self.curves.ms(collective, num_bytes, self.world_size)
        core_ms = self.curves.core_ns_per_byte * num_bytes * 1e-6
        return Message(ms, min(1.0, core_ms / ms) if ms > 0 else 0.0)

    def _interleaved(
        self,
        totals: HotColdTotals,
        stock: StepCost,
        num_parts: int,
        num_packs: int,
        uneven_bags: float,
        num_bag_waves: int,
    ) -> StepPrice:
        step = _Interleaved(self, totals, stock, num_parts, num_packs, uneven_bags)
        shares = _shares_of_waves(totals, num_bag_waves)
        length = step_length(Setting(num_parts, lookahead=True), step.times(), shares)
        return StepPrice(
            num_micro_batches=num_parts,
            step_ms=length.ms,
            wire_ms=length.wire_ms,
            compute_ms=length.compute_ms,
        )


class _Interleaved:
    """The cost of one step, assigned to the operations of its schedule."""

    def __init__(
        self,
        pricer: StepPricer,
        totals: HotColdTotals,
        stock: StepCost,
        num_parts: int,
        num_packs: int,
        uneven_bags: float,
    ) -> None:
        self._message, self._reduce = pricer._message, pricer._reduce
        self._dense = pricer.dense.cut(num_parts)
        self._totals, self._stock, self._num_parts = totals, stock, num_parts
        costs, work = pricer.curves.local.hot_cold, exchange_work(totals, num_parts)
        self._ids_ms = ids_cost_ms(totals, pricer.curves.local)
        self._bytes = exchange_bytes(totals, pricer.world_size, num_packs)
        packs_ms = packs_cost_ms(totals, num_packs)
        call_ms, pool_ms, gather_ms = costs.forward.split_ms(work.fetched)
        back_call_ms, sum_ms, update_ms = costs.backward.split_ms(work.updated)
        self._pool_ms, self._gather_ms = pool_ms, gather_ms + packs_ms
        self._bag_pool_ms, bag_sum_ms = bag_costs_ms(totals, pricer.curves.local)
        self._sum_ms, self._update_ms = sum_ms, update_ms + packs_ms + bag_sum_ms
        self._call_ms, self._back_call_ms = call_ms, back_call_ms
        elements = max(1e-9, totals.cold_elements + totals.bag_elements)
        # bytes of the busiest rank over the mean: rows are even, only bags are not
        self._uneven = 1 + (uneven_bags - 1) * totals.bag_elements / elements
        # shares of all received elements by chunk; bags are spread like samples, and always dirty
        self._shares_K = _shares(num_parts)
        used_K = _used(num_parts, totals.cold_early, totals.cold_elements)
        dirty_K = _used(num_parts, totals.dirty_early, totals.dirty_elements)
        bags_K = [share * totals.bag_elements for share in self._shares_K]
        self._sent_K = [(rows + bags) / elements for rows, bags in zip(used_K, bags_K)]
        self._dirty_K = [(rows + bags) / elements for rows, bags in zip(dirty_K, bags_K)]

    def times(self) -> dict[tuple[str, int | None], OpTime]:
        """Returns the times of each operation, by kind and index."""
        ids, clean = self._bytes["ids"], max(0.0, 1 - sum(self._dirty_K))
        stock_ids_ms = self._stock.input_dist_ms - self._stock.input_dist_wire_ms
        request_ms = (1 - _LAYOUT_SHARE) * self._ids_ms + stock_ids_ms
        times: dict[tuple[str, int | None], OpTime] = {
            ("request", None): OpTime(request_ms, self._header()),
            ("send_ids", None): OpTime(0.0, self._message("row_exchange", ids * self._uneven)),
            ("send_dirty_mask", None): OpTime(
                0.0, self._message("row_exchange", self._totals.cold * _MARK_BYTES)
            ),
            ("lay_out", None): OpTime(_LAYOUT_SHARE * self._ids_ms),
            ("fetch_clean", None): self._rows(clean),
            ("reduce_hot", None): OpTime(0.0, self._message("all_reduce", self._bytes["hot"])),
            ("update", None): OpTime(self._update_ms),
        }
        for index, share in enumerate(self._shares_K):
            times["fetch_dirty", index] = self._rows(
                self._dirty_K[index], share * self._bag_pool_ms
            )
            times["forward", index] = self._forward(index, share)
            times["backward", index] = self._backward(index, share)
            gradients = self._sent_K[index] * self._bytes["gradients"] * self._uneven
            times["send_gradients", index] = OpTime(0.0, self._message("row_exchange", gradients))
        return times

    def _header(self) -> Message | None:
        """Returns the message of the header, with the input dist of stock tables behind it."""
        header = self._message("row_exchange", self._bytes["header"])
        if header is None:
            return None
        return Message(header.ms + self._stock.input_dist_wire_ms, header.core_share)

    def _rows(self, share: float, pool_ms: float = 0.0) -> OpTime:
        """Returns the times of a fetch.

        Args:
            share: Share of the batch's received elements.
            pool_ms: Time in which home ranks pool the fetched bags.
        """
        message = self._message("row_exchange", share * self._bytes["rows"] * self._uneven)
        return OpTime(share * self._gather_ms + pool_ms, message)

    def _part_ms(self, call_ms: float) -> float:
        """Returns the fixed cost of a micro-batch in forward or backward.

        Args:
            call_ms: Fixed cost of a whole batch.
        """
        if self._num_parts == 1:
            return call_ms
        # half of the overhead in forward, half in backward; K - 1 additional micro-batches share it
        more_ms = (_PART_MS + _PART_FEATURE_MS * self._totals.features) / 2
        return call_ms / self._num_parts + more_ms * (1 - 1 / self._num_parts)

    def _forward(self, index: int, share: float) -> OpTime:
        dense_ms = share * self._dense.forward_ms
        own_ms = share * self._pool_ms + self._part_ms(self._call_ms) + dense_ms
        # stock tables are looked up once, before the first micro-batch
        if index or not self._stock.forward_comms_ms:
            return OpTime(own_ms)
        exposed = Message(self._stock.forward_comms_ms), self._stock.forward_compute_ms
        return OpTime(own_ms, exposed=(exposed,))

    def _backward(self, index: int, share: float) -> OpTime:
        dense_ms = share * self._dense.backward_ms
        own_ms = share * self._sum_ms + self._part_ms(self._back_call_ms) + dense_ms
        if index:
            return OpTime(own_ms)
        stock = Message(self._stock.backward_comms_ms), self._stock.backward_compute_ms
        exposed = (stock,) if self._stock.backward_comms_ms else ()
        return OpTime(own_ms, exposed=exposed, last=self._reduce)  # DDP waits for dense sums


def _shares_of_waves(totals: HotColdTotals, num_bag_waves: int) -> tuple[float, ...]:
    """Returns the share of the received elements in each wave: one of rows, then waves of bags."""
    if not totals.bag_elements:
        return (1.0,)
    elements = totals.cold_elements + totals.bag_elements
    bag_shares = [totals.bag_elements / elements / num_bag_waves] * num_bag_waves
    row_shares = [totals.cold_elements / elements] if totals.cold_elements else []
    return (*row_shares, *bag_shares)


@cache
def _shares(num_parts: int) -> tuple[float, ...]:
    """Returns the share of the samples in each micro-batch; the first one is small."""
    samples = 1000 * (3 * num_parts - 2)  # large enough that rounding to samples does not matter
    return tuple(size / samples for size in micro_batch_sizes(samples, num_parts))


def _used(num_parts: int, early: Sequence[float], total: float) -> list[float]:
    """Returns the elements that each micro-batch is the first to use.

    Args:
        num_parts: Number of micro-batches.
        early: Elements in each of :data:`EARLY_SHARES` of the batch.
        total: Elements of the whole batch.
    """
    if total <= 0:
        return [0.0] * num_parts
    # log-log interpolation: the number of distinct rows grows about like a power of the samples
    known_X = np.log([*EARLY_SHARES, 1.0])
    used_X = np.log(np.maximum([*early, total], 1e-12))
    ends_K = np.log(np.cumsum(_shares(num_parts)))
    used_by_end_K = np.exp(np.interp(ends_K, known_X, used_X))
    first_used_K: list[float] = np.diff(used_by_end_K, prepend=0.0).tolist()
    return first_used_K
