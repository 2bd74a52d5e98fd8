"""How the bags of each part of a batch sum rows, cut out of the maps of the whole batch.

Bags are in the order of parts, so a part's lookups are one slice of each matrix's: forward only has
to cut. Backward wants them grouped by row. The batch was sorted by id already. Of one part, the
groups are put in request order, which is the order that gradients travel in. Of several, lookups by
row are dealt out to the parts by one stable sort of small integers, where each part sorting its own
rows would cost K comparison sorts.

Shape letters: K parts, M matrices, N lookups, S bags, U unique rows, G (part, row) pairs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from torchrec_picasso.ops.bags import Bags
from torchrec_picasso.ops.order import stable_order
from torchrec_picasso.ops.places import LocatedRows
from torchrec_picasso.ops.segment_reduction import PoolingIndex, bag_of_lookup
from torchrec_picasso.ops.unique import UniqueRows

__all__ = ["PartPooling", "count_lookups", "cut_pooling", "part_of_lookup"]

Counts = Sequence[Sequence[int]]


@dataclass(frozen=True)
class PartPooling:
    """One part of one matrix."""

    lookups: slice
    """Its lookups, in bag order of the whole batch."""
    gradient_place_U: Tensor | None
    """Where the gradients of the rows that it uses belong in the matrix's, in their order, int64;
    ``None`` = it uses all of them, in their order."""
    index: PoolingIndex

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor held, for stream bookkeeping."""
        if self.gradient_place_U is not None:
            yield self.gradient_place_U
        yield from self.index.tensors()


def count_lookups(bags: Bags, bags_J: Sequence[int]) -> Tensor:
    """Lookups of each run of bags.

    Args:
        bags: Lookups of the whole batch in bag order.
        bags_J: Bags of each run, one after the other, J runs in all.

    Returns:
        int64, shape ``(J,)``, on the device of the batch.
    """
    # copied without a host sync
    edges = torch.tensor([0, *accumulate(bags_J)]).to(bags.ids_N.device, non_blocking=True)
    return torch.diff(bags.offsets_S1.index_select(0, edges))


def part_of_lookup(lookups_J: Tensor, part_J: Sequence[int], num_lookups: int) -> Tensor:
    """Part of each lookup in bag order.

    Args:
        lookups_J: Result of :func:`count_lookups`.
        part_J: Part of each run.
        num_lookups: Lookups of the whole batch, N.

    Returns:
        int64, shape ``(N,)``.
    """
    parts = torch.tensor(part_J, dtype=torch.int64).to(lookups_J.device, non_blocking=True)
    return torch.repeat_interleave(parts, lookups_J, output_size=num_lookups)


def cut_pooling(
    bags: Bags,
    rows: UniqueRows,
    located: LocatedRows,
    row_place_U: Tensor,
    *,
    part_N: Tensor | None,
    bags_MK: Counts,
    lookups_MK: Counts,
    rows_M: Sequence[int],
    mean_MK: Sequence[Sequence[Tensor | None]],
    is_sequence_M: Sequence[bool],
) -> list[list[PartPooling]]:
    """Cuts the pooling of a batch into that of its parts.

    Args:
        bags: Lookups of the whole batch in bag order.
        rows: Its unique rows, matrix by matrix.
        located: The same in request order.
        row_place_U: Where each unique row is among the fetched rows, int64.
        part_N: Result of :func:`part_of_lookup`; ``None`` where there is one part.
        bags_MK: Bags of each part of each matrix.
        lookups_MK: Lookups of each part of each matrix, on the host.
        rows_M: Rows of each matrix.
        mean_MK: Which bags of each part of each matrix are averaged, bool; ``None`` = none.
        is_sequence_M: Which matrices are of sequences.

    Returns:
        By part and matrix.

    Cost:
        O(N) for one part. For several one stable sort of N small integers, and two host syncs on
        CUDA: for G, and for where each group begins.
    """
    offsets_S1 = bags.offsets_S1
    row_of_lookup_N = row_place_U.index_select(0, rows.row_of_lookup_N)
    if part_N is None:
        grouped = _group_whole(rows, located)
        groups_KM, starts_KM = [list(rows_M)], [[count for (count,) in lookups_MK]]
    else:
        starts_KM = [list(counts) for counts in zip(*lookups_MK)]
        grouped, groups_KM = _group_by_part(rows, located, part_N, starts_KM)
    bags_by_row_N = None if all(is_sequence_M) else _bags_of(grouped.lookups_N, offsets_S1)
    bag_at, lookup_at = _edges(bags_MK), _edges(lookups_MK)
    row_at = [0, *accumulate(rows_M)]
    group_at, grouped_at = _edges(groups_KM), _edges(starts_KM)
    num_parts, num_matrices = len(groups_KM), len(rows_M)

    def cut(part: int, matrix: int) -> PartPooling:
        place = matrix * num_parts + part
        first_bag, end_bag = bag_at[place : place + 2]
        low, high = lookup_at[place : place + 2]
        place = part * num_matrices + matrix
        by_row = slice(*grouped_at[place : place + 2])
        groups = slice(*group_at[place : place + 2])
        offsets_U1 = grouped.offsets_G1[groups.start : groups.stop + 1]
        gradient_place_U = None
        if grouped.gradient_place_G is not None:
            gradient_place_U = _shift(grouped.gradient_place_G[groups], row_at[matrix])
        lookups_by_row_N = _shift(grouped.lookups_N[by_row], low)
        bag_offsets_S1, part_bags_by_row_N = None, lookups_by_row_N
        if not is_sequence_M[matrix]:
            assert bags_by_row_N is not None
            bag_offsets_S1 = _shift(offsets_S1[first_bag : end_bag + 1], low)
            part_bags_by_row_N = _shift(bags_by_row_N[by_row], first_bag)
        return PartPooling(
            lookups=slice(low, high),
            gradient_place_U=gradient_place_U,
            index=PoolingIndex(
                row_of_lookup_N=_shift(row_of_lookup_N[low:high], row_at[matrix]),
                bag_offsets_S1=bag_offsets_S1,
                bags_by_row_N=part_bags_by_row_N,
                lookups_by_row_N=lookups_by_row_N,
                row_offsets_U1=_shift(offsets_U1, by_row.start),
                mean_S=mean_MK[matrix][part],
            ),
        )

    return [[cut(part, matrix) for matrix in range(num_matrices)] for part in range(num_parts)]


