"""Cost of the packed unique exchange, computed from totals over the hot/cold tables.

All tables of a module share five collectives per step: header, ids, rows, gradients, and the
all-reduce of hot rows' gradients.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

from torchrec_picasso.cost.curves import CommCurves
from torchrec_picasso.cost.exchange_totals import HotColdTotals
from torchrec_picasso.cost.local import LocalCosts, LocalWork
from torchrec_picasso.cost.step_cost import StepCost
from torchrec_picasso.cost.table_work import TableWork

__all__ = [
    "ExchangeWork",
    "bag_costs_ms",
    "exchange_bytes",
    "exchange_work",
    "hot_cold_cost",
    "hot_cold_memory_bytes",
    "ids_cost_ms",
    "packs_cost_ms",
]

_WORD_BYTES = 8
_WORD_BITS = 64
_FLAGS = 3  # words of the header that are no counts
_LENGTH_BYTES = 4
_WIRE_BYTES = 4  # a float32 element
_LARGEST_INT32 = 2**31 - 1

# Rows of several packs are concatenated before an exchange and split after it. On one core a second
# pack took 28 ms more in a step with 22,900 rows of D=128: 2.4 ns for each of four copies of an
# element. The operators of one pack are about a hundred, of 10 us each.
_COPY_NS = 2.4
_PACK_MS = 0.5  # per pack, in forward and again in backward


def hot_cold_cost(
    totals: HotColdTotals,
    curves: CommCurves,
    world_size: int,
    *,
    num_packs: int = 1,
) -> StepCost:
    """Predicts the cost of one step of hot/cold tables, without any overlap.

    Args:
        totals: Work of the tables.
        curves: Measured communication and local work.
        world_size: Number of ranks.
        num_packs: Number of packs of the tables.

    Returns:
        The cost; 0 without tables.
    """
    if not totals.features:
        return StepCost()
    wire = exchange_bytes(totals, world_size, num_packs)

    def ms(collective: str, name: str) -> float:
        return curves.ms(collective, wire[name], world_size)

    header_and_ids_ms = ms("row_exchange", "header") + ms("row_exchange", "ids")
    hot_ms = ms("all_reduce", "hot") if wire["hot"] else 0.0
    work = exchange_work(totals)
    costs = curves.local.hot_cold
    packs_ms = packs_cost_ms(totals, num_packs)
    bags_forward_ms, bags_backward_ms = bag_costs_ms(totals, curves.local)
    return StepCost(
        input_dist_ms=ids_cost_ms(totals, curves.local) + header_and_ids_ms,
        forward_compute_ms=costs.forward.ms(work.fetched) + packs_ms + bags_forward_ms,
        forward_comms_ms=ms("row_exchange", "rows"),
        backward_compute_ms=costs.backward.ms(work.updated) + packs_ms + bags_backward_ms,
        backward_comms_ms=ms("row_exchange", "gradients") + hot_ms,
        input_dist_wire_ms=header_and_ids_ms,
        sent_bytes=wire,
    )


@dataclass(frozen=True, kw_only=True)
class ExchangeWork:
    """Local work of a rank in one step, for its own batch and as home rank of others' rows.

    Args:
        fetched: Forward: home rows are gathered, received rows are stored, lookups are pooled.
        updated: Backward: gradients are summed by row, and rows are updated.
    """

    fetched: LocalWork
    updated: LocalWork


def exchange_work(totals: HotColdTotals, num_parts: int = 1) -> ExchangeWork:
    """Computes the local work of one step.

    A received bag is copied like a row. The work of home ranks on the lookups of bags is in
    :func:`bag_costs_ms`.

    Args:
        totals: Work of the tables.
        num_parts: Number of micro-batches; only one at a time has buffers of its lookups.
    """
    row_elements = totals.unique_elements + totals.bag_elements
    fetched = LocalWork(
        features=totals.features,
        lookups=totals.lookups,
        rows=totals.unique + totals.bags,
        lookup_elements=totals.lookup_elements,
        row_elements=row_elements,
        # pooling buffers of one micro-batch; rows and their gradients of the whole batch
        buffer_elements=totals.lookup_elements / num_parts + 2 * row_elements,
    )
    # every rank updates all touched replicas and its own home rows
    updated = dataclasses.replace(
        fetched,
        rows=totals.cold + totals.touched + totals.bags,
        row_elements=totals.cold_elements + totals.touched_elements + totals.bag_elements,
        updated=totals.updated + totals.touched,
    )
    return ExchangeWork(fetched=fetched, updated=updated)


def bag_costs_ms(totals: HotColdTotals, costs: LocalCosts) -> tuple[float, float]:
    """Predicts the work of a home rank on the lookups of bags: pooling and gradient sums by row.

    The operators are those of row-exchanged tables, except that lookups are sorted by row in
    backward. The lookups of all ranks spread over the home ranks, so on average a home rank has as
    many lookups as one rank's batch.

    Args:
        totals: Work of the tables.
        costs: Local costs.

    Returns:
        Milliseconds in forward, and in backward.
    """
    work = LocalWork(lookups=totals.bag_lookups, lookup_elements=totals.bag_lookup_elements)
    _, pool_ms, _ = costs.hot_cold.forward.split_ms(work)
    _, sum_ms, _ = costs.hot_cold.backward.split_ms(work)
    sort_ms = costs.hot_cold.input_dist.lookup_ns * totals.bag_lookups * 1e-6
    return pool_ms, sum_ms + sort_ms


def ids_cost_ms(totals: HotColdTotals, costs: LocalCosts) -> float:
    """Predicts the local work on ids, in milliseconds.

    Ids of row-exchanged tables are deduplicated; ids of owner-pooled tables are only sent, like
    those of stock tables.

    Args:
        totals: Work of the tables.
        costs: Local costs.
    """
    unique = LocalWork(
        features=totals.features,
        lookups=totals.lookups,
        rows=totals.unique,
        lookup_elements=totals.lookup_elements,
        row_elements=totals.unique_elements,
        updated=totals.updated,
    )
    return costs.hot_cold.input_dist.ms(unique) + (
        costs.stock.input_dist.lookup_ns * totals.bag_lookups * 1e-6
    )


def packs_cost_ms(totals: HotColdTotals, num_packs: int) -> float:
    """Predicts the overhead of several packs over one pack: milliseconds in forward or backward.

    Args:
        totals: Work of the tables.
        num_packs: Number of packs.
    """
    if num_packs == 1:
        return 0.0
    # two copies of each element in forward, two in backward
    return _PACK_MS * (num_packs - 1) + 2 * totals.cold_elements * _COPY_NS * 1e-6


def exchange_bytes(totals: HotColdTotals, world_size: int, num_packs: int) -> dict[str, float]:
    """Predicts the bytes that a rank sends, by purpose: mean over ranks.

    Args:
        totals: Work of the tables.
        world_size: Number of ranks.
        num_packs: Number of packs of the tables.
    """
    to_others = (world_size - 1) / world_size  # rows with their home on this rank are not sent
    hot_words = math.ceil(totals.hot / _WORD_BITS)
    id_bytes = 4 if totals.rows <= _LARGEST_INT32 else 8
    rows = (totals.cold_elements + totals.bag_elements) * _WIRE_BYTES * to_others
    ids = (totals.cold + totals.bag_lookups) * id_bytes + totals.bags * _LENGTH_BYTES
    return {
        "header": (world_size - 1) * _WORD_BYTES * (num_packs + _FLAGS + hot_words),
        "ids": ids * to_others,
        "rows": rows,
        "gradients": rows,
        "hot": 2 * to_others * totals.touched_elements * _WIRE_BYTES,
    }


def hot_cold_memory_bytes(works: Sequence[TableWork], num_hot: Sequence[float]) -> dict[str, float]:
    """Predicts the memory of hot/cold tables per rank, in bytes.

    Args:
        works: The tables.
        num_hot: Number of hot rows of each table.

    Returns:
        ``home`` and ``replica``: weights and optimizer state; ``optimizer``: the optimizer state in
        both; ``buffers``: outgoing rows, fetched rows, gradients of both, and the pooled output
        with its gradient.
    """
    home = replica = optimizer = buffers = 0.0
    for work, hot in zip(works, num_hot):
        load = work.load
        at_home = load.num_embeddings / work.world_size
        home += at_home * load.row_bytes
        replica += hot * load.row_bytes
        optimizer += (
            (at_home + hot) * load.row_bytes * (load.optimizer_share / (1 + load.optimizer_share))
        )
        # 4: fetched and outgoing rows with gradients; 2: output and gradient
        buffers += (4 * work.unique + 2 * load.bags) * load.dim * _WIRE_BYTES
    return {"home": home, "replica": replica, "optimizer": optimizer, "buffers": buffers}
