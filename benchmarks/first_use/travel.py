"""Traffic of a step, from the package's own requests of its batches; nothing is sent.

Counted is what all ranks send: an id of each cold row that is at home elsewhere, its row back, its
gradient, and headers; and the sum of hot rows' gradients, once a step however it is cut. A request
is exactly what a rank would ask for, so micro-batches with their own unique rows are requests of
their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_picasso.app.zoo.data.clicks import Clicks, history_of
from torchrec_picasso.batches.split import split_batch
from torchrec_picasso.ops.ids import PackedTable
from torchrec_picasso.rows.group import RowGroup
from torchrec_picasso.rows.request import RowRequest

_FLOAT_BYTES = 4
_CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Travel:
    """Traffic of all ranks together in a step.

    Args:
        rows: Cold rows that travel; each also has an id and a gradient that does.
        hot_rows: Rows whose gradients are summed over ranks.
        sent_bytes: Bytes of ids, rows, gradients and headers.
    """

    rows: int
    hot_rows: int
    sent_bytes: int


class Tables:
    """The tables of a stream, cut into homes as TorchRec's row-wise plan cuts them.

    Args:
        samples: Tell features and rows.
        dim: Columns of every table.
        world_size: Ranks.
    """

    def __init__(self, samples: Clicks, dim: int, world_size: int) -> None:
        self._dim, self._world_size = dim, world_size
        self._rows_of = {
            **{(name,): samples.num_rows(name) for name in samples.profiles},
            **{(name, history_of(name)): samples.num_rows(name) for name in samples.targets},
        }
        self._hot_ids = torch.empty(0, dtype=torch.int64)
        self._group = self._make_group()

    @property
    def num_hot_rows(self) -> int:
        """Rows with a replica on every rank."""
        return self._group.num_hot_rows

    def most_looked_up(self, batches: Sequence[Batch], num_rows: int) -> Tensor:
        """The rows that some batches look up most, over all tables: linear ids, ascending."""
        counts = torch.zeros(self._group.routes[0].space.num_rows, dtype=torch.int64)
        for rows in (self._read(batch).by_route[0].ids.rows for batch in batches):
            counts.index_add_(0, rows.ids_U.long(), rows.counts)
        most = counts.topk(min(num_rows, int((counts > 0).sum()))).indices
        return most.sort().values

    def replicate(self, ids_H: Tensor) -> None:
        """Makes these rows hot and no others; linear ids, ascending."""
        self._hot_ids = ids_H
        self._group = self._make_group()

    def lookups(self, batches: Sequence[Batch]) -> int:
        """Ids that batches hold, repeats and all."""
        return sum(batch.sparse_features.values().numel() for batch in batches)

    def first_use(self, batches: Sequence[Batch], sizes_K: Sequence[int]) -> Travel:
        """Every row once, in the chunk of the first micro-batch that uses it."""
        return self._travel([[self._read(batch, sizes_K)] for batch in batches])

    def per_micro_batch(self, batches: Sequence[Batch], sizes_K: Sequence[int]) -> Travel:
        """The unique rows of each micro-batch, with it. Arguments as for :meth:`first_use`."""
        return self._travel(
            [[self._read(part) for part in split_batch(batch, sizes_K)] for batch in batches]
        )

    def _travel(self, requests_W: Sequence[Sequence[RowRequest]]) -> Travel:
        rows = header_bytes = 0
        used = []
        for rank, requests in enumerate(requests_W):
            for request in requests:
                (route,) = request.by_route
                (counts_Q,) = route.located.counts_PQ  # hot, then cold by chunk and home
                cold_KW = counts_Q[1:].view(-1, self._world_size)
                rows += int(cold_KW.sum() - cold_KW[:, rank].sum())
                sent_WX = request.header_exchange.sent_WX
                header_bytes += _num_bytes(sent_WX) - _num_bytes(sent_WX[rank])
                used.append(bits_X := route.located.used_bits_X.numpy())
                if route.route.row_ranges.num_parts > 1:  # united ones go to all others
                    header_bytes += bits_X.nbytes // self._world_size * (self._world_size - 1)
        touched_X = np.bitwise_or.reduce(used)
        id_bytes = self._group.row_dtype.itemsize
        row_bytes = _FLOAT_BYTES * self._dim
        hot_rows = int(np.unpackbits(touched_X.view(np.uint8)).sum())
        summed_bytes = 2 * (self._world_size - 1) * hot_rows * row_bytes  # by a ring
        return Travel(
            rows=rows,
            hot_rows=hot_rows,
            sent_bytes=rows * (id_bytes + 2 * row_bytes) + header_bytes + summed_bytes,
        )

    def _read(self, batch: Batch, sizes_K: Sequence[int] | None = None) -> RowRequest:
        features: KeyedJaggedTensor = batch.sparse_features
        keys = features.keys()
        order = [keys.index(name) for names in self._rows_of for name in names]
        return RowRequest(self._group, [features.permute(order)], sizes_K)

    def _make_group(self) -> RowGroup:
        tables, base = [], 0
        for names, num_rows in self._rows_of.items():
            block = -(-num_rows // self._world_size)
            starts = [min(rank * block, num_rows) for rank in range(self._world_size + 1)]
            hot = self._hot_ids[(self._hot_ids >= base) & (self._hot_ids < base + num_rows)]
            tables.append(
                PackedTable(
                    name=names[0],
                    pack=0,
                    dim=self._dim,
                    block_rows_W=tuple(end - start for start, end in pairwise(starts)),
                    hot_rows_H=hot - base,
                    feature_names=names,
                )
            )
            base += num_rows
        unsent: Any = _Unsent(self._world_size)
        return RowGroup(tables, [], unsent, _CPU)


class _Unsent:
    """Ranks for requests that are made, and not sent."""

    def __init__(self, size: int) -> None:
        self.rank, self.size = 0, size

    def start_all_to_all(self, *_: object) -> None:
        """Sends nothing."""


def _num_bytes(values: Tensor) -> int:
    return values.numel() * values.element_size()
