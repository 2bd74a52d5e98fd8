"""What outlives a batch: where ids live, who holds their rows, and memory that steps use again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from torchrec_picasso.exchange.ranks import Ranks
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
        space: Their ids.
        hot: Which rows are hot.
        plan: Which packs travel and are pooled together.
        storages: Homes and replicas of each pack on this rank.
        ranks: Who exchanges.
        device: Where rows are.
    """

    def __init__(
        self,
        space: IdSpace,
        hot: HotSlots,
        plan: PackPlan,
        storages: Sequence[RowStorage],
        ranks: Ranks,
        device: torch.device,
    ) -> None:
        self.space = space
        self.hot = hot
        self.plan = plan
        self.storages = storages
        self.ranks = ranks
        self.device = device
        self.buffers_M = [RowBuffers(dim, device) for dim in plan.dim_M]
        self._module_P = {table.pack: table.module for table in space.tables}
        self._order_of_sizes: tuple[tuple[int, ...], Tensor] | None = None

    @staticmethod
    def of_several(groups: Sequence[RowGroup]) -> RowGroup:
        """The tables of several modules in one exchange, over the same rows.

        Args:
            groups: One per module, each of one wave, all with equal ranks and wire.
        """
        if len(groups) == 1:
            return groups[0]
        assert all(len(group.plan.waves) == 1 for group in groups), "waves are of one module"
        tables: list[PackedTable] = []
        for module, group in enumerate(groups):
            first_pack = tables[-1].pack + 1 if tables else 0
            tables += [
                replace(table, module=module, pack=first_pack + table.pack, wave=0)
                for table in group.space.tables
            ]
        first = groups[0]
        return RowGroup(
            IdSpace.build(tables, first.device),
            HotSlots.build(tables, first.device),
            PackPlan.build(tables, first.device),
            [storage for group in groups for storage in group.storages],
            first.ranks,
            first.device,
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
        if not sizes or (not self.plan.has_bags and len(sizes) == 1):
            return None
        if not any(self.plan.is_sequence_M):
            sizes = (sum(sizes),)  # pooled bags are in the same order however the batch is cut
        if self._order_of_sizes is None or self._order_of_sizes[0] != sizes:
            plan = self.plan
            order_S = bag_order(plan.features_M, plan.is_sequence_M, sizes, self.device)
            self._order_of_sizes = (sizes, order_S)
        return self._order_of_sizes[1]

    def replicas_stale(self) -> bool:
        """Whether this rank's homes were written from outside since its replicas were filled."""
        return any(storage.replicas_stale() for storage in self.storages)

    def fill_replicas(self) -> None:
        """Copies every hot row from its home to all ranks. Collective."""
        for storage in self.storages:
            storage.fill_replicas()

    def written_outside(self) -> bool:
        """Whether somebody wrote into rows here since :meth:`accept_writes` or an update."""
        return any(storage.written_outside() for storage in self.storages)

    def accept_writes(self) -> None:
        """Takes the rows as they are: what was fetched is what the storages hold."""
        for storage in self.storages:
            storage.accept_writes()
