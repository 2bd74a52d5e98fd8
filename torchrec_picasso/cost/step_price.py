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
from dataclasses import replace
from functools import cache

import numpy as np

from torchrec_picasso.batches.split import micro_batch_sizes
from torchrec_picasso.cost.curves import CommCurves
from torchrec_picasso.cost.hot_cold import HotColdTotals, exchange_bytes, exchange_times
from torchrec_picasso.cost.local import DenseTimes, LocalCosts
from torchrec_picasso.cost.schedule_time import Message, OpTime, StepPrice, step_price
from torchrec_picasso.cost.stock import StockCost
from torchrec_picasso.schedule.schedule import Setting, backward_order
from torchrec_picasso.schedule.setting_choice import NUM_MICRO_BATCHES

_PART_MS = 2.5
_PART_FEATURE_MS = 0.09
"""Overhead of each additional micro-batch, and per feature: operators of the dense part and of
pooling run once more, and every feature is split. On one core 26 features took 4 to 7 ms, 40 took
7 ms, 130 took 5 to 20 ms."""
_LAYOUT_SHARE = 1 / 3
"""Share of the layout, which follows the exchange of ids, in the local work on ids."""
_MASK_BYTES = 1
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

    def with_local(self, local: LocalCosts) -> StepPricer:
        """Returns a pricer for a core of other local costs."""
        curves = replace(self.curves, local=local)
        return StepPricer(curves, self.world_size, self.dense, self._micro_batch_counts)

    def price(
        self,
        totals: HotColdTotals,
        stock: StockCost | None = None,
        *,
        num_modules: int = 1,
        num_packs: int = 1,
        uneven_bags: float = 1.0,
        num_bag_waves: int = 1,
    ) -> StepPrice:
        """Predicts the fastest step over the numbers of micro-batches; the smallest of equally fast
        ones.

        Args:
            totals: Work of the hot/cold tables.
            stock: Cost of the stock tables, without overlap; ``None`` = no stock tables.
            num_modules: Number of modules with hot/cold tables.
            num_packs: Number of packs of the hot/cold tables.
            uneven_bags: Bags of the busiest home rank divided by the mean over ranks.
            num_bag_waves: Number of waves of owner-pooled packs, which follow the wave of rows.
        """
        stock = stock or StockCost()
        if not totals.features:
            return self.sparse_dist(stock)
        shares = _shares_of_waves(totals, num_bag_waves)
        forwards_first = bool(totals.unique)  # bags are of one sample
        prices = []
        for count in self._micro_batch_counts:
            setting = Setting(count, lookahead=True)
            times = self._times(totals, count, num_modules, num_packs, uneven_bags)
            last = backward_order(setting, forwards_first)[-1]
            self._add_stock(times, stock, last)
            prices.append(step_price(setting, times, shares, forwards_first=forwards_first))
        best = min(prices, key=lambda price: (price.step_ms, price.num_micro_batches))
        return _longer(best, self.curves.local.hot_cold.step_ms)

    def sparse_dist(self, cost: StockCost) -> StepPrice:
        """Predicts a step under TorchRec's ``TrainPipelineSparseDist``. Computation hides the
        exchange of ids, but no exchange of rows, gradients or dense sums."""
        wire_ms = cost.wire_ms + (self.reduce.ms if self.reduce is not None else 0.0)
        compute_ms = cost.compute_ms + self.dense.total_ms
        hidden_ms = min(cost.ids_wire_ms, compute_ms)
        price = StepPrice(
            step_ms=wire_ms + compute_ms - hidden_ms, wire_ms=wire_ms, compute_ms=compute_ms
        )
        return _longer(price, self.curves.local.stock.step_ms)

    def message(self, collective: str, num_bytes: float) -> Message | None:
        """Returns the message of a collective on one rank; ``None`` if nothing is sent."""
        if num_bytes <= 0 or self.world_size == 1:
            return None
        ms = self.curves.ms(collective, num_bytes, self.world_size)
        core_ms = self.curves.core_ns_per_byte * num_bytes * 1e-6
        latency_ms = min(ms, self.curves.ms(collective, 0, self.world_size))
        return Message(ms, min(1.0, core_ms / ms) if ms > 0 else 0.0, latency_ms)

    def _times(
        self,
        totals: HotColdTotals,
        num_parts: int,
        num_modules: int,
        num_packs: int,
        uneven_bags: float,
    ) -> dict[tuple[str, int | None], OpTime]:
        """Assigns the cost of a step without stock tables to operations, by kind and index."""
        dense, sent = self.dense.cut(num_parts), exchange_bytes(totals, self.world_size, num_packs)
        local = exchange_times(totals, self.curves.local, num_modules, num_packs, num_parts)
        sent_K, dirty_K = _received_shares(totals, num_parts)
        # bytes of the busiest rank over the mean: rows are even, only bags are not
        elements = max(1e-9, totals.cold_elements + totals.bag_elements)
        uneven = 1 + (uneven_bags - 1) * totals.bag_elements / elements
        # half of the overhead in forward, half in backward; K - 1 additional micro-batches share it
        more_ms = (_PART_MS + _PART_FEATURE_MS * totals.features) / 2 * (1 - 1 / num_parts)

        def exchange(num_bytes: float, compute_ms: float = 0.0) -> OpTime:
            return OpTime(compute_ms, self.message("row_exchange", num_bytes))

        def rows(share: float, pool_ms: float = 0.0) -> OpTime:
            num_bytes = share * sent["rows"] * uneven
            return exchange(num_bytes, share * local.gather_ms + pool_ms)

        times: dict[tuple[str, int | None], OpTime] = {
            ("send_header", None): exchange(sent["header"], (1 - _LAYOUT_SHARE) * local.ids_ms),
            ("send_row_numbers", None): exchange(sent["ids"] * uneven),
            ("send_dirty_mask", None): exchange(totals.cold * _MASK_BYTES),
            ("lay_out", None): OpTime(_LAYOUT_SHARE * local.ids_ms),
            ("fetch_clean", None): rows(max(0.0, 1 - sum(dirty_K))),
            ("reduce_hot", None): OpTime(0.0, self.message("all_reduce", sent["hot"])),
            ("update", None): OpTime(local.update_ms),
        }
        for index, share in enumerate(_shares(num_parts)):
            forward_ms = share * (local.pool_ms + dense.forward_ms) + more_ms
            backward_ms = share * (local.sum_ms + dense.backward_ms) + more_ms
            times |= {
                ("fetch_dirty", index): rows(dirty_K[index], share * local.bag_pool_ms),
                ("forward", index): OpTime(forward_ms + local.call_ms / num_parts),
                ("backward", index): OpTime(backward_ms + local.backward_call_ms / num_parts),
                ("send_gradients", index): exchange(sent_K[index] * sent["gradients"] * uneven),
            }
        return times

    def _add_stock(
        self, times: dict[tuple[str, int | None], OpTime], stock: StockCost, last_backward: int
    ) -> None:
        """Adds the stock tables and the sums of dense gradients, in place. Stock tables are looked
        up once, before the first micro-batch; DDP waits for dense sums."""
        ours = times["send_header", None]
        header = ours.message
        if header is not None:
            header = Message(header.ms + stock.ids_wire_ms, header.core_share)
        times["send_header", None] = OpTime(ours.compute_ms + stock.ids_ms, header)
        for key, wire_ms, compute_ms in (
            (("forward", 0), stock.forward_wire_ms, stock.forward_ms),
            (("backward", last_backward), stock.backward_wire_ms, stock.backward_ms),
        ):
            op = times[key]
            if wire_ms:
                times[key] = replace(op, exposed=((Message(wire_ms), compute_ms),))
            else:  # an empty message would wait for the others on the wire
                times[key] = replace(op, compute_ms=op.compute_ms + compute_ms)
        backward = "backward", last_backward
        times[backward] = replace(times[backward], last=self.reduce)


