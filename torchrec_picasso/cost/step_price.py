"""The predicted duration of a whole step under the schedule that runs it.

The cost of hot/cold tables is assigned to the operations of the interleaved schedule (K
micro-batches, rows of the next batch on the wire while this batch computes, chunks of first use),
and the schedule is simulated (:mod:`.schedule_time`). Stock tables in the same model are computed
once per batch, and nothing hides their exchanges of rows and gradients. A model without hot/cold
tables runs under TorchRec's ``TrainPipelineSparseDist``, which hides only the exchange of ids.

Shape letters: K micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np

from torchrec_picasso.batches.split import micro_batch_sizes
from torchrec_picasso.cost.curves import CommCurves
from torchrec_picasso.cost.hot_cold import HotColdTotals, exchange_bytes, exchange_times
from torchrec_picasso.cost.local import DenseTimes
from torchrec_picasso.cost.schedule_time import Message, OpTime, StepPrice, step_price
from torchrec_picasso.cost.step_cost import StepCost
from torchrec_picasso.schedule.schedule import Setting, backward_order
from torchrec_picasso.schedule.setting_choice import NUM_MICRO_BATCHES

__all__ = ["StepPricer"]

_PART_MS = 2.5
_PART_FEATURE_MS = 0.09
"""Overhead of each additional micro-batch, and per feature: operators of the dense part and of
pooling run once more, and every feature is split. On one core 26 features took 4 to 7 ms, 40 took
7 ms, 130 took 5 to 20 ms."""
_LAYOUT_SHARE = 1 / 3
"""Share of the layout, which follows the exchange of ids, in the local work on ids."""
_MARK_BYTES = 1
_FIRST_USE_EXPONENT = 0.8
"""The number of distinct rows grows about like this power of the samples."""


class StepPricer:
    """Predicts steps of one model on one network, by default with the dense times in the curves."""

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
        self.reduce = self.message("all_reduce", dense_bytes)

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

        Args:
            totals: Work of the hot/cold tables.
            stock: Cost of the stock tables, without overlap; ``None`` = no stock tables.
            num_packs: Number of packs of the hot/cold tables.
            uneven_bags: Bags of the busiest home rank divided by the mean over ranks.
            num_bag_waves: Number of waves of owner-pooled packs, which follow the wave of rows.
            micro_batch_counts: Numbers of micro-batches to try; ``None`` = all allowed numbers. The
                smallest of equally fast ones is returned.
        """
        stock = stock or StepCost()
        if not totals.features:
            return self.sparse_dist(stock)
        shares = _shares_of_waves(totals, num_bag_waves)
        prices = []
        for count in micro_batch_counts or self._micro_batch_counts:
            step = _Interleaved(self, totals, stock, count, num_packs, uneven_bags)
            setting = Setting(count, lookahead=True)
            prices.append(step_price(setting, step.times(), shares, shares_rows=step.shares_rows))
        return min(prices, key=lambda price: (price.step_ms, price.num_micro_batches))

    def sparse_dist(self, cost: StepCost) -> StepPrice:
        """Predicts a step under TorchRec's ``TrainPipelineSparseDist``.

        Computation hides the exchange of ids, but no exchange of rows, gradients or dense sums.
        """
        reduce_ms = self.reduce.ms if self.reduce is not None else 0.0
        wire_ms = cost.forward_comms_ms + cost.backward_comms_ms + reduce_ms
        compute_ms = cost.total_ms - cost.wire_ms + self.dense.total_ms
        hidden_ms = min(cost.input_dist_wire_ms, compute_ms)
        return StepPrice(
            step_ms=wire_ms + compute_ms + cost.input_dist_wire_ms - hidden_ms,
            wire_ms=wire_ms + cost.input_dist_wire_ms,
            compute_ms=compute_ms,
        )

    def message(self, collective: str, num_bytes: float) -> Message | None:
        """Returns the message of a collective on one rank; ``None`` if nothing is sent."""
        if num_bytes <= 0 or self.world_size == 1:
            return None
        ms = self.curves.ms(collective, num_bytes, self.world_size)
        core_ms = self.curves.core_ns_per_byte * num_bytes * 1e-6
        return Message(ms, min(1.0, core_ms / ms) if ms > 0 else 0.0)


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
        self._message, self._reduce = pricer.message, pricer.reduce
        self._dense = pricer.dense.cut(num_parts)
        self._totals, self._stock, self._num_parts = totals, stock, num_parts
        self.shares_rows = bool(totals.unique)  # bags are of one sample
        setting = Setting(num_parts, lookahead=True)
        self._last_backward = backward_order(setting, self.shares_rows)[-1]
        self._local = exchange_times(
            totals, pricer.curves.local, num_packs=num_packs, num_parts=num_parts
        )
        self._bytes = exchange_bytes(totals, pricer.world_size, num_packs)
        elements = max(1e-9, totals.cold_elements + totals.bag_elements)
        # bytes of the busiest rank over the mean: rows are even, only bags are not
        self._uneven = 1 + (uneven_bags - 1) * totals.bag_elements / elements
        # shares of all received elements by chunk; bags are spread like samples, and always dirty
        self._shares_K = _shares(num_parts)
        bags_K = np.array(self._shares_K) * totals.bag_elements
        used_K = _first_used(num_parts)
        self._sent_K = (totals.cold_elements * used_K + bags_K) / elements
        self._dirty_K = (totals.dirty_elements * used_K + bags_K) / elements

    def times(self) -> dict[tuple[str, int | None], OpTime]:
        """Returns the times of each operation, by kind and index."""
        local, ids = self._local, self._bytes["ids"]
        stock_ids_ms = self._stock.input_dist_ms - self._stock.input_dist_wire_ms
        request_ms = (1 - _LAYOUT_SHARE) * local.ids_ms + stock_ids_ms
        times: dict[tuple[str, int | None], OpTime] = {
            ("request", None): OpTime(request_ms, self._header()),
            ("send_ids", None): OpTime(0.0, self._message("row_exchange", ids * self._uneven)),
            ("send_dirty_mask", None): OpTime(
                0.0, self._message("row_exchange", self._totals.cold * _MARK_BYTES)
            ),
            ("lay_out", None): OpTime(_LAYOUT_SHARE * local.ids_ms),
            ("fetch_clean", None): self._rows(max(0.0, 1 - float(self._dirty_K.sum()))),
            ("reduce_hot", None): OpTime(0.0, self._message("all_reduce", self._bytes["hot"])),
            ("update", None): OpTime(local.update_ms),
        }
        for index, share in enumerate(self._shares_K):
            times["fetch_dirty", index] = self._rows(
                float(self._dirty_K[index]), share * local.bag_pool_ms
            )
            times["forward", index] = self._forward(index, share)
            times["backward", index] = self._backward(index, share)
            gradients = float(self._sent_K[index]) * self._bytes["gradients"] * self._uneven
            times["send_gradients", index] = OpTime(0.0, self._message("row_exchange", gradients))
        return times

    def _header(self) -> Message | None:
        """Returns the message of the header, with the input dist of stock tables behind it."""
        header = self._message("row_exchange", self._bytes["header"])
        if header is None:
            return None
        return Message(header.ms + self._stock.input_dist_wire_ms, header.core_share)

    def _rows(self, share: float, pool_ms: float = 0.0) -> OpTime:
        """Returns the times of a fetch of a share of the batch's received elements; home ranks pool
        the fetched bags in ``pool_ms``."""
        message = self._message("row_exchange", share * self._bytes["rows"] * self._uneven)
        return OpTime(share * self._local.gather_ms + pool_ms, message)

    def _part_ms(self, call_ms: float) -> float:
        """Returns the fixed cost of a micro-batch in forward or backward."""
        if self._num_parts == 1:
            return call_ms
        # half of the overhead in forward, half in backward; K - 1 additional micro-batches share it
        more_ms = (_PART_MS + _PART_FEATURE_MS * self._totals.features) / 2
        return call_ms / self._num_parts + more_ms * (1 - 1 / self._num_parts)

    def _forward(self, index: int, share: float) -> OpTime:
        dense_ms = share * self._dense.forward_ms
        own_ms = share * self._local.pool_ms + self._part_ms(self._local.call_ms) + dense_ms
        # stock tables are looked up once, before the first micro-batch
        if index or not self._stock.forward_comms_ms:
            return OpTime(own_ms)
        exposed = Message(self._stock.forward_comms_ms), self._stock.forward_compute_ms
        return OpTime(own_ms, exposed=(exposed,))

    def _backward(self, index: int, share: float) -> OpTime:
        dense_ms = share * self._dense.backward_ms
        own_ms = share * self._local.sum_ms + self._part_ms(self._local.backward_call_ms) + dense_ms
        if index != self._last_backward:
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


def _first_used(num_parts: int) -> np.ndarray:
    """Returns the share of the batch's rows that each micro-batch is the first to use."""
    return np.diff(np.cumsum(_shares(num_parts)) ** _FIRST_USE_EXPONENT, prepend=0.0)
