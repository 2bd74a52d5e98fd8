"""The predicted duration of a whole step under the schedule that runs it.

The cost of hot/cold tables is assigned to the operations of the interleaved schedule (K
micro-batches, rows of the next batch on the wire while this batch computes, chunks of first use),
and the schedule is simulated (:mod:`.schedule_time`). Stock tables in the same model are computed
once per batch, and nothing hides their exchanges of rows and gradients. A model without hot/cold
tables runs under TorchRec's ``TrainPipelineSparseDist``, which hides only the exchange of ids, in
backward.

Shape letters: K micro-batches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from torchrec_picasso.batches.split import micro_batch_sizes
from torchrec_picasso.cost.curves import CommCurves
from torchrec_picasso.cost.hot_cold import (
    WIRE_BYTES,
    Exchange,
    ExchangeTimes,
    HotColdTotals,
    Way,
    exchange_times,
)
from torchrec_picasso.cost.local import DenseTimes, LocalCosts
from torchrec_picasso.cost.schedule_time import Message, OpTime, StepPrice, simulate_step
from torchrec_picasso.cost.stock import StockCost
from torchrec_picasso.schedule.schedule import Setting, backward_order, is_depth_first
from torchrec_picasso.schedule.setting_choice import NUM_MICRO_BATCHES

_PART_MS = 2.5
_PART_FEATURE_MS = 0.09
"""Overhead of each additional micro-batch, and per feature: operators of the dense part and of
pooling run once more, and every feature is split. On one core 26 features took 4 to 7 ms, 40 took
7 ms, 130 took 5 to 20 ms."""
_LAYOUT_SHARE = 1 / 3
"""Share of the layout, which follows the exchange of ids, in the local work on ids."""
_EXCHANGES_PER_WAVE = 2
"""Of rows or bags of the first micro-batch, and of gradients of the last; twice as many if each
micro-batch goes by wave."""
_WAITS = 0.5
"""What each exchange of stock tables after a step's first one adds beside its call and messages, in
calls; at most this share of ``step_ms``, too, which only calibration measures. 24 tables in one,
two and three modules took 6.5, 10.6 and 13.8 ms a step on loopback with a core per rank, of which
each further call had 2.1 and its messages 0.4 (docs/dev/log.md, 2026-11-28)."""
_MASK_BYTES = 1
_FIRST_USE_EXPONENT = 0.8
"""The number of distinct rows grows about like this power of the samples."""


@dataclass(frozen=True, kw_only=True)
class CountedStep:
    """Counts of a step that replace expectations, beside those in the totals."""

    busiest_bytes: Mapping[str, Mapping[str, float]]
    """Bytes that the busiest rank sends or receives, by ``"row_exchange"`` or one of
    :data:`.LEVELS`, then by the purposes of :class:`.Way` and ``mask``."""
    first_used: Sequence[float]
    """Share of the batch's rows that its first samples use: none of them to all, in equal steps."""


_Operation = tuple[str, int | None]
"""Kind of an operation, and its micro-batch."""