def _longer(price: StepPrice, added_ms: float) -> StepPrice:
    step_ms, compute_ms = price.step_ms + added_ms, price.compute_ms + added_ms
    return replace(price, step_ms=step_ms, compute_ms=compute_ms)


def _shares_of_waves(totals: HotColdTotals, num_bag_waves: int) -> tuple[float, ...]:
    """Returns the share of the received elements in each wave: one of rows, then waves of bags."""
    if not totals.bag_elements:
        return (1.0,)
    elements = totals.cold_elements + totals.bag_elements
    bag_shares = [totals.bag_elements / elements / num_bag_waves] * num_bag_waves
    row_shares = [totals.cold_elements / elements] if totals.cold_elements else []
    return (*row_shares, *bag_shares)


def _received_shares(totals: HotColdTotals, num_parts: int) -> tuple[list[float], list[float]]:
    """Returns the share of each chunk in all received elements, and that of its dirty ones."""
    used_K = _first_used(num_parts)
    # bags are spread like samples, and always dirty
    bags_K = np.array(_shares(num_parts)) * totals.bag_elements
    elements = max(1e-9, totals.cold_elements + totals.bag_elements)
    sent_K = (totals.cold_elements * used_K + bags_K) / elements
    return sent_K.tolist(), ((totals.dirty_elements * used_K + bags_K) / elements).tolist()


@cache
def _shares(num_parts: int) -> tuple[float, ...]:
    """Returns the share of the samples in each micro-batch; the first one is small."""
    samples = 1000 * (3 * num_parts - 2)  # large enough that rounding to samples does not matter
    return tuple(size / samples for size in micro_batch_sizes(samples, num_parts))


def _first_used(num_parts: int) -> np.ndarray:
    """Returns the share of the batch's rows that each micro-batch is the first to use."""
    return np.diff(np.cumsum(_shares(num_parts)) ** _FIRST_USE_EXPONENT, prepend=0.0)
