"""What ranks ask of a pack's home, and its two sides: reading for a batch, and the update after.

Of a pack of rows, that is home rows, each read for every rank that asked for it. Of a pack of bags,
it is bags of home rows, pooled here: one vector travels for each, and its gradient comes back. In
both a row is updated once per step, whoever asked for it.

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
    """What is asked of the home of one pack by one batch."""

    @property
    def by_fetch(self) -> FetchOrder:
        """What travels in which exchange, to which rank."""

    @property
    def home_rows(self) -> Tensor:
        """Home rows that are asked for, repeats among them: integer, one-dimensional."""

    def read(self, storage: RowStorage, exchange: int) -> Tensor:
        """What an exchange brings to the ranks, grouped by them: float32, ``(n, D)``."""

    def update(self, storage: RowStorage, touched: TouchedHot, grads_mD: Tensor) -> None:
        """Updates every row once.

        Args:
            storage: The pack's.
            touched: Hot rows that are updated too.
            grads_mD: Gradients of what was read, in request order, then of these.
        """

    def count_uses(self, uses: RowUses, slots_h: Tensor) -> None:
        """Counts its rows, and the replicas that this rank's batch uses."""

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor held, for stream bookkeeping."""

    @staticmethod
    def joined(of_batches: Sequence[Any]) -> Asked:
        """What several batches ask, to be updated together."""


@dataclass(frozen=True, kw_only=True)
class AskedRows:
    """Home rows."""

    rows_n: Tensor
    """In request order."""
    by_fetch: FetchOrder
    rows_by_fetch_n: Tensor
    """In fetch order."""

    @staticmethod
    def of(rows_n: Tensor, by_fetch: FetchOrder) -> AskedRows:
        """Puts rows in fetch order as well."""
        return AskedRows(rows_n=rows_n, by_fetch=by_fetch, rows_by_fetch_n=by_fetch.arrange(rows_n))

    @staticmethod
    def joined(of_batches: Sequence[AskedRows]) -> AskedRows:
        """Those of several batches, to be updated together."""
        rows_n = torch.cat([of.rows_n for of in of_batches])
        return AskedRows.of(rows_n, FetchOrder([[rows_n.numel()]], None))

    @property
    def home_rows(self) -> Tensor:
        """The rows."""
        return self.rows_n

    def read(self, storage: RowStorage, exchange: int) -> Tensor:
        """Reads rows, repeated ones again."""
        return storage.gather(self.rows_by_fetch_n[self.by_fetch.rows(exchange)])

    def update(self, storage: RowStorage, touched: TouchedHot, grads_mD: Tensor) -> None:
        """Updates the rows and replicas."""
        storage.update(self.rows_n, touched, grads_mD)

    def count_uses(self, uses: RowUses, slots_h: Tensor) -> None:
        """Counts both."""
        uses.count(self.rows_n, slots_h)

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor held, for stream bookkeeping."""
        yield from (self.rows_n, self.rows_by_fetch_n)


@dataclass(frozen=True, kw_only=True)
class AskedBags:
    """Bags of home rows: by part, rank, sample and feature."""

    rows_N: Tensor
    """Home row of each lookup, int64."""
    offsets_S1: Tensor
    """First lookup of each bag, and N, int64."""
    weights_N: Tensor | None
    """Weight of each lookup, that of a mean in it; ``None`` = ones."""
    scale_S: Tensor | None
    """What sums are multiplied by, where there are means but no weights; ``None`` = ones."""
    by_fetch: FetchOrder
    lookups_E1: Sequence[int]
    """First lookup of each exchange, and N, on the host."""

    @staticmethod
    def joined(of_batches: Sequence[AskedBags]) -> AskedBags:
        """Those of several batches, to be updated together."""
        starts = accumulate((of.rows_N.numel() for of in of_batches), initial=0)
        offsets = [of.offsets_S1[:-1] + start for of, start in zip(of_batches, starts)]
        rows_N = torch.cat([of.rows_N for of in of_batches])
        end = offsets[0].new_full((1,), rows_N.numel())
        weights = [of.weights_N for of in of_batches if of.weights_N is not None]
        scales = [of.scale_S for of in of_batches if of.scale_S is not None]
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
        """The row of each lookup."""
        return self.rows_N

    def read(self, storage: RowStorage, exchange: int) -> Tensor:
        """Pools bags."""
        bags, lookups = self.by_fetch.rows(exchange), slice(*self.lookups_E1[exchange:][:2])
        sums_SD = storage.pool(
            self.rows_N[lookups],
            self.offsets_S1[bags.start : bags.stop + 1] - lookups.start,
            None if self.weights_N is None else self.weights_N[lookups],
        )
        return self._scaled(sums_SD, bags)

    def update(self, storage: RowStorage, touched: TouchedHot, grads_mD: Tensor) -> None:
        """Updates the rows of the bags; none of them is hot."""
        assert not touched.slots_t.numel()
        grads_SD = self._scaled(grads_mD, slice(len(grads_mD)))
        storage.update_bags(self.rows_N, self.offsets_S1, self.weights_N, grads_SD)

    def count_uses(self, uses: RowUses, slots_h: Tensor) -> None:
        """Counts nothing: no row of theirs can be hot."""

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor held, for stream bookkeeping."""
        mine = (self.rows_N, self.offsets_S1, self.weights_N, self.scale_S)
        yield from (tensor for tensor in mine if tensor is not None)

    def _scaled(self, sums_SD: Tensor, bags: slice) -> Tensor:
        """Turns sums of some bags into averages, in place."""
        return sums_SD if self.scale_S is None else sums_SD.mul_(self.scale_S[bags].unsqueeze(1))