class StepPricer:
    """Predicts steps of one model on one network, by default without a dense part."""

    def __init__(
        self,
        curves: CommCurves,
        world_size: int,
        dense: DenseTimes | None = None,
        micro_batch_counts: Sequence[int] = NUM_MICRO_BATCHES,
    ) -> None:
        self.curves, self.world_size = curves, world_size
        self.dense = dense or DenseTimes()
        self._micro_batch_counts = micro_batch_counts
        # bytes that a rank sends in a bandwidth-optimal all-reduce of the dense gradients
        dense_bytes = 2 * (world_size - 1) / world_size * self.dense.parameter_bytes
        self._dense_sum = self.message("all_reduce", dense_bytes)

    def with_local(self, local: LocalCosts) -> StepPricer:
        """Returns a pricer for a core of other local costs."""
        curves = replace(self.curves, local=local)
        return StepPricer(curves, self.world_size, self.dense, self._micro_batch_counts)

    def price(
        self,
        exchanges: Sequence[Exchange],
        stock: StockCost | None = None,
        *,
        num_modules: int = 1,
        uneven_bags: float = 1.0,
        num_bag_waves: int = 1,
        counted: CountedStep | None = None,
    ) -> StepPrice:
        """Predicts the fastest step over the numbers of micro-batches; the smallest of equally fast
        ones.

        Args:
            exchanges: Exchanges of the hot/cold tables.
            stock: Cost of the stock tables, without overlap; ``None`` = no stock tables.
            num_modules: Number of modules with hot/cold tables.
            uneven_bags: Bags of the busiest home rank divided by the mean over ranks.
            num_bag_waves: Number of waves of owner-pooled packs, which follow the wave of rows.
            counted: Counts of a step; ``None`` = expected ones.
        """
        stock, costs = stock or StockCost(), self.curves.local
        if not exchanges:
            return self.sparse_dist(stock)
        totals = HotColdTotals.sum(each.totals for each in exchanges)
        num_packs = sum(each.num_packs for each in exchanges)
        ways_of = [each.ways(self.world_size) for each in exchanges]
        flags = self._agreement(ways_of)
        ways, first_used = [_busiest(way, uneven_bags) for own in ways_of for way in own], None
        if counted is not None:
            first_used, found = counted.first_used, counted.busiest_bytes
            ways = [replace(way, sent={**way.sent, **found[way.collective]}) for way in ways]
        shares = _shares_of_waves(totals, num_bag_waves)
        further_ms = (len(shares) - 1) * _EXCHANGES_PER_WAVE * self._exchange_work_ms(ways)
        forwards_first = bool(totals.unique)  # bags are of one sample
        prices = []
        for count in self._micro_batch_counts:
            setting = Setting(count, lookahead=True)
            local = exchange_times(totals, costs, num_modules, num_packs, count, uneven_bags)
            for each in exchanges:
                local = each.with_own_work(local, costs)
            times = self._times(totals, ways, local, count, first_used)
            last = backward_order(setting, forwards_first)[-1]
            self._add_stock(times, stock, last)
            price = simulate_step(setting, times, shares, flags, forwards_first=forwards_first)
            by_wave = 2 if is_depth_first(setting, forwards_first) else 1
            prices.append(_longer(price, by_wave * further_ms))
        best = min(prices, key=lambda price: (price.step_ms, price.num_micro_batches))
        return _longer(best, costs.hot_cold.step_ms + self._waits_ms(stock.exchanges))

    def sparse_dist(self, cost: StockCost) -> StepPrice:
        """Predicts a step under TorchRec's ``TrainPipelineSparseDist``. It sends the next batch's
        ids after forward, so backward hides them, but for their work on the core. No exchange of
        rows, gradients or dense sums is hidden."""
        wire_ms = cost.wire_ms + (self._dense_sum.ms if self._dense_sum is not None else 0.0)
        compute_ms = cost.compute_ms + self.dense.total_ms
        core_ms = self.curves.core_ns_per_byte * cost.sent_bytes.get("ids", 0.0) * 1e-6
        backward_ms = cost.backward_ms + self.dense.backward_ms
        hidden_ms = min(max(0.0, cost.ids_wire_ms - core_ms), backward_ms)
        price = StepPrice(
            step_ms=wire_ms + compute_ms - hidden_ms, wire_ms=wire_ms, compute_ms=compute_ms
        )
        return _longer(price, self.curves.local.stock.step_ms + self._waits_ms(cost.exchanges - 1))

    def _waits_ms(self, num_further: float) -> float:
        if self.curves.device != "cpu":
            return 0.0  # not measured there
        costs = self.curves.local.stock
        return _WAITS * min(costs.call_ms, costs.step_ms) * max(0.0, num_further)

    def message(self, collective: str, num_bytes: float) -> Message | None:
        """Returns the message of a collective on one rank; ``None`` if nothing is sent."""
        if num_bytes <= 0 or self.world_size == 1:
            return None
        ms = self.curves.ms(collective, num_bytes, self.world_size)
        core_ms = self.curves.core_ns_per_byte * num_bytes * 1e-6
        latency_ms = min(ms, self.curves.least_ms(collective, self.world_size))
        return Message(ms, min(1.0, core_ms / ms) if ms > 0 else 0.0, latency_ms)

    def _times(
        self,
        totals: HotColdTotals,
        ways: Sequence[Way],
        local: ExchangeTimes,
        num_parts: int,
        first_used: Sequence[float] | None,
    ) -> dict[_Operation, OpTime]:
        """Assigns the cost of a step without stock tables to operations, by kind and index."""
        dense, used_K = self.dense.cut(num_parts), chunk_shares(num_parts, first_used)
        received = _received_shares(totals, used_K)
        shares = {way.collective: _received_shares(way.totals, used_K) for way in ways}
        # half of the overhead in forward, half in backward; K - 1 additional micro-batches share it
        more_ms = (_PART_MS + _PART_FEATURE_MS * totals.features) / 2 * (1 - 1 / num_parts)

        def exchange(
            purpose: str, kind: str, index: int | None = None, compute_ms: float = 0.0
        ) -> dict[_Operation, OpTime]:
            key = kind, index
            sent = {
                way.collective: shares[way.collective].get(key, 1.0) * way.sent[purpose]
                for way in ways
            }
            return {key: OpTime(compute_ms, self._joined(sent))}

        clean_ms = received["fetch_clean", None] * local.gather_ms
        hot = self._joined({way.sum_collective: way.sent["hot"] for way in ways})
        times: dict[_Operation, OpTime] = {
            **exchange("header", "send_header", None, (1 - _LAYOUT_SHARE) * local.ids_ms),
            **exchange("ids", "send_row_numbers"),
            **exchange("mask", "send_dirty_mask"),
            ("build_layout", None): OpTime(_LAYOUT_SHARE * local.ids_ms),
            **exchange("rows", "fetch_clean", None, clean_ms),
            ("reduce_hot", None): OpTime(0.0, hot),
            ("update", None): OpTime(local.update_ms),
        }
        for k, share in enumerate(micro_batch_shares(num_parts)):
            forward_ms = share * (local.pool_ms + dense.forward_ms) + more_ms
            backward_ms = share * (local.sum_ms + dense.backward_ms) + more_ms
            gather_ms = received["fetch_dirty", k] * local.gather_ms + share * local.bag_pool_ms
            times |= {
                **exchange("rows", "fetch_dirty", k, gather_ms),
                ("forward", k): OpTime(forward_ms + local.call_ms / num_parts),
                ("backward", k): OpTime(backward_ms + local.backward_call_ms / num_parts),
                **exchange("gradients", "send_gradients", k),
            }
        return times

    def _agreement(self, ways_of: Sequence[Sequence[Way]]) -> Message:
        """Returns the messages of flags: by host if any rows travel so."""
        ways = max(ways_of, key=len)
        return self._joined({way.collective: way.sent["flags"] for way in ways}) or Message(0.0)

    def _exchange_work_ms(self, ways: Sequence[Way]) -> float:
        """Returns the work of the core on an exchange of a further wave, whatever its bytes: gloo's
        threads are assumed to take all the time of an empty one. That of the first wave is in the
        measured cost of a step."""
        if self.curves.device != "cpu":
            return 0.0
        return max(self.curves.least_ms(way.collective, self.world_size) for way in ways)

    def _joined(self, sent: Mapping[str, float]) -> Message | None:
        """Returns the messages of several collectives, one after another, as one."""
        return _in_turn([self.message(name, num_bytes) for name, num_bytes in sent.items()])

    def _add_stock(
        self, times: dict[_Operation, OpTime], stock: StockCost, last_backward: int
    ) -> None:
        """Adds the stock tables and the sums of dense gradients, in place. Ids follow those of
        hot/cold tables. Stock tables are looked up once, before the first micro-batch; their
        gradients end the last backward, and so do dense sums, which DDP waits for."""
        core_ms = self.curves.core_ns_per_byte * stock.sent_bytes.get("ids", 0.0) * 1e-6
        for key, slot, sent, compute_ms in (
            (("send_header", None), "message", (), stock.ids_ms),
            (("send_row_numbers", None), "message", [_sent(stock.ids_wire_ms, core_ms)], 0.0),
            (("forward", 0), "first", [_sent(stock.forward_wire_ms)], stock.forward_ms),
            (
                ("backward", last_backward),
                "last",
                [_sent(stock.backward_wire_ms), self._dense_sum],
                stock.backward_ms,
            ),
        ):
            ours = times[key]
            message = _in_turn([getattr(ours, slot), *sent])
            compute_ms += ours.compute_ms
            times[key] = replace(ours, compute_ms=compute_ms, **{slot: message})


