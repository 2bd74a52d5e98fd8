"""Pooling of fetched rows into bags, and its gradient: both are gathers, neither scatters.

Forward walks bags and gathers rows; backward walks rows and gathers bags over the transposed map,
so every row's gradient is summed once, in a fixed order (bit-equal between runs), without atomics
and without sorting again.

Source: PICASSO (arXiv 2204.04903), SegmentReduction.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from torchrec_picasso.ops.order import places_of, sort_with_tags
from torchrec_picasso.ops.unique import first_of_runs

__all__ = [
    "PoolingIndex",
    "bag_of_lookup",
    "gather_sum",
    "gradient_of_rows",
    "gradient_of_weights",
    "mean_scale",
    "mean_weights",
    "pool_rows",
    "sum_by_row",
]

_LARGEST_INT32 = 2**31 - 1
_MEAN_EPS = 1e-6
"""Added to a weighted mean's divisor, as TorchRec's row-wise mean pooling does."""


@dataclass(frozen=True)
class PoolingIndex:
    """Which rows each bag sums, and which bags each row is summed into, of one matrix.

    Bags read rows of a matrix of R rows; gradients are those of the U rows that some bag reads.
    Of sequences every lookup is a bag, so S is N.
    """

    row_of_lookup_N: Tensor
    """Row of the matrix of each lookup, lookups in bag order, int64, shape ``(N,)``."""
    bag_offsets_S1: Tensor | None
    """First lookup of each bag, and N, int64, shape ``(S + 1,)``; ``None`` = sequences."""
    bags_by_row_N: Tensor
    """Bag of each lookup, lookups grouped by row, int64, shape ``(N,)``."""
    lookups_by_row_N: Tensor
    """Lookup in bag order, lookups grouped by row, int64, shape ``(N,)``."""
    row_offsets_U1: Tensor
    """First entry of each row in the two above, and N, int64, shape ``(U + 1,)``."""

    mean_S: Tensor | None
    """Which bags are averaged, bool, shape ``(S,)``; ``None`` when all are summed."""

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor held, for stream bookkeeping."""
        yield from (tensor for tensor in vars(self).values() if tensor is not None)

    @property
    def num_lookups(self) -> int:
        """Lookups N."""
        return self.row_of_lookup_N.numel()

    @property
    def has_bags(self) -> bool:
        """Whether anything is pooled; else these are sequences."""
        return self.bag_offsets_S1 is not None

    @property
    def lookups_per_bag(self) -> Tensor:
        """Lookups of each bag; there are bags."""
        assert self.bag_offsets_S1 is not None, "sequences have no bags"
        return torch.diff(self.bag_offsets_S1)


def mean_weights(
    weights_N: Tensor | None, offsets_S1: Tensor | None, mean_S: Tensor | None, num_lookups: int
) -> Tensor | None:
    """Turns averages into weighted sums: divides the weights of averaged bags.

    An average divides by the number of lookups or, with per-sample weights, by their sum, which is
    what stock row-wise TorchRec does (stock table-wise divides by the number there too, on the CPU
    in forward alone).

    Args:
        weights_N: Weight of each lookup in bag order, float32, or ``None`` for ones.
        offsets_S1: First lookup of each bag, and N, counted from any number; ``None`` = sequences.
        mean_S: Which bags are averaged, bool; ``None`` = none.
        num_lookups: Lookups N.

    Returns:
        Weights for :func:`pool_rows`.
    """
    if mean_S is None:
        return weights_N
    assert offsets_S1 is not None, "sequences have no means"
    lookups_S = torch.diff(offsets_S1)
    if weights_N is None:
        divisor_S = lookups_S.float()
    else:
        bag_N = bag_of_lookup(offsets_S1, num_lookups)
        sums_S = weights_N.new_zeros(lookups_S.numel()).index_add_(0, bag_N, weights_N.detach())
        divisor_S = sums_S + _MEAN_EPS
    scale_S = mean_scale(divisor_S, mean_S)
    scale_N = torch.repeat_interleave(scale_S, lookups_S, output_size=num_lookups)
    return scale_N if weights_N is None else weights_N * scale_N


def bag_of_lookup(offsets_S1: Tensor, num_lookups: int) -> Tensor:
    """The bag of each lookup, int64, shape ``(N,)``.

    Args:
        offsets_S1: First lookup of each bag, and the end, counted from any number.
        num_lookups: Lookups N of all bags.
    """
    return torch.repeat_interleave(torch.diff(offsets_S1), output_size=num_lookups)


def mean_scale(divisor_S: Tensor, mean_S: Tensor) -> Tensor:
    """What sums are multiplied by to be averages, where they are: float32, shape ``(S,)``.

    Args:
        divisor_S: What averages are divided by, float32; an empty bag's sum of zero stays.
        mean_S: Which bags are averaged, bool.
    """
    return torch.where(mean_S & (divisor_S != 0), 1.0 / divisor_S, 1.0)


