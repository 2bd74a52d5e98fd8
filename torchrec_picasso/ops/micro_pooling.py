"""How the bags of each micro-batch sum rows, cut out of the maps of the whole batch.

Bags are in sample order, so a micro-batch's lookups are one slice of each matrix's: forward only
has to cut. Backward wants them grouped by row. The batch was sorted by id already, so its lookups
by row are dealt out to the micro-batches by one stable sort of small integers, where each
micro-batch sorting its own rows would cost K comparison sorts.

Shape letters: K micro-batches, M matrices, N lookups, U unique rows, G (micro-batch, row) pairs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from torchrec_picasso.ops.bags import Bags
from torchrec_picasso.ops.order import stable_order
from torchrec_picasso.ops.segment_reduction import PoolingIndex
from torchrec_picasso.ops.unique import UniqueRows

__all__ = ["MicroPooling", "cut_pooling", "micro_batch_of_lookup"]


@dataclass(frozen=True)
class MicroPooling:
    """One micro-batch of one matrix."""

    lookups: slice
    """Its lookups, in bag order of the whole batch."""
    gradient_place_U: Tensor
    """Where the gradients of the rows that it uses belong, in their order, int64."""
    index: PoolingIndex

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor held, for stream bookkeeping."""
        yield self.gradient_place_U
        yield from self.index.tensors()


def micro_batch_of_lookup(bags: Bags, features_M: Sequence[int], sizes_K: Sequence[int]) -> Tensor:
    """Micro-batch of each lookup in bag order.

    Args:
        bags: Lookups of the whole batch, matrix by matrix, in each sample by sample.
        features_M: Number of features of each matrix.
        sizes_K: Samples of each micro-batch.

    Returns:
        int64, shape ``(N,)``.
    """
    device = bags.ids_N.device
    edges = _on(device, _first_bags(features_M, sizes_K))
    lookups = torch.diff(bags.offsets_S1.index_select(0, edges))
    micro_MK = torch.arange(len(sizes_K), device=device).repeat(len(features_M))
    return torch.repeat_interleave(micro_MK, lookups, output_size=bags.ids_N.numel())


def cut_pooling(
    bags: Bags,
    rows: UniqueRows,
    micro_batch_N: Tensor,
    row_place_U: Tensor,
    gradient_place_U: Tensor,
    *,
    features_M: Sequence[int],
    sizes_K: Sequence[int],
    mean_MF: Sequence[Tensor | None],
) -> list[list[MicroPooling]]:
    """Cuts the pooling of a batch into that of its micro-batches.

    Args:
        bags: Lookups of the whole batch, matrix by matrix, in each sample by sample.
        rows: Its unique rows, matrix by matrix.
        micro_batch_N: Result of :func:`micro_batch_of_lookup`.
        row_place_U: Where each unique row is among its matrix's rows, int64.
        gradient_place_U: Where it is among its matrix's gradients, int64.
        features_M: Number of features of each matrix.
        sizes_K: Samples of each micro-batch.
        mean_MF: Which features of each matrix are averaged, bool; ``None`` = none.

    Returns:
        By micro-batch and matrix.

    Cost:
        One stable sort of N small integers, O(N) else; two host syncs on CUDA, for G and for where
        each group begins.
    """
    num_matrices, num_micro = len(features_M), len(sizes_K)
    device, num_lookups = bags.ids_N.device, bags.ids_N.numel()
    bag_of_lookup_N = torch.repeat_interleave(
        torch.arange(bags.offsets_S1.numel() - 1, device=device),
        torch.diff(bags.offsets_S1),
        output_size=num_lookups,
    )
    # where each (matrix, micro-batch) begins: in bags, in lookups, and in what is grouped by row
    bag_edges = _first_bags(features_M, sizes_K)
    lookup_edges = bags.offsets_S1.index_select(0, _on(device, bag_edges))
    count_KM = torch.diff(lookup_edges).view(num_matrices, num_micro).t().reshape(-1)
    grouped_edges = torch.cat([count_KM.new_zeros(1), count_KM.cumsum(0)])

    micro_by_row_N = micro_batch_N.index_select(0, rows.lookups_by_row_N)
    order_N = stable_order(micro_by_row_N, num_micro)
    lookups_N = rows.lookups_by_row_N.index_select(0, order_N)
    row_by_row_N = rows.row_of_lookup_N.index_select(0, lookups_N)
    start_G = _group_starts(row_by_row_N, grouped_edges)
    group_edges = torch.searchsorted(start_G, grouped_edges)

    bags_by_row_N = bag_of_lookup_N.index_select(0, lookups_N)
    row_of_lookup_N = row_place_U.index_select(0, rows.row_of_lookup_N)
    gradient_place_G = gradient_place_U.index_select(0, row_by_row_N.index_select(0, start_G))
    lookup_at, grouped_at, group_at = torch.stack(
        [lookup_edges, grouped_edges, group_edges]
    ).tolist()

    def cut(matrix: int, micro: int) -> MicroPooling:
        place = matrix * num_micro + micro
        first_bag, end_bag = bag_edges[place : place + 2]
        low, high = lookup_at[place : place + 2]
        place = micro * num_matrices + matrix
        by_row = slice(*grouped_at[place : place + 2])
        groups = slice(*group_at[place : place + 2])
        starts_U = start_G[groups] - by_row.start
        end = starts_U.new_full((1,), by_row.stop - by_row.start)
        mean_F = mean_MF[matrix]
        return MicroPooling(
            lookups=slice(low, high),
            gradient_place_U=gradient_place_G[groups],
            index=PoolingIndex(
                row_of_lookup_N=row_of_lookup_N[low:high],
                bag_offsets_S1=bags.offsets_S1[first_bag : end_bag + 1] - low,
                bags_by_row_N=bags_by_row_N[by_row] - first_bag,
                lookups_by_row_N=lookups_N[by_row] - low,
                row_offsets_U1=torch.cat([starts_U, end]),
                mean_S=None if mean_F is None else mean_F.repeat(sizes_K[micro]),
            ),
        )

    return [[cut(matrix, micro) for matrix in range(num_matrices)] for micro in range(num_micro)]


def _first_bags(features_M: Sequence[int], sizes_K: Sequence[int]) -> list[int]:
    """First bag of each (matrix, micro-batch), and the number of bags."""
    bags_MK = [features * size for features in features_M for size in sizes_K]
    return [0, *accumulate(bags_MK)]


def _on(device: torch.device, values: list[int]) -> Tensor:
    """A vector on a device, without a host sync."""
    return torch.tensor(values).to(device, non_blocking=True)


def _group_starts(row_n: Tensor, edges: Tensor) -> Tensor:
    """First entry of every run of equal rows; a run ends at an edge too."""
    first_n1 = torch.ones(row_n.numel() + 1, dtype=torch.bool, device=row_n.device)
    torch.ne(row_n[1:], row_n[:-1], out=first_n1[1:-1])
    first_n1.index_fill_(0, edges, True)
    return first_n1[:-1].nonzero().squeeze(1)
