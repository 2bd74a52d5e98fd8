"""State that outlives a batch: the routes of some tables, the storages and reused memory.

A further route is a file beside this one and a line in :data:`ROUTES`; for plans it also needs a
form in ``placement.py``, and a price (docs/architecture.md).

On the CPU a new matrix of some megabytes is new memory, and the first write to each 4 KiB costs a
page fault: 20 of 350 ms for the rows and gradients of a Criteo step (three matrices of 22,900 rows
of D=128). Matrices are therefore reused from step to step. An accelerator's allocator reuses memory
by itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_picasso.exchange.all_to_all import Ranks
from torchrec_picasso.ops.ids import PackedTable
from torchrec_picasso.ops.pack_plan import PackPlan
from torchrec_picasso.placement import FORMS
from torchrec_picasso.rows.node_route import NodeRoute
from torchrec_picasso.rows.pooled_route import PooledRoute
from torchrec_picasso.rows.route import Route
from torchrec_picasso.rows.row_route import RowRoute
from torchrec_picasso.storage.row_storage import RowStorage

ROUTES: Mapping[str, type[Route]] = {
    route.name: route for route in (RowRoute, PooledRoute, NodeRoute)
}
"""Routes by name; a group's packs, and the features of a batch, are in this order."""
assert [*ROUTES] == [*FORMS], "packs of a module are sorted by the other mapping"

_SLACK = 1.125
"""Capacity factor of a buffer, since the next batch may have some more rows."""


class RowGroup:
    """Tables whose rows are exchanged together.

    Tables are ordered by route as in :data:`.ROUTES`, then by pack; ``storages`` holds this rank's
    home rows and replicas of each pack in the same order.
    """

    def __init__(
        self,
        tables: Sequence[PackedTable],
        storages: Sequence[RowStorage],
        ranks: Ranks,
        device: torch.device,
    ) -> None:
        self.routes: list[Route] = []
        first = 0
        for name, same_route in groupby(tables, lambda table: table.route):
            own = list(same_route)
            end = first + own[-1].pack + 1
            self.routes.append(ROUTES[name](own, storages[first:end], ranks, device))
            first = end
        ways = {route.exchanges for route in self.routes}
        assert len(ways) == 1, "a group exchanges by host, or directly"
        self.exchanges = ways.pop()(ranks)
        self.plan = PackPlan.joined([route.plan for route in self.routes])
        self.storages = storages
        self.ranks = ranks
        self.device = device
        self.buffers_M = [RowBuffers(dim, device) for dim in self.plan.dim_M]
        self._merged: Sequence[RowGroup] = ()
        # Number of features by module and route, in the order of the module's features.
        features = Counter((t.module, t.route) for t in tables for _ in t.feature_names)
        names, modules = [route.name for route in self.routes], range(len(self.plan.modules))
        self._nums_by_module = [[features[module, name] for name in names] for module in modules]

    @staticmethod
    def merged(groups: Sequence[RowGroup]) -> RowGroup:
        """Merges the groups of several modules into one exchange, over the same storages. One group
        per module, none of them staggered, all with equal ranks and wire precision."""
        if len(groups) == 1:
            return groups[0]
        assert not any(group.is_staggered for group in groups), "waves are of one module"
        tables = merged_tables([group.tables for group in groups])
        same = [own for name in ROUTES for group in groups for own in group._routes_named(name)]
        storages = [storage for own in same for storage in own.storages]
        merged = RowGroup(tables, storages, groups[0].ranks, groups[0].device)
        merged._merged = groups
        merged.follow_hot_rows()
        return merged

    @property
    def tables(self) -> list[PackedTable]:
        """All tables, in the order of the features of a batch."""
        return [table for route in self.routes for table in route.tables]

    @property
    def is_staggered(self) -> bool:
        """Whether the placement has several waves; such a module is exchanged alone."""
        # Waves of bags follow from the number of packs, not from the placement.
        return any(len(route.plan.waves) > 1 for route in self.routes if route.shares_rows)

    @property
    def num_hot_rows(self) -> int:
        """Number of hot rows of all tables."""
        return sum(route.hot.num_rows for route in self.routes)

    @property
    def hot_rows(self) -> dict[str, Tensor]:
        """The hot rows by table name, ascending int64; tables without hot rows are left out."""
        return {t.name: t.hot_rows_H for t in self.tables if t.hot_rows_H.numel()}

    @property
    def hot_epoch(self) -> int:
        """Number of the hot set: it grows whenever any hot rows change."""
        return sum(route.hot.epoch for route in self.routes)

    def _routes_named(self, name: str) -> list[Route]:
        return [route for route in self.routes if route.name == name]

    def follow_hot_rows(self) -> None:
        """Adopts the hot rows of the merged groups, if these have changed."""
        for route in self.routes if self._merged else ():
            same = [own for group in self._merged for own in group._routes_named(route.name)]
            epoch = sum(own.hot.epoch for own in same)
            if epoch != route.hot.epoch:
                hot_rows_T = [table.hot_rows_H for own in same for table in own.tables]
                route.change_hot_rows(hot_rows_T, epoch)

    def tensors_of_hot_set(self) -> Iterator[Tensor]:
        """Yields the tensors of the hot set that requests read, for stream bookkeeping."""
        yield from (tensor for route in self.routes for tensor in route.tensors_of_hot_set())
        yield from (storage.hot_homes.own_row_H for storage in self.storages)

    @property
    def row_dtype(self) -> torch.dtype:
        """The smallest integer type that holds every row number of every home rank."""
        sizes = [max(rows_W) for route in self.routes for rows_W in route.space.home_rows_PW]
        return torch.int32 if max(sizes) < 2**31 else torch.int64

    def check(self, features: KeyedJaggedTensor) -> None:
        """Raises CompatError as :meth:`.Route.check`."""
        for route in self.routes:
            route.check(features)

    def in_one(self, features_by_module: Sequence[KeyedJaggedTensor]) -> KeyedJaggedTensor:
        """Concatenates the features of all modules, each in its own order, in the tables' order."""
        if len(features_by_module) == 1:
            return features_by_module[0]
        if len(self.routes) == 1:
            return KeyedJaggedTensor.concat(list(features_by_module))
        # Each module has the features of the first route, then those of the next; the group needs
        # the features of the first route of all modules first.
        split = [f.split(nums) for f, nums in zip(features_by_module, self._nums_by_module)]
        by_route = [own for same_route in zip(*split) for own in same_route if own.keys()]
        return KeyedJaggedTensor.concat(by_route)

    def was_written(self) -> bool:
        """Whether rows on this rank were written from outside since :meth:`apply_writes`."""
        return any(storage.was_written() for storage in self.storages)

    def check_unwritten(self) -> None:
        """Raises PicassoError on this rank, as :meth:`.RowStorage.check_unwritten`."""
        for storage in self.storages:
            storage.check_unwritten()

    @property
    def num_changes(self) -> int:
        """Number of updates of all packs, and of writes taken over, by any driver of the tables."""
        return sum(storage.num_changes for storage in self.storages)

    def apply_writes(self) -> None:
        """Broadcasts every hot row from its home rank to all replicas. Collective."""
        for storage in self.storages:
            storage.fill_replicas()