def _bags_of(lookups_n: Tensor, offsets_S1: Tensor) -> Tensor:
    """The bag of each of some lookups, N in all."""
    return bag_of_lookup(offsets_S1, lookups_n.numel()).index_select(0, lookups_n)


@dataclass(frozen=True)
class _Grouped:
    """Lookups grouped by row, of one part after the other and in each matrix by matrix."""

    lookups_N: Tensor
    offsets_G1: Tensor
    """First entry of each group, and N."""
    gradient_place_G: Tensor | None
    """Place in request order of each group's row; ``None`` = they are in request order."""


def _group_whole(rows: UniqueRows, located: LocatedRows) -> _Grouped:
    lookups_U, lookups_N, _ = torch.ops.fbgemm.permute_1D_sparse_data(
        located.order_U.to(torch.int32),
        rows.lookups_U,
        rows.lookups_by_row_N,
        None,
        rows.lookups_by_row_N.numel(),
    )
    offsets_U1 = torch.ops.fbgemm.asynchronous_complete_cumsum(lookups_U)
    return _Grouped(lookups_N, offsets_U1, gradient_place_G=None)


def _group_by_part(
    rows: UniqueRows, located: LocatedRows, part_N: Tensor, lookups_KM: Counts
) -> tuple[_Grouped, list[list[int]]]:
    """Lookups grouped by row in each part, and the groups of each (part, matrix)."""
    edges = torch.tensor(_edges(lookups_KM)).to(part_N.device, non_blocking=True)
    order_N = stable_order(part_N.index_select(0, rows.lookups_by_row_N), len(lookups_KM))
    lookups_N = rows.lookups_by_row_N.index_select(0, order_N)
    row_N = rows.row_of_lookup_N.index_select(0, lookups_N)
    start_G = _group_starts(row_N, edges)
    groups_KM = torch.diff(torch.searchsorted(start_G, edges)).view(len(lookups_KM), -1).tolist()
    row_G = row_N.index_select(0, start_G)
    grouped = _Grouped(
        lookups_N,
        torch.cat([start_G, edges[-1:]]),
        gradient_place_G=located.position_U.index_select(0, row_G),
    )
    return grouped, groups_KM


def _edges(counts: Counts) -> list[int]:
    """Where each of some counted things begins, one after the other, and where the last ends."""
    return [0, *accumulate(count for row in counts for count in row)]


def _shift(values: Tensor, start: int) -> Tensor:
    return values - start if start else values


def _group_starts(row_n: Tensor, edges: Tensor) -> Tensor:
    """First entry of every run of equal rows; a run ends at an edge too."""
    first_n1 = torch.ones(row_n.numel() + 1, dtype=torch.bool, device=row_n.device)
    torch.ne(row_n[1:], row_n[:-1], out=first_n1[1:-1])
    first_n1.index_fill_(0, edges, True)
    return first_n1[:-1].nonzero().squeeze(1)
