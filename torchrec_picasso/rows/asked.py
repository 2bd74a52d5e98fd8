"""Incoming requests at the home rank of a pack: reading for a batch, and the update after it.

For a pack of rows the requests are home rows, each read for every rank that requested it. For an
owner-pooled pack the requests are bags of home rows, pooled on the home rank: one vector per bag is
sent, and its gradient comes back. In both cases a row is updated once per step, however many ranks
requested it.

Shape letters: S bags, N lookups, W ranks, D dim; n and m rows, t touched hot rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor

from torchrec_picasso.ops.fetch_order import FetchOrder
from torchrec_picasso.storage.hot_homes import TouchedHot
from torchrec_picasso.storage.row_storage import RowStorage
from torchrec_picasso.storage.row_uses import RowUses

__all__ = ["Asked", "AskedBags", "AskedRows"]


class Asked(Protocol):
    """The incoming requests of one batch at the home rank of one pack."""

    @property
    def by_fetch(self) -> FetchOrder:
        """Fetch order of the sent vectors, by exchange and destination rank."""

    @property
    def home_rows(self) -> Tensor:
        """Requested home rows, with repeats: integer, one-dimensional."""

    def read(self, storage: RowStorage, exchange: int) -> Tensor:
        """Returns the vectors of an exchange, grouped by destination rank: float32, ``(n, D)``."""

    def update(self, storage: RowStorage, touched: TouchedHot, grads_mD: Tensor) -> None:
        """Updates every row once.

        Args:
            storage: Storage of the pack.
            touched: Hot rows that are updated too.
            grads_mD: Gradients of the vectors read, in request order, then gradients of the hot
                rows.
        """

    def count_uses(self, uses: RowUses, slots_h: Tensor) -> None:
        """Adds the requested rows to the access counts.

        Args:
            uses: Access counts of the pack.
            slots_h: Slots of the replicas that this rank's batch uses.
        """

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor held, for stream bookkeeping."""

    @staticmethod
    def joined(batches: Sequence[Any]) -> Asked:
        """Merges the requests of several batches into one, to be updated together."""


@dataclass(frozen=True, kw_only=True)
class AskedRows:
    """Incoming requests for home rows."""

    rows_n: Tensor
    """Home rows in request order."""
    by_fetch: FetchOrder
    rows_by_fetch_n: Tensor
    """Home rows in fetch order."""

    @staticmethod
    def of(rows_n: Tensor, by_fetch: FetchOrder) -> AskedRows:
        """Builds the requests from rows in request order.

        Args:
            rows_n: Home rows in request order, integer, shape ``(n,)``.
            by_fetch: Fetch order of these rows.
        """
        return AskedRows(rows_n=rows_n, by_fetch=by_fetch, rows_by_fetch_n=by_fetch.arrange(rows_n))

    @staticmethod
    def joined(batches: Sequence[AskedRows]) -> AskedRows:
        """Merges the requests of several batches into one, to be updated together."""
        rows_n = torch.cat([asked.rows_n for asked in batches])
        # The result is only updated, never fetched, so one exchange holds all rows.
        return AskedRows.of(rows_n, FetchOrder([[rows_n.numel()]], None))

    @property
    def home_rows(self) -> Tensor:
        """Requested home rows, with repeats, shape ``(n,)``."""
        return self.rows_n

    def read(self, storage: RowStorage, exchange: int) -> Tensor:
        """Reads the rows of an exchange; rows that several ranks requested are read repeatedly."""
        return storage.gather(self.rows_by_fetch_n[self.by_fetch.rows(exchange)])

    def update(self, storage: RowStorage, touched: TouchedHot, grads_mD: Tensor) -> None:
        """Updates the rows and the replicas."""
        storage.update(self.rows_n, touched, grads_mD)

    def count_uses(self, uses: RowUses, slots_h: Tensor) -> None:
        """Counts the rows and the replicas."""
        uses.count(self.rows_n, slots_h)

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor held, for stream bookkeeping."""
        yield from (self.rows_n, self.rows_by_fetch_n)


@dataclass(frozen=True, kw_only=True)
class AskedBags:
    """Incoming requests for pooled bags, ordered by micro-batch, rank, sample and feature."""

    rows_N: Tensor
    """Home row of each lookup, int64."""
    offsets_S1: Tensor
    """First lookup of each bag, and N, int64, shape ``(S + 1,)``."""
    weights_N: Tensor | None
    """Weight of each lookup, including the divisor of a mean; ``None`` = ones."""
    scale_S: Tensor | None
    """Factor of each bag's sum, where bags are averaged without weights; ``None`` = ones."""
    by_fetch: FetchOrder
    lookups_E1: Sequence[int]
    """First lookup of each exchange; the last entry is N; on the host."""

    @staticmethod
    def joined(batches: Sequence[AskedBags]) -> AskedBags:
        """Merges the requests of several batches into one, to be updated together."""
        starts = accumulate((asked.rows_N.numel() for asked in batches), initial=0)
        # Shift each batch's offsets by the lookups before it and drop its end, which is the next
        # batch's start; the end of the last batch is appended below.
        offsets = [asked.offsets_S1[:-1] + start for asked, start in zip(batches, starts)]
        rows_N = torch.cat([asked.rows_N for asked in batches])
        end = offsets[0].new_full((1,), rows_N.numel())
        weights = [asked.weights_N for asked in batches if asked.weights_N is not None]
        scales = [asked.scale_S for asked in batches if asked.scale_S is not None]
        return AskedBags(
            rows_N=rows_N,
            offsets_S1=torch.cat([*offsets, end]),
            weights_N=torch.cat(weights) if weights else None,
            scale_S=torch.cat(scales) if scales else None,
            by_fetch=FetchOrder([[sum(map(len, offsets))]], order_n=None),
            lookups_E1=(0, rows_N.numel()),
        )

    @property
    def home_rows(self) -> Tensor:
        """Home row of each lookup, shape ``(N,)``."""
        return self.rows_N

    def read(self, storage: RowStorage, exchange: int) -> Tensor:
        """Pools the bags of an exchange."""
        bags, lookups = self.by_fetch.rows(exchange), slice(*self.lookups_E1[exchange:][:2])
        # One exchange is a slice of bags and a slice of lookups; offsets count from its first
        # lookup.
        sums_SD = storage.pool(
            self.rows_N[lookups],
            self.offsets_S1[bags.start : bags.stop + 1] - lookups.start,
            None if self.weights_N is None else self.weights_N[lookups],
        )
        return self._scaled(sums_SD, bags)

    def update(self, storage: RowStorage, touched: TouchedHot, grads_mD: Tensor) -> None:
        """Updates the rows of the bags; owner-pooled tables have no hot rows."""
        assert not touched.slots_t.numel()
        # A mean's divisor scales the bag's gradient as it scaled the sum in forward.
        grads_SD = self._scaled(grads_mD, slice(len(grads_mD)))
        storage.update_bags(self.rows_N, self.offsets_S1, self.weights_N, grads_SD)

    def count_uses(self, uses: RowUses, slots_h: Tensor) -> None:
        """Counts nothing, because owner-pooled tables have no hot rows."""

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor held, for stream bookkeeping."""
        tensors = (self.rows_N, self.offsets_S1, self.weights_N, self.scale_S)
        yield from (tensor for tensor in tensors if tensor is not None)

    def _scaled(self, sums_SD: Tensor, bags: slice) -> Tensor:
        """Converts the sums of some bags to averages, in place."""
        return sums_SD if self.scale_S is None else sums_SD.mul_(self.scale_S[bags].unsqueeze(1))