def merged_tables(tables_by_module: Sequence[Sequence[PackedTable]]) -> list[PackedTable]:
    """Merges the tables of several modules, by route; those of one module stay as they are."""
    if len(tables_by_module) == 1:
        return list(tables_by_module[0])
    merged: list[PackedTable] = []
    for name in ROUTES:
        num_packs = 0
        for module, tables in enumerate(tables_by_module):
            own = [table for table in tables if table.route == name]
            packs = [num_packs + table.pack for table in own]
            merged += [replace(t, module=module, pack=p, wave=0) for t, p in zip(own, packs)]
            num_packs = max([num_packs, *(pack + 1 for pack in packs)])
    return merged


class RowBuffers:
    """A pool of released matrices with ``dim`` columns."""

    def __init__(self, dim: int, device: torch.device) -> None:
        self._dim = dim
        self._device = device
        self._free: list[Tensor] = []

    def take(self, num_rows: int) -> Tensor:
        """Returns an uninitialized float32 matrix, shape ``(num_rows, dim)``."""
        if self._device.type != "cpu":
            return torch.empty(num_rows, self._dim, dtype=torch.float32, device=self._device)
        # Smallest buffer that fits.
        self._free.sort(key=len)
        for index, buffer in enumerate(self._free):
            if len(buffer) >= num_rows:
                return self._free.pop(index)[:num_rows]
        if self._free:
            self._free.pop()  # the new allocation replaces the largest one, which is too small
        return torch.empty(int(num_rows * _SLACK), self._dim, dtype=torch.float32)[:num_rows]

    def release(self, matrix: Tensor) -> None:
        """Releases a matrix of :meth:`take`; no reader or writer may be left."""
        # take() returns a view; its base is the whole buffer. Other devices' matrices have no base.
        if matrix._base is not None:
            self._free.append(matrix._base)


class Matrices:
    """Matrices of one batch, of rows or of gradients: ``num_rows_M`` rows each, in memory of
    ``buffers_M``."""

    def __init__(self, buffers_M: Sequence[RowBuffers], num_rows_M: Sequence[int]) -> None:
        self._buffers_M = buffers_M
        self._num_rows_M = num_rows_M
        self._taken_M: list[Tensor] = []

    @property
    def tensors(self) -> Sequence[Tensor]:
        """The matrices, ``(U_m, D_m)``, allocated at first access and not initialized."""
        if not self._taken_M:
            self._taken_M = [b.take(n) for b, n in zip(self._buffers_M, self._num_rows_M)]
        return self._taken_M

    def release(self) -> None:
        """Releases the memory; no reader or writer may be left. Further calls have no effect."""
        for buffers, matrix in zip(self._buffers_M, self._taken_M):
            buffers.release(matrix)
        self._taken_M = []
