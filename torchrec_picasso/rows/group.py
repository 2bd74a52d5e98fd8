"""What outlives a batch: where ids live, who holds their rows, and memory that steps use again."""

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
        tables: They, packs ascending, those whose bags travel last.
        storages: Homes and replicas of each pack on this rank.
        ranks: Who exchanges.
        device: Where rows are.
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
        """The tables of several modules in one exchange, over the same rows.

        Args:
            groups: One per module, each with one wave of rows at most, all with equal ranks and
                wire.
        """
        if len(groups) == 1:
            return groups[0]
        assert all(group.plan.num_row_waves <= 1 for group in groups), "waves are of one module"
        tables: list[PackedTable] = []
        storages: list[RowStorage] = []
        for as_bags in (False, True):
            for module, group in enumerate(groups):
                of_form = [table for table in group.tables if table.as_bags == as_bags]
                for old_pack, of_pack in groupby(of_form, lambda table: table.pack):
                    pack = len(storages)
                    tables += [replace(of, module=module, pack=pack, wave=0) for of in of_pack]
                    storages.append(group.storages[old_pack])
        joined = RowGroup(tables, storages, groups[0].ranks, groups[0].device)
        joined._joined = groups
        joined.hot = replace(joined.hot, epoch=joined._joined_epoch)
        return joined

    @property
    def _joined_epoch(self) -> int:
        return sum(group.hot.epoch for group in self._joined)

    def change_hot_rows(self, hot_rows_T: Sequence[Tensor]) -> None:
        """Says which rows are hot from now on; those who keep replicas are told elsewhere.

        Args:
            hot_rows_T: Of each table, ascending int64; of each pack as many as before.
        """
        self.tables = [
            replace(table, hot_rows_H=rows) for table, rows in zip(self.tables, hot_rows_T)
        ]
        epoch = self._joined_epoch if self._joined else self.hot.epoch + 1
        hot = HotSlots.build(self.tables, self.device, epoch)
        assert hot.start_P1 == self.hot.start_P1, "a pack keeps its number of replicas"
        self.hot = hot

    def follow_hot_rows(self) -> None:
        """Takes over the hot rows of the groups that it joins, where these were changed."""
        if not self._joined or self.hot.epoch == self._joined_epoch:
            return
        of_table = {
            (module, table.name): table.hot_rows_H
            for module, group in enumerate(self._joined)
            for table in group.tables
        }
        self.change_hot_rows([of_table[table.module, table.name] for table in self.tables])

    def tensors_of_hot_set(self) -> Iterator[Tensor]:
        """What requests read of the hot set, for stream bookkeeping."""
        yield self.hot.ids_H
        yield from (storage.own_row_by_slot() for storage in self.row_storages)

    @property
    def row_storages(self) -> Sequence[RowStorage]:
        """Those of packs whose rows travel."""
        return self.storages[: self.space.num_packs]

    @property
    def row_dtype(self) -> torch.dtype:
        """The smallest integer type that holds every row of every home."""
        fits = all(pack.most_home_rows < 2**31 for pack in self.plan.bag_packs)
        return self.space.home_row_dtype if fits else torch.int64

    def in_one(self, features_of: Sequence[KeyedJaggedTensor]) -> KeyedJaggedTensor:
        """The features of all modules in the order of the tables.

        Args:
            features_of: Of each module, in the order of its own tables.
        """
        if len(features_of) == 1:
            return features_of[0]
        if not self.plan.bag_packs:
            return KeyedJaggedTensor.concat(list(features_of))
        halves = [
            features.split([len(features.keys()) - num_last, num_last])
            for num_last, features in zip(
                (self._bag_features_of[module] for module in range(len(features_of))), features_of
            )
        ]
        return KeyedJaggedTensor.concat(
            [half for of_form in zip(*halves) for half in of_form if half.keys()]
        )

    def module_of_pack(self, pack: int) -> int:
        """Which module a pack is of."""
        return self._module_P[pack]

    def bag_order(self, sizes_K: Sequence[int | None]) -> Tensor | None:
        """The order of bags by matrix and sample, as :func:`bag_order` gives it.

        Args:
            sizes_K: Samples of each part; ``None`` where every feature has its own number.

        Returns:
            ``None`` where bags stay as they come.
        """
        sizes = tuple(size for size in sizes_K if size is not None)
        plan, of_rows = self.plan, slice(self.plan.num_row_matrices)
        if not sizes or not plan.features_M[of_rows] or (not plan.pools_rows and len(sizes) == 1):
            return None
        if not any(plan.is_sequence_M):
            sizes = (sum(sizes),)  # pooled bags are in the same order however the batch is cut
        if self._order_of_sizes is None or self._order_of_sizes[0] != sizes:
            order_S = bag_order(plan.features_M[of_rows], plan.is_sequence_M, sizes, self.device)
            self._order_of_sizes = (sizes, order_S)
        return self._order_of_sizes[1]

    def asked_bag_order(self, num_features: int, samples_WK: Sequence[Sequence[int]]) -> Tensor:
        """The order of bags at this home, as :func:`asked_bag_order` gives it.

        Args:
            num_features: Features of a pack that this rank pools.
            samples_WK: Samples of each rank by part.
        """
        known = self._asked_orders.get(num_features)
        if known is None or known[0] != samples_WK:
            order_S = asked_bag_order(num_features, samples_WK, self.device)
            known = self._asked_orders[num_features] = (samples_WK, order_S)
        return known[1]

    def was_written(self) -> bool:
        """Whether somebody wrote into rows on this rank since :meth:`take_writes`."""
        return any(storage.was_written() for storage in self.storages)

    def take_writes(self) -> None:
        """Copies every hot row from its home to all ranks. Collective."""
        for storage in self.storages:
            storage.fill_replicas()
