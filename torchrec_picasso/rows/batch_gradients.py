"""The gradients of one batch's rows: summed over its parts, sent home, applied once.

Parts run backward from the last to the first, so the gradients of a chunk are complete right after
its part. What arrives at home, and what was summed for the replicas, is kept until the update,
which takes every row once.

Shape letters: K parts and chunks, M matrices, P packs; n and m rows of an exchange, t touched hot
rows, D dim.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from torchrec_picasso.exchange.hot_reduction import HotReduction
from torchrec_picasso.exchange.packed_all_to_all import PackedAllToAll
from torchrec_picasso.ops.bag_pack import PartBags
from torchrec_picasso.rows.asked import Asked
from torchrec_picasso.rows.group import RowGroup
from torchrec_picasso.rows.layout import PackLayout, RowLayout
from torchrec_picasso.rows.memory import Matrices
from torchrec_picasso.storage.hot_homes import TouchedHot

__all__ = ["BatchGradients", "update_rows"]


class BatchGradients:
    """Gradients of one batch in one backward.

    Collective where it says so: on all ranks in the same order. Where a method takes a wave, it is
    for the packs of that wave, none if the module has fewer waves; ``None`` = for all packs.

    Args:
        group: The tables.
        layout: Of the batch.
    """

    def __init__(self, group: RowGroup, layout: RowLayout) -> None:
        self._group = group
        self._layout = layout
        self._sums: Matrices | None = None
        self._sums_M: list[Tensor | None] = [None] * len(layout.rows_M)
        # one matrix per pack: gradients of home rows, then sums for touched replicas, (m + t, D)
        buffers_P = [group.buffers_M[pack.matrix] for pack in layout.packs]
        rows_P = [pack.asked.num_rows + pack.touched.slots_t.numel() for pack in layout.packs]
        self._at_home = Matrices(buffers_P, rows_P)
        self._pending_P: list[list[PackedAllToAll | HotReduction]] = [[] for _ in layout.packs]
        self._packs_left = set(range(len(layout.packs)))

    def add(self, part: int, grads_M: Sequence[Tensor], module: int = 0) -> None:
        """Adds the gradients of the rows that a part uses, ``(n, D_m)`` by matrix of a module."""
        matrices = self._group.plan.modules[module]
        if len(self._layout.sizes_K) == 1:  # they are in request order
            for matrix, grads in zip(matrices, grads_M):
                self._sums_M[matrix] = grads
            return
        if self._sums is None:
            self._sums = Matrices(self._group.buffers_M, self._layout.rows_M)
            self._sums_M = [sums.zero_() for sums in self._sums.tensors]
        for matrix, grads in zip(matrices, grads_M):
            sums, pooling = self._sums_M[matrix], self._layout.pooling_KM[part][matrix]
            assert sums is not None
            if isinstance(pooling, PartBags):
                sums[pooling.vectors] = grads
                continue
            assert pooling.gradient_place_U is not None
            sums.index_add_(0, pooling.gradient_place_U, grads)

    def send(self, chunk: int, wave: int | None = None) -> None:
        """Starts sending the gradients of a chunk home. Collective.

        Its part has run backward, and so have all later ones.
        """
        packs, layouts = self._of_wave(wave)
        if not layouts:
            return
        exchange = PackedAllToAll(
            self._group.ranks,
            [self._sums_of(pack)[pack.cold_place][pack.mine.rows(chunk)] for pack in layouts],
            [pack.mine.counts_EW[chunk] for pack in layouts],
            [
                at_home[pack.asked.rows(chunk)]
                for at_home, pack in zip(self._at_home.tensors[packs], layouts)
            ],
            [pack.asked.counts_EW[chunk] for pack in layouts],
            self._group.ranks.gradient_codec,
        )
        for pending in self._pending_P[packs]:
            pending.append(exchange)

    def reduce_hot(self, wave: int | None = None) -> None:
        """Starts summing the gradients of touched replicas over ranks. Collective."""
        packs, layouts = self._of_wave(wave)
        if not layouts:
            return
        reduction = HotReduction(
            self._group.ranks,
            [self._sums_of(pack)[pack.hot_place] for pack in layouts],
            [torch.searchsorted(pack.touched.slots_t, pack.hot_slots) for pack in layouts],
            [
                at_home[pack.asked.num_rows :]
                for at_home, pack in zip(self._at_home.tensors[packs], layouts)
            ],
        )
        for pending in self._pending_P[packs]:
            pending.append(reduction)

    def _of_wave(self, wave: int | None) -> tuple[slice, Sequence[PackLayout]]:
        packs = self._group.plan.packs_of(wave)
        return packs, self._layout.packs[packs]

    def _sums_of(self, pack: PackLayout) -> Tensor:
        """The sums of the pack's matrix; zero where no part ran backward."""
        sums = self._sums_M[pack.matrix]
        if sums is None:
            shape = self._layout.rows_M[pack.matrix], self._group.plan.dim_M[pack.matrix]
            sums = self._sums_M[pack.matrix] = torch.zeros(
                shape, dtype=torch.float32, device=self._group.device
            )
        return sums

    def arrived(self, pack: int) -> tuple[Asked, TouchedHot, Tensor]:
        """Waits for all that belongs to a pack.

        Returns:
            What was asked of the home, touched hot rows and gradients of both ``(m + t, D)``.
        """
        assert self._pending_P[pack], "gradients are sent and reduced before the update"
        for pending in self._pending_P[pack]:
            pending.wait()
        self._pending_P[pack] = []
        layout = self._layout.packs[pack]
        return layout.source, layout.touched, self._at_home.tensors[pack]

    def update(self, wave: int | None = None, untrained: Collection[int] = ()) -> bool:
        """Updates every row that the batch used; see :func:`update_rows`."""
        return update_rows(self._group, [self], wave, untrained)

    def count_uses(self, pack: int) -> None:
        """Counts which rows of a pack the batch used, where somebody wants to know."""
        uses = self._group.storages[pack].uses
        if uses is not None:
            layout = self._layout.packs[pack]
            layout.source.count_uses(uses, layout.hot_slots)

    def end(self, pack: int) -> bool:
        """Ends the use of a pack's gradients; with the last one their memory is given back.

        Returns:
            Whether it was the last.
        """
        self._packs_left.discard(pack)
        if self._packs_left:
            return False
        self._at_home.release()
        if self._sums is not None:
            self._sums.release()
        self._sums_M = [None] * len(self._sums_M)
        return True


