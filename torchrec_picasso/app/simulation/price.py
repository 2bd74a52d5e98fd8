"""Prices counted steps by the library's cost model.

Shape letters: T tables.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace

import numpy as np

from torchrec_picasso.app.simulation.count import Cluster, Stream
from torchrec_picasso.app.simulation.ids import Ids
from torchrec_picasso.app.simulation.row_traffic import RowTraffic
from torchrec_picasso.app.simulation.stock_traffic import STOCK_TYPES, StockTraffic
from torchrec_picasso.app.simulation.wire import Wire, link_share
from torchrec_picasso.cost import CommCurves
from torchrec_picasso.cost.curves import COLLECTIVES, Curve
from torchrec_picasso.cost.hot_cold import HotColdTotals
from torchrec_picasso.cost.local import DenseTimes
from torchrec_picasso.cost.schedule_time import StepPrice
from torchrec_picasso.cost.step_price import CountedStep, StepPricer, chunk_shares
from torchrec_picasso.cost.stock import (
    StockCost,
    StockTotals,
    cost_of_totals,
    hashed_work,
    over_mean,
)
from torchrec_picasso.errors import PlanError
from torchrec_picasso.exchange.header import NUM_OWN_WORDS

_STOCK_EXCHANGES = 5
"""Splits, lengths, ids, vectors and gradients, of each module."""


@dataclass(frozen=True, kw_only=True)
class Priced:
    """The predicted step of a form of rows, or of a stock sharding type, on one cluster."""

    name: str
    step: StepPrice
    sent_bytes: Mapping[str, float]
    """Bytes that a rank sends for tables, by purpose: mean over ranks."""
    across_bytes: float
    """Bytes that a host sends to other hosts for tables: mean over hosts."""
    busiest_over_mean: float
    """Bytes that the busiest rank sends or receives, divided by the mean."""
    messages: int
    """Messages that a rank sends for tables."""
    chunk_shares: Sequence[float] = ()
    """Share of the elements of a rank's cold rows in each chunk; none of stock tables."""