def _busiest(way: Way, uneven_bags: float) -> Way:
    """Returns what the busiest rank sends, the dirty mask too: rows are even, bags are not."""
    elements = max(1e-9, way.totals.cold_elements + way.totals.bag_elements)
    uneven = 1 + (uneven_bags - 1) * way.totals.bag_elements / elements
    uneven_sent = {name: way.sent[name] * uneven for name in ("ids", "rows", "gradients")}
    sent_share = way.sent["rows"] / (elements * WIRE_BYTES)  # other rows stay on their rank
    mask = sent_share * way.totals.cold * _MASK_BYTES
    return replace(way, sent={**way.sent, **uneven_sent, "mask": mask})


def _sent(ms: float, core_ms: float = 0.0) -> Message | None:
    """Returns a message of a stock table; ``None`` if nothing is sent: an empty one would wait for
    the others on the wire."""
    return Message(ms, min(1.0, core_ms / ms)) if ms else None


def _in_turn(messages: Sequence[Message | None]) -> Message | None:
    """Returns several messages, one after another, as one."""
    found = [message for message in messages if message is not None]
    if len(found) < 2:
        return found[0] if found else None
    ms = sum(message.ms for message in found)
    core_ms = sum(message.core_share * message.ms for message in found)
    return Message(ms, core_ms / ms if ms else 0.0, sum(each.latency_ms for each in found))