def pool_rows(rows_RD: Tensor, weights_N: Tensor | None, index: PoolingIndex) -> Tensor:
    """Sums the rows of each bag.

    Args:
        rows_RD: Rows, float, shape ``(R, D)``.
        weights_N: Weight of each lookup in bag order, shape ``(N,)``, or ``None`` for ones.
        index: Which rows each bag sums.

    Returns:
        Sums, shape ``(S, D)``; zero for an empty bag. Of sequences the row of each lookup.

    Cost:
        Reads N * D and writes S * D floats.
    """
    if index.bag_offsets_S1 is None:
        return rows_RD.index_select(0, index.row_of_lookup_N)
    return gather_sum(rows_RD, index.row_of_lookup_N, index.bag_offsets_S1, weights_N)


def gradient_of_rows(grad_SD: Tensor, weights_N: Tensor | None, index: PoolingIndex) -> Tensor:
    """The gradient of :func:`pool_rows` by the rows that bags read.

    Args:
        grad_SD: Gradient of the sums.
        weights_N: As in forward.
        index: As in forward.

    Returns:
        Gradients, shape ``(U, D)``, in the order of ``index.row_offsets_U1``.

    Cost:
        Reads N * D and writes U * D floats.
    """
    weights_by_row_N = None
    if weights_N is not None:
        weights_by_row_N = weights_N.index_select(0, index.lookups_by_row_N)
    return gather_sum(
        grad_SD.contiguous(), index.bags_by_row_N, index.row_offsets_U1, weights_by_row_N
    )


def gradient_of_weights(grad_SD: Tensor, rows_RD: Tensor, index: PoolingIndex) -> Tensor:
    """The gradient of :func:`pool_rows` by the weights: each row times its bag's gradient.

    Args:
        grad_SD: Gradient of the sums.
        rows_RD: As in forward.
        index: As in forward.

    Returns:
        Gradients, shape ``(N,)``, in bag order.
    """
    num_lookups = index.row_of_lookup_N.numel()
    grad_ND = torch.repeat_interleave(grad_SD, index.lookups_per_bag, 0, output_size=num_lookups)
    return (rows_RD.index_select(0, index.row_of_lookup_N) * grad_ND).sum(1)


def gather_sum(
    rows: Tensor, indices: Tensor | None, offsets: Tensor, weights: Tensor | None
) -> Tensor:
    """Sums ``weights[i] * rows[indices[i]]`` over each segment of ``offsets``; ``None`` = all rows,
    as they are."""
    num_segments = offsets.numel() - 1
    if indices is None:
        indices = torch.arange(len(rows), device=rows.device)
    if num_segments == 0 or indices.numel() == 0:
        return rows.new_zeros(num_segments, rows.size(1))
    return torch.embedding_bag(
        rows, indices, offsets, False, 0, False, weights, include_last_offset=True
    )[0]


def sum_by_row(
    rows_N: Tensor,
    grads_SD: Tensor,
    num_rows: int,
    offsets_S1: Tensor | None = None,
    weights_N: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Sums gradients by row, in a fixed order.

    Args:
        rows_N: Row of each lookup, integer, shape ``(N,)``.
        grads_SD: Gradient of each bag of lookups, float32.
        num_rows: Rows that there are; fewer than 2^31 are sorted in half the time.
        offsets_S1: First lookup of each bag, and N; ``None`` = every lookup is a bag.
        weights_N: Weight of each lookup, float32; ``None`` = ones.

    Returns:
        Distinct rows, ascending int64, shape ``(U,)``, and their gradients, ``(U, D)``; where every
        lookup is a bag and none repeats a row, rows and gradients as they came.

    Cost:
        One sort of N; reads N * D and writes U * D floats.
    """
    short = torch.int32 if num_rows <= _LARGEST_INT32 else torch.int64
    bags_N = None if offsets_S1 is None else bag_of_lookup(offsets_S1, rows_N.numel())
    # of weighted lookups the lookup is carried along, of others the bag at once
    carried_N = bags_N if weights_N is None else None
    sorted_N, by_row_N = sort_with_tags(rows_N.to(short), carried_N)
    start_U = places_of(first_of_runs(sorted_N))
    if bags_N is None and weights_N is None and start_U.numel() == rows_N.numel():
        return rows_N.to(torch.int64), grads_SD
    offsets_U1 = torch.cat([start_U, start_U.new_full((1,), rows_N.numel())])
    bags_by_row_N = by_row_N
    if weights_N is not None:
        weights_N = weights_N.index_select(0, by_row_N)
        if bags_N is not None:
            bags_by_row_N = bags_N.index_select(0, by_row_N)
    sums_UD = gather_sum(grads_SD.contiguous(), bags_by_row_N, offsets_U1, weights_N)
    return sorted_N.index_select(0, start_U).to(torch.int64), sums_UD