@dataclass(frozen=True, kw_only=True)
class Pricing:
    """Prices the clusters of a simulation.

    Args:
        stream: Tables and their lookups.
        first_used: Result of :func:`.count_step`.
        curves: Curves of any cluster of several hosts.
        dense: Dense part of the model.
        micro_batch_counts: Numbers of micro-batches, of which the fastest is taken.
    """

    stream: Stream
    first_used: Sequence[float]
    curves: CommCurves
    dense: DenseTimes
    micro_batch_counts: Sequence[int]

    def price(self, cluster: Cluster) -> list[Priced]:
        """Prices the forms of rows, then the stock sharding types, of a counted cluster."""
        ours = [self._rows(cluster, form, traffic) for form, traffic in cluster.rows.items()]
        return ours + [self._stock(cluster, name) for name in STOCK_TYPES]

    def _rows(self, cluster: Cluster, form: str, traffic: RowTraffic) -> Priced:
        """Prices the pipeline with row-exchanged tables; wires have one word of header."""
        levels = deepcopy(traffic.levels)  # the counts stay as they are
        loads, size = self.stream.loads, cluster.world_size
        num_modules = len({load.module for load in loads})
        num_packs = len({(load.module, load.dim) for load in loads})
        exchange = traffic.exchange(self._totals(cluster), self._crossing(cluster), num_packs)
        for way in exchange.ways(size):
            level, hot_bytes = levels[way.collective], round(way.sent["hot"])
            level.wire.even("hot", hot_bytes, hot_bytes * level.hot_on_link)
        curves = curves_of(self.curves, cluster)

        def priced(num_parts: int) -> tuple[float, int, StepPrice]:
            num_words, busiest = NUM_OWN_WORDS + num_packs * num_parts, {}
            for name, level in levels.items():
                found = level.wire.busiest_bytes(is_duplex=True)
                busiest[name] = found | {"header": found["header"] * num_words + found["bits"]}
            step = StepPricer(curves, size, self.dense, [num_parts]).price(
                [exchange],
                num_modules=num_modules,
                counted=CountedStep(busiest_bytes=busiest, first_used=self.first_used),
            )
            return step.step_ms, num_words, step

        _, num_words, step = min(map(priced, self.micro_batch_counts))
        wires = [level.wire for level in levels.values()]
        for wire in wires:
            wire.multiply("header", num_words)
        # flags, header, row numbers, dirty mask, clean rows; dirty rows and gradients of each chunk
        messages = (5 + 2 * step.num_micro_batches) * traffic.num_peers
        chunks = chunk_shares(step.num_micro_batches, self.first_used).tolist()
        return replace(_priced(form, step, wires, messages), chunk_shares=chunks)

    def _stock(self, cluster: Cluster, name: str) -> Priced:
        """Prices ``TrainPipelineSparseDist`` with all tables of one stock sharding type."""
        cost, messages, wires = StockCost(), 0, []
        curves = curves_of(self.curves, cluster)
        for tables_n, traffic_of in cluster.stock:
            traffic = traffic_of[name]
            num_modules = len({load.module for load in traffic.loads})
            cost = cost.plus(
                cost_of_totals(
                    name,
                    self._stock_totals(cluster, tables_n, traffic),
                    over_mean(traffic.served_W.tolist()),
                    curves,
                    cluster.world_size,
                    num_modules,
                    traffic.wire.busiest_bytes(is_duplex=False),
                )
            )
            messages += _STOCK_EXCHANGES * num_modules * (cluster.world_size - 1)
            wires.append(traffic.wire)
        step = StepPricer(curves, cluster.world_size, self.dense).sparse_dist(cost)
        return _priced(name, step, wires, messages)

    def _totals(self, cluster: Cluster) -> HotColdTotals:
        """Returns the counted work of a rank with row-exchanged tables, mean over ranks."""
        loads, dims_T, size = self.stream.loads, self.stream.dims, cluster.world_size
        sums = {name: float(sums_T.sum()) for name, sums_T in cluster.sums_T.items()}
        elements = {name: float(sums_T @ dims_T) for name, sums_T in cluster.sums_T.items()}
        return HotColdTotals(
            features=sum(load.num_features for load in loads),
            lookups=sums["lookups"] / size,
            lookup_elements=elements["lookups"] / size,
            pooled_elements=sum(load.vectors * load.dim for load in loads),
            unique=sums["unique"] / size,
            unique_elements=elements["unique"] / size,
            cold=sums["cold"] / size,
            cold_elements=elements["cold"] / size,
            dirty_elements=elements["dirty"] / size,
            updated=sums["new_cold"] / size,
            touched=sums["new_hot"],
            touched_elements=elements["new_hot"],
            hot=sum(map(len, self.stream.hot_T)),
            rows=sum(load.num_embeddings for load in loads),
        )

    def _crossing(self, cluster: Cluster) -> HotColdTotals:
        """Returns the counted rows of a host, divided by its ranks, mean over hosts."""
        dims_T, size = self.stream.dims, cluster.world_size
        host_T, dirty_T = cluster.sums_T["host"], cluster.sums_T["host_dirty"]
        return HotColdTotals(
            cold=float(host_T.sum()) / size,
            cold_elements=float(host_T @ dims_T) / size,
            dirty_elements=float(dirty_T @ dims_T) / size,
        )

    def _stock_totals(self, cluster: Cluster, tables_n: Ids, traffic: StockTraffic) -> StockTotals:
        """Returns the counted work of a rank with stock tables, mean over ranks."""
        loads, size, parts_T = traffic.loads, cluster.world_size, traffic.parts_TW.sum(1)
        dims_T = self.stream.dims[tables_n]
        lookups_T = cluster.sums_T["lookups"][tables_n] / size
        rows_T = (cluster.sums_T["new_hot"] + cluster.sums_T["new_cold"])[tables_n] / size
        bags_T = np.array([load.bags for load in loads])
        elements = float((lookups_T if traffic.is_sequence else bags_T) @ dims_T)
        in_map_T = rows_T if traffic.in_blocks else rows_T * size
        copies_T = np.ones_like(parts_T) if traffic.in_blocks else parts_T
        updated_T = rows_T * copies_T  # each shard of columns has all rows
        return StockTotals(
            features=sum(load.num_features for load in loads),
            lookups=float(lookups_T @ copies_T),
            lookup_elements=float(lookups_T @ dims_T),
            lengths=float(bags_T @ parts_T),
            vector_elements=0.0 if traffic.is_summed else elements,
            summed_elements=elements if traffic.is_summed else 0.0,
            rows=float(updated_T.sum()),
            row_elements=float(rows_T @ dims_T),
            hashed=float(hashed_work(updated_T, in_map_T).sum()) if traffic.is_sequence else 0.0,
        )


