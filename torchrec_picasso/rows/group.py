"""State that outlives a batch: the id space, the storages and reused memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_picasso.exchange.ranks import Ranks
from torchrec_picasso.ops.bag_pack import asked_bag_order
from torchrec_picasso.ops.bags import bag_order
from torchrec_picasso.ops.hot_slots import HotSlots
from torchrec_picasso.ops.ids import IdSpace, PackedTable
from torchrec_picasso.ops.pack_plan import PackPlan
from torchrec_picasso.storage.row_buffers import RowBuffers
from torchrec_picasso.storage.row_storage import RowStorage

__all__ = ["RowGroup"]


class RowGroup:
    """Tables whose rows are exchanged together.

    Args:
        tables: Tables of the group, ordered by pack; owner-pooled tables come last.
        storages: Home rows and replicas of each pack on this rank.
        ranks: This rank and its peers.
        device: Device of the rows.
    """

    def __init__(
        self,
        tables: Sequence[PackedTable],
        storages: Sequence[RowStorage],
        ranks: Ranks,
        device: torch.device,
    ) -> None:
        self.tables = tables
        self.space = IdSpace.build(tables, device)
        self.hot = HotSlots.build(tables, device)
        self.plan = PackPlan.build(tables, device)
        self.storages = storages
        self.ranks = ranks
        self.device = device
        self.buffers_M = [RowBuffers(dim, device) for dim in self.plan.dim_M]
        self._joined: Sequence[RowGroup] = ()
        self._module_P = {table.pack: table.module for table in tables}
        self._bag_features_of = Counter(
            table.module for table in tables if table.as_bags for _ in table.feature_names
        )
        self._order_of_sizes: tuple[tuple[int, ...], Tensor] | None = None
        self._asked_orders: dict[int, tuple[Sequence[Sequence[int]], Tensor]] = {}

    @staticmethod
    def of_several(groups: Sequence[RowGroup]) -> RowGroup:
        """Merges the groups of several modules into one exchange, over the same storages.

        Args:
            groups: One group per module, each with at most one wave of rows, all with equal ranks
                and wire precision.
        """
        if len(groups) == 1:
            return groups[0]
        assert all(group.plan.num_row_waves <= 1 for group in groups), "waves are of one module"
        tables: list[PackedTable] = []
        storages: list[RowStorage] = []
        # All row packs come before all owner-pooled packs, so packs are renumbered: row packs of
        # every module first, then owner-pooled packs of every module.
        for as_bags in (False, True):
            for module, group in enumerate(groups):
                form_tables = [table for table in group.tables if table.as_bags == as_bags]
                for old_pack, pack_tables in groupby(form_tables, lambda table: table.pack):
                    pack = len(storages)
                    tables += [replace(t, module=module, pack=pack, wave=0) for t in pack_tables]
                    storages.append(group.storages[old_pack])
        joined = RowGroup(tables, storages, groups[0].ranks, groups[0].device)
        joined._joined = groups
        joined.hot = replace(joined.hot, epoch=joined._joined_epoch)
        return joined

    @property
    def _joined_epoch(self) -> int:
        # Epochs only grow, so the sum changes whenever one group's hot set changes.
        return sum(group.hot.epoch for group in self._joined)

    def change_hot_rows(self, hot_rows_T: Sequence[Tensor]) -> None:
        """Sets the hot rows from now on; the storages update the replicas elsewhere.

        Args:
            hot_rows_T: Hot rows of each table, ascending int64; each pack keeps its number of hot
                rows.
        """
        self.tables = [
            replace(table, hot_rows_H=rows) for table, rows in zip(self.tables, hot_rows_T)
        ]
        epoch = self._joined_epoch if self._joined else self.hot.epoch + 1
        hot = HotSlots.build(self.tables, self.device, epoch)
        assert hot.start_P1 == self.hot.start_P1, "a pack keeps its number of replicas"
        self.hot = hot

    def follow_hot_rows(self) -> None:
        """Adopts the hot rows of the merged groups, if these have changed."""
        if not self._joined or self.hot.epoch == self._joined_epoch:
            return
        rows_by_table = {
            (module, table.name): table.hot_rows_H
            for module, group in enumerate(self._joined)
            for table in group.tables
        }
        self.change_hot_rows([rows_by_table[table.module, table.name] for table in self.tables])

    def tensors_of_hot_set(self) -> Iterator[Tensor]:
        """Yields the tensors of the hot set that requests read, for stream bookkeeping."""
        yield self.hot.ids_H
        yield from (storage.own_row_by_slot() for storage in self.row_storages)

    @property
    def row_storages(self) -> Sequence[RowStorage]:
        """Storages of the row packs, without owner-pooled packs."""
        return self.storages[: self.space.num_packs]

    @property
    def row_dtype(self) -> torch.dtype:
        """The smallest integer type that holds every row number of every home rank."""
        fits = all(pack.most_home_rows < 2**31 for pack in self.plan.bag_packs)
        return self.space.home_row_dtype if fits else torch.int64

    def in_one(self, features_of: Sequence[KeyedJaggedTensor]) -> KeyedJaggedTensor:
        """Concatenates the features of all modules in the order of the tables.

        Args:
            features_of: Features of each module, in the order of its own tables.
        """
        if len(features_of) == 1:
            return features_of[0]
        if not self.plan.bag_packs:
            return KeyedJaggedTensor.concat(list(features_of))
        # Each module has row features, then owner-pooled features; the group needs the row features
        # of all modules first.
        halves = [
            features.split([len(features.keys()) - num_last, num_last])
            for num_last, features in zip(
                (self._bag_features_of[module] for module in range(len(features_of))), features_of
            )
        ]
        return KeyedJaggedTensor.concat(
            [half for form_halves in zip(*halves) for half in form_halves if half.keys()]
        )

    def module_of_pack(self, pack: int) -> int:
        """Index of the module that has a pack."""
        return self._module_P[pack]

    def bag_order(self, sizes_K: Sequence[int | None]) -> Tensor | None:
        """Returns the permutation of bags to matrix-major order; see :func:`bag_order`.

        The result is cached until the sizes change.

        Args:
            sizes_K: Samples of each micro-batch; ``None`` if every feature has its own batch size.

        Returns:
            The permutation, int32, or ``None`` if bags keep their order.
        """
        sizes = tuple(size for size in sizes_K if size is not None)
        plan, row_matrices = self.plan, slice(self.plan.num_row_matrices)
        if (
            not sizes
            or not plan.features_M[row_matrices]
            or (not plan.pools_rows and len(sizes) == 1)
        ):
            return None
        if not any(plan.is_sequence_M):
            sizes = (sum(sizes),)  # the order of pooled bags does not depend on the split
        if self._order_of_sizes is None or self._order_of_sizes[0] != sizes:
            order_S = bag_order(
                plan.features_M[row_matrices], plan.is_sequence_M, sizes, self.device
            )
            self._order_of_sizes = (sizes, order_S)
        return self._order_of_sizes[1]

    def asked_bag_order(self, num_features: int, samples_WK: Sequence[Sequence[int]]) -> Tensor:
        """Returns the permutation of incoming bags; see :func:`asked_bag_order`.

        The result is cached until the samples change.

        Args:
            num_features: Number of features of a pack that this rank pools.
            samples_WK: Samples of each rank by micro-batch.
        """
        known = self._asked_orders.get(num_features)
        if known is None or known[0] != samples_WK:
            order_S = asked_bag_order(num_features, samples_WK, self.device)
            known = self._asked_orders[num_features] = (samples_WK, order_S)
        return known[1]

    def was_written(self) -> bool:
        """Whether rows on this rank were written from outside since :meth:`take_writes`."""
        return any(storage.was_written() for storage in self.storages)

    def take_writes(self) -> None:
        """Broadcasts every hot row from its home rank to all replicas. Collective."""
        for storage in self.storages:
            storage.fill_replicas()