def _longer(price: StepPrice, added_ms: float) -> StepPrice:
    """Adds work that nothing hides."""
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


def _received_shares(totals: HotColdTotals, used_K: np.ndarray) -> dict[_Operation, float]:
    """Returns the share of each operation that sends rows, or gradients, in all received elements;
    ``used_K`` are shares of rows by the first micro-batch that uses them."""
    # bags are spread like samples, and always dirty
    bags_K = np.array(micro_batch_shares(len(used_K))) * totals.bag_elements
    elements = max(1e-9, totals.cold_elements + totals.bag_elements)
    sent_K = (totals.cold_elements * used_K + bags_K) / elements
    dirty_K = (totals.dirty_elements * used_K + bags_K) / elements
    return {
        ("fetch_clean", None): max(0.0, 1 - float(dirty_K.sum())),
        **{("fetch_dirty", k): share for k, share in enumerate(dirty_K.tolist())},
        **{("send_gradients", k): share for k, share in enumerate(sent_K.tolist())},
    }


@cache
def micro_batch_shares(num_parts: int) -> tuple[float, ...]:
    """Returns the share of the samples in each micro-batch; the first one is small."""
    samples = 1000 * (3 * num_parts - 2)  # large enough that rounding to samples does not matter
    return tuple(size / samples for size in micro_batch_sizes(samples, num_parts))


def chunk_shares(num_parts: int, counted: Sequence[float] | None = None) -> np.ndarray:
    """Returns the share of the batch's rows that each micro-batch is the first to use; ``counted``
    as in :class:`CountedStep`."""
    ends_K = np.cumsum(micro_batch_shares(num_parts))
    if counted is None:
        return np.diff(ends_K**_FIRST_USE_EXPONENT, prepend=0.0)
    return np.diff(np.interp(ends_K, np.linspace(0, 1, len(counted)), counted), prepend=0.0)