def _priced(name: str, step: StepPrice, wires: Sequence[Wire], messages: int) -> Priced:
    whole = Wire.joined(wires)
    return Priced(
        name=name,
        step=step,
        sent_bytes=whole.sent_bytes(),
        across_bytes=whole.across_bytes(),
        busiest_over_mean=whole.busiest_over_mean(),
        messages=messages,
    )


def curves_of(curves: CommCurves, cluster: Cluster) -> CommCurves:
    """Converts the curves of one cluster to those of another.

    Bytes take as long as those of an even exchange that fills a host's link as much: ranks of a
    host share it, a ring crosses it once. On one host a byte takes a core's time, unless links are
    faster. Latency grows with the peers of a rank.

    Raises:
        PlanError: If the curves are of one rank, or of one host, and the cluster has several.
    """
    curves.mismatch(world_size=cluster.world_size, device=curves.device)  # raises for one rank
    own_places = min(curves.ranks_per_host, curves.world_size)
    own_hosts = -(-curves.world_size // own_places)
    own_share = link_share(own_hosts, own_places)
    hosts, places, size = cluster.num_hosts, cluster.num_places, cluster.world_size
    share = link_share(hosts, places)
    if share and not own_share:
        raise PlanError(
            f"the curves are of one host, the cluster has {hosts}; measure them on several hosts, "
            "or give the rate of a link"
        )
    own_peers, found = max(1, curves.world_size - 1), curves.collectives
    core_rate = 1 / max(1e-9, curves.core_ns_per_byte)

    def on_host(curve: Curve, peers: int) -> Curve:
        return Curve.line(curve.latency_ms * peers / own_peers, max(core_rate, curve.gbytes_per_s))

    if own_share and not share:
        converted = {name: on_host(found[name], size - 1) for name in COLLECTIVES}
    else:
        factors = dict.fromkeys(("all_to_all", "row_exchange"), share / own_share if share else 1.0)
        peers = (size - 1) / own_peers
        converted = {
            name: _on_links(found[name], peers, factors.get(name, 1.0)) for name in COLLECTIVES
        }
    if hosts > 1 and places > 1:
        rows = found["row_exchange"]
        converted["inside"] = on_host(rows, places - 1)
        converted["across"] = _on_links(rows, (hosts - 1) / own_peers, places / own_share)
        if curves.has_levels:
            converted["inside"] = _on_links(found["inside"], (places - 1) / (own_places - 1), 1.0)
            link = (hosts - 1) / (own_hosts - 1), places / own_places
            converted["across"] = _on_links(found["across"], *link)
    return replace(curves, world_size=size, ranks_per_host=places, collectives=converted)


def _on_links(curve: Curve, peers: float, factor: float) -> Curve:
    """Returns the curve of exchanges that put ``factor`` times the bytes on a link, with ``peers``
    times the peers."""
    latency_ms = curve.latency_ms * peers
    return Curve(
        sent_bytes=tuple(round(num_bytes / factor) for num_bytes in curve.sent_bytes),
        ms=tuple(max(0.0, ms + latency_ms - curve.latency_ms) for ms in curve.ms),
        latency_ms=latency_ms,
        ms_per_byte=curve.ms_per_byte * factor,
    )
