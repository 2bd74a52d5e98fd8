"""Cost of the packed unique exchange for given hot sets. Pure arithmetic.

One exchange serves all tables of a module, so cost is asked for all of them together; what one
table adds is the difference of two answers. Five collectives carry a step: header, ids, rows,
gradients, and the hot rows' all-reduce.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torchrec_picasso.cost.curves import CommCurves
from torchrec_picasso.cost.local import LocalWork
from torchrec_picasso.cost.step_cost import StepCost
from torchrec_picasso.cost.table_work import HotSplit, TableWork

__all__ = ["hot_cold_cost", "hot_cold_memory_bytes"]

_WORD_BYTES = 8
_WORD_BITS = 64
_FLAGS = 3  # words of the header beside the counts
_WIRE_BYTES = 4  # a float32 element
_LARGEST_INT32 = 2**31 - 1


def hot_cold_cost(
    works: Sequence[TableWork],
    num_hot: Sequence[float],
    curves: CommCurves,
    *,
    home_max_over_mean: float = 1.0,
) -> StepCost:
    """Expected cost of one step of one module's hot/cold tables.

    Args:
        works: Its tables, all of one world size.
        num_hot: Hot rows of each.
        curves: Measured communication and local work.
        home_max_over_mean: Load of the busiest home over the mean.

    Returns:
        Zero for no tables.
    """
    if not works:
        return StepCost()
    world_size = works[0].world_size
    splits = [work.split(hot) for work, hot in zip(works, num_hot)]
    wire = _sent_bytes(works, splits, world_size)

    def ms(collective: str, name: str, uneven: float) -> float:
        return curves.ms(collective, wire[name] * uneven, world_size)

    header_and_ids_ms = ms("all_to_all", "header", 1.0) + ms(
        "all_to_all", "ids", home_max_over_mean
    )
    hot_ms = ms("all_reduce", "hot", 1.0) if wire["hot"] else 0.0
    costs = curves.local.hot_cold
    lookup_elements = sum(work.load.lookups * work.load.dim for work in works)
    unique_elements = sum(work.unique * work.load.dim for work in works)
    buffers = lookup_elements + 2 * unique_elements
    lookups = LocalWork(
        features=sum(work.load.num_features for work in works),
        lookups=sum(work.load.lookups for work in works),
        rows=sum(work.unique for work in works),
        lookup_elements=lookup_elements,
        row_elements=unique_elements,
        buffer_elements=buffers,
    )
    # every rank updates all touched replicas, and the cold rows that are at home there
    updated = LocalWork(
        features=lookups.features,
        lookups=lookups.lookups,
        rows=sum(split.cold_used + split.hot_touched for split in splits),
        lookup_elements=lookup_elements,
        row_elements=sum(
            (split.cold_used + split.hot_touched) * work.load.dim
            for work, split in zip(works, splits)
        ),
        buffer_elements=buffers,
    )
    return StepCost(
        input_dist_ms=costs.input_dist.ms(lookups) + header_and_ids_ms,
        forward_compute_ms=costs.forward.ms(lookups),
        forward_comms_ms=ms("all_to_all", "rows", home_max_over_mean),
        backward_compute_ms=costs.backward.ms(updated),
        backward_comms_ms=ms("all_to_all", "gradients", home_max_over_mean) + hot_ms,
        input_dist_wire_ms=header_and_ids_ms,
        sent_bytes=wire,
    )


def _sent_bytes(
    works: Sequence[TableWork], splits: Sequence[HotSplit], world_size: int
) -> dict[str, float]:
    """Mean bytes that a rank sends, by purpose; homes share the cold rows evenly."""
    to_others = (world_size - 1) / world_size
    cold_elements = sum(split.cold_used * work.load.dim for work, split in zip(works, splits))
    touched_elements = sum(split.hot_touched * work.load.dim for work, split in zip(works, splits))
    hot_words = math.ceil(sum(split.num_hot for split in splits) / _WORD_BITS)
    packs = len({work.load.dim for work in works})
    rows = cold_elements * _WIRE_BYTES * to_others
    return {
        "header": (world_size - 1) * _WORD_BYTES * (packs + _FLAGS + hot_words),
        "ids": sum(split.cold_used for split in splits) * to_others * _id_bytes(works, world_size),
        "rows": rows,
        "gradients": rows,
        "hot": 2 * to_others * touched_elements * _WIRE_BYTES,
    }


def _id_bytes(works: Sequence[TableWork], world_size: int) -> int:
    num_rows = sum(work.load.num_embeddings for work in works)
    return 4 if num_rows <= _LARGEST_INT32 else 8


def hot_cold_memory_bytes(works: Sequence[TableWork], num_hot: Sequence[float]) -> dict[str, float]:
    """Expected bytes per rank.

    Args:
        works: The tables.
        num_hot: Hot rows of each.

    Returns:
        ``home`` and ``replica`` (weights and optimizer state), ``optimizer`` (the state's part of
        both), ``buffers`` (fetched rows, their gradients, pooled output and its gradient).
    """
    home = sum(w.load.num_embeddings * w.load.row_bytes / w.world_size for w in works)
    replica = sum(hot * w.load.row_bytes for w, hot in zip(works, num_hot))
    optimizer = sum(
        (w.load.num_embeddings / w.world_size + hot)
        * (w.load.row_bytes - w.load.dim * w.load.element_bytes)
        for w, hot in zip(works, num_hot)
    )
    fetched = sum(w.unique * w.load.dim * _WIRE_BYTES for w in works)
    pooled = sum(w.load.bags * w.load.dim * _WIRE_BYTES for w in works)
    # rows asked of this home, rows fetched, and the gradients of both; the output and its gradient
    return {
        "home": home,
        "replica": replica,
        "optimizer": optimizer,
        "buffers": 4 * fetched + 2 * pooled,
    }
