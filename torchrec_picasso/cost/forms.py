"""The exchange that prices each form, and the memory of hot/cold tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torchrec_picasso.cost.by_host import ByHost
from torchrec_picasso.cost.hot_cold import WIRE_BYTES, Exchange, HotColdTable
from torchrec_picasso.cost.step_price import micro_batch_shares
from torchrec_picasso.cost.table_work import TableLoad
from torchrec_picasso.placement import FORMS, Form

EXCHANGES: Mapping[Form, type[Exchange]] = {"rows": Exchange, "bags": Exchange, "node_rows": ByHost}

_MARK_BYTES, _COUNT_BYTES = 1, 4  # of a home row
_MATRICES = (2.75, 3.5)
"""Rows held at the peak of a step, per distinct row of the batch: of a whole batch, and in
micro-batches. Two matrices with their slack, in micro-batches sums too, and rows that are sent."""
_LOOKUP_BYTES = (100, 170)
"""Of ids and positions, per lookup, in the same two cases. Predictions of sequences and of pooled
tables are within 10 % of measured peaks (``benchmarks.sequence_memory``, docs/dev/log.md)."""
_AHEAD_ROWS, _AHEAD_LOOKUP_BYTES = 1.6, 20
"""Of the next batch, which lookahead fetches: rows held per distinct row, in its matrix and sent,
and bytes per lookup."""


def home_row_bytes(load: TableLoad, num_hot: float, form: Form) -> float:
    """Returns the bytes of a home row: weights, optimizer state, and what is kept beside them."""
    return load.row_bytes + beside_home_row_bytes(num_hot, form)


def beside_home_row_bytes(num_hot: float, form: Form) -> int:
    """Returns the bytes that are kept of a home row beside the row: its mark as dirty, and its
    access count if the table has hot rows (``rows/row_route.py``, ``storage/row_uses.py``). Bags
    have neither."""
    return 0 if FORMS[form].sends_bags else _MARK_BYTES + _COUNT_BYTES * (num_hot > 0)


def hot_cold_memory_bytes(tables: Iterable[HotColdTable], num_parts: int = 1) -> dict[str, float]:
    """Predicts the bytes of hot/cold tables per rank; each has its number of hot rows and its form.

    ``home`` and ``replica`` are rows with their state, ``optimizer`` the state of both, and
    ``buffers`` those of a step in ``num_parts`` micro-batches with lookahead: rows, output, and
    their gradients, those that a relay passes on included. ``lookahead`` are those of the buffers
    that a step without lookahead does not have; a relay's stay, so that by host it is predicted up
    to 18 % too high (docs/dev/log.md)."""
    home = replica = optimizer = buffers = lookahead = 0.0
    matrices, lookup_bytes = _MATRICES[num_parts > 1], _LOOKUP_BYTES[num_parts > 1]
    with_gradient = 1 + max(micro_batch_shares(num_parts))
    for work, hot, form in tables:
        load = work.load
        at_home = load.num_embeddings / work.world_size
        home += at_home * home_row_bytes(load, hot, form)
        replica += hot * load.replica_bytes
        state_bytes = load.row_bytes * (load.optimizer_share / (1 + load.optimizer_share))
        optimizer += (at_home + hot) * state_bytes
        vectors = matrices * work.unique + with_gradient * load.vectors
        buffers += load.lookups * lookup_bytes
        held_vectors, held_bytes = EXCHANGES[form].held(work, hot)
        buffers += held_bytes + (vectors + held_vectors) * load.dim * WIRE_BYTES
        if not FORMS[form].sends_bags:
            lookahead += _AHEAD_ROWS * work.unique * load.dim * WIRE_BYTES
            lookahead += load.lookups * _AHEAD_LOOKUP_BYTES
    found = {"home": home, "replica": replica, "optimizer": optimizer}
    return found | {"buffers": buffers, "lookahead": lookahead}