def update_rows(
    group: RowGroup,
    gradients: Sequence[BatchGradients],
    wave: int | None = None,
    untrained: Collection[int] = (),
) -> bool:
    """Waits for gradients and updates every row once, at home and at the replicas.

    Args:
        group: The tables.
        gradients: Of one batch, or of all lookups of one backward.
        wave: For its packs only; ``None`` = for all.
        untrained: Modules whose rows stay as they are.

    Returns:
        Whether all packs are updated now.
    """
    divisor = group.ranks.gradient_divisor
    packs, are_updated = group.plan.packs_of(wave), False
    for pack in range(packs.start, packs.stop):
        arrived = [of_batch.arrived(pack) for of_batch in gradients]
        if group.module_of_pack(pack) not in untrained:
            asked, touched, grads = arrived[0] if len(arrived) == 1 else _joined(arrived)
            if divisor > 1:
                grads.div_(divisor)
            asked.update(group.storages[pack], touched, grads)
        for of_batch in gradients:
            of_batch.count_uses(pack)
            are_updated = of_batch.end(pack)
    return are_updated


def _joined(
    arrived: Sequence[tuple[Asked, TouchedHot, Tensor]],
) -> tuple[Asked, TouchedHot, Tensor]:
    """What several batches asked, then hot rows of all of them, as the gradients are."""
    asked, touched, grads = zip(*arrived)
    home = [grad[: of_batch.by_fetch.num_rows] for grad, of_batch in zip(grads, asked)]
    hot = [grad[of_batch.by_fetch.num_rows :] for grad, of_batch in zip(grads, asked)]
    return type(asked[0]).joined(asked), TouchedHot.joined(touched), torch.cat([*home, *hot])
