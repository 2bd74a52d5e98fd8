"""Pooling of fetched rows into bags, and its gradient: both are gathers, neither is a scatter.

Forward iterates over bags and gathers rows. Backward iterates over rows and gathers bags with the
transposed map, so every row's gradient is summed once, in a fixed order (bitwise identical between
runs), without atomics and without another sort.

Source: PICASSO (arXiv 2204.04903), SegmentReduction.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torchrec_picasso.ops.sorts import sort_with_tags

_LARGEST_INT32 = 2**31 - 1
_MEAN_EPS = 1e-6
"""Added to the divisor of a weighted mean, as in TorchRec's row-wise mean pooling."""
_PIECE = 256
"""Summands that one warp of a GPU adds in a row: about as many as hide the cost of a second sum."""


@dataclass(frozen=True)
class PoolingIndex:
    """The rows that each bag of one matrix sums, and the bags that each row is summed into.

    Bags read rows of a matrix of R rows; gradients are computed for the U rows that some bag reads.
    In a sequence matrix every lookup is a bag, so S is N.
    """

    row_of_lookup_N: Tensor
    """Row of the matrix for each lookup, lookups in bag order, int64."""
    bag_offsets_S1: Tensor | None
    """First lookup of each bag, and N, int64; ``None`` = sequences."""
    bags_by_row_N: Tensor | None
    """Bag of each lookup, lookups grouped by row, int64; ``None`` = sequences."""
    lookups_by_row_N: Tensor
    """Bag-order index of each lookup, lookups grouped by row, int64."""
    row_offsets_U1: Tensor
    """First entry of each row in the tensors by row, and N, int64."""
    mean_S: Tensor | None
    """Whether a bag is averaged, bool; ``None`` when all bags are summed."""
    gradient_position_U: Tensor | None = None
    """Position in the matrix's gradients of each row that bags read, int64; ``None`` if they read
    all rows of the matrix, in request order."""
    source_N: Tensor | None = None
    """KeyedJaggedTensor position of each lookup, int64; ``None`` without weights."""
    most_lookups: int = 0
    """A bound of the lookups of a row, on an accelerator only."""

    @property
    def num_lookups(self) -> int:
        """Number of lookups, N."""
        return self.row_of_lookup_N.numel()

    @property
    def has_pooling(self) -> bool:
        """Whether lookups are pooled; if not, the matrix is of sequences."""
        return self.bag_offsets_S1 is not None


def mean_weights(
    weights_N: Tensor | None, offsets_S1: Tensor | None, mean_S: Tensor | None, num_lookups: int
) -> Tensor | None:
    """Converts averages to weighted sums: divides the weights of averaged bags.

    An average divides by the number of lookups or, with per-sample weights, by their sum, as stock
    row-wise TorchRec does. (Stock table-wise TorchRec divides by the number there as well, on the
    CPU in forward only.) Weights are float32, of lookups in bag order, ``None`` = ones, as is the
    result. ``offsets_S1`` are the first lookup of each bag, and N, ``None`` = sequences.
    """
    if mean_S is None:
        return weights_N
    assert offsets_S1 is not None, "sequences have no means"
    counts_S = torch.diff(offsets_S1)
    if weights_N is None:
        divisor_S = counts_S.float()
    else:
        # detach: the divisor is a constant in the gradient of the weights. unsafe: no check of the
        # offsets, which would sync the host.
        own_N = weights_N.detach()
        sums_S = torch.segment_reduce(own_N, "sum", offsets=offsets_S1, initial=0, unsafe=True)
        divisor_S = sums_S + _MEAN_EPS
    scale_S = mean_scale(divisor_S, mean_S)
    # From one factor per bag, shape (S,), to one per lookup, shape (N,).
    scale_N = torch.repeat_interleave(scale_S, counts_S, output_size=num_lookups)
    return scale_N if weights_N is None else weights_N * scale_N


def bag_of_lookup(offsets_S1: Tensor, num_lookups: int) -> Tensor:
    """Returns the bag of each lookup, int64, ``(N,)``; offsets may have any first value."""
    return torch.repeat_interleave(torch.diff(offsets_S1), output_size=num_lookups)


def mean_scale(divisor_S: Tensor, mean_S: Tensor) -> Tensor:
    """Returns the factor that converts each bag's sum to its output, 1 for a summed bag: float32.
    The divisor of an average is 0 for an empty bag, whose sum of zero is kept."""
    return torch.where(mean_S & (divisor_S != 0), 1.0 / divisor_S, 1.0)


def pool_rows(rows_RD: Tensor, weights_N: Tensor | None, index: PoolingIndex) -> Tensor:
    """Sums the rows of each bag, with a weight for each lookup in bag order, ``None`` = ones.

    Returns the sums, ``(S, D)``, zero for an empty bag; for sequences the row of each lookup,
    ``(N, D)``. Reads N * D and writes S * D floats.
    """
    if index.bag_offsets_S1 is None:
        return rows_RD.index_select(0, index.row_of_lookup_N)
    return gather_sum(rows_RD, index.row_of_lookup_N, index.bag_offsets_S1, weights_N)


def gradient_of_rows(grad_SD: Tensor, weights_N: Tensor | None, index: PoolingIndex) -> Tensor:
    """Computes the gradient of :func:`pool_rows` with respect to the rows that bags read.

    Weights and index are those of forward. Returns ``(U, D)``, in the order of
    ``index.row_offsets_U1``. Reads N * D and writes U * D floats.
    """
    weights_by_row_N = None
    if weights_N is not None:
        # Weights from bag order to lookups grouped by row, as bags_by_row_N.
        weights_by_row_N = weights_N.index_select(0, index.lookups_by_row_N)
    # In a sequence matrix every lookup is its own bag.
    bags_N = index.lookups_by_row_N if index.bags_by_row_N is None else index.bags_by_row_N
    add = gather_sum if index.most_lookups <= 2 * _PIECE else sum_in_pieces
    return add(grad_SD.contiguous(), bags_N, index.row_offsets_U1, weights_by_row_N)


def gradient_of_weights(grad_SD: Tensor, rows_RD: Tensor, index: PoolingIndex) -> Tensor:
    """Computes the gradient of :func:`pool_rows` with respect to the weights, in bag order. The
    gradient of a weight is the dot product of the lookup's row and its bag's gradient."""
    assert index.bag_offsets_S1 is not None, "sequences have no weights"
    if rows_RD.device.type != "cpu":
        # A dot product per lookup, without the memory of the expansions below.
        offsets_S1, rows_N = index.bag_offsets_S1, index.row_of_lookup_N
        bag_N = bag_of_lookup(offsets_S1, index.num_lookups)
        backward = torch.ops.aten._embedding_bag_per_sample_weights_backward
        return backward(grad_SD.contiguous(), rows_RD, rows_N, offsets_S1, bag_N, 0)
    counts_S = torch.diff(index.bag_offsets_S1)
    # Expand (S, D) to (N, D): each lookup gets its bag's gradient.
    grad_ND = torch.repeat_interleave(grad_SD, counts_S, 0, output_size=index.num_lookups)
    return (rows_RD.index_select(0, index.row_of_lookup_N) * grad_ND).sum(1)


def gather_sum(
    rows: Tensor, indices: Tensor | None, offsets: Tensor, weights: Tensor | None
) -> Tensor:
    """Sums ``weights[i] * rows[indices[i]]`` over each segment of ``offsets``: ``(S, D)``.

    ``offsets`` are the first of N summands of each of S segments, and N. Without ``indices`` the
    summands are all rows in their order, without ``weights`` the weights are ones.
    """
    num_segments = offsets.numel() - 1
    if indices is None:
        indices = torch.arange(len(rows), device=rows.device)
    if num_segments == 0 or indices.numel() == 0:
        return rows.new_zeros(num_segments, rows.size(1))
    # Positions: scale_grad_by_freq=False, mode 0 = sum, sparse=False, per-sample weights.
    return torch.embedding_bag(
        rows, indices, offsets, False, 0, False, weights, include_last_offset=True
    )[0]


def sum_in_pieces(rows: Tensor, indices: Tensor, offsets: Tensor, weights: Tensor | None) -> Tensor:
    """Sums like :func:`gather_sum`; pieces of long segments are summed first, in a fixed order.

    A GPU's operator adds each segment in a single warp: a row with 8,192 lookups takes as long as
    all others together.
    """
    every = torch.arange(0, indices.numel(), _PIECE, device=indices.device)
    # A piece ends with its segment or at a multiple of _PIECE; where both fall together, one is
    # empty.
    starts = torch.cat([offsets[:-1], every]).sort().values
    pieces = gather_sum(rows, indices, torch.cat([starts, offsets[-1:]]), weights)
    # The pieces of a segment follow each other from the first that starts at its offset.
    return gather_sum(pieces, None, torch.searchsorted(starts, offsets), None)


def sum_by_row(
    rows_N: Tensor,
    grads_SD: Tensor,
    num_rows: int,
    offsets_S1: Tensor | None = None,
    weights_N: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Sums gradients by row, in a fixed order.

    Args:
        rows_N: Row of each lookup, integer.
        grads_SD: Gradient of each bag of lookups, float32.
        num_rows: Number of rows of the table; below 2^31 the sort takes half the time.
        offsets_S1: First lookup of each bag, and N; ``None`` = every lookup is a bag.
        weights_N: Weight of each lookup of a bag, float32; ``None`` = ones.

    Returns:
        Distinct rows, ascending int64, and their gradients, ``(U, D)``; in input order if every
        lookup is a bag and no row repeats. Reads N * D and writes U * D floats.
    """
    short = torch.int32 if num_rows <= _LARGEST_INT32 else torch.int64
    bags_N = None if offsets_S1 is None else bag_of_lookup(offsets_S1, rows_N.numel())
    # Without weights the sort carries the bag of each lookup, which saves one gather. With weights
    # the sort carries the lookup, which also indexes the weights.
    sorted_N, by_row_N = sort_with_tags(rows_N.to(short), bags_N if weights_N is None else None)
    rows_U, counts_U = torch.unique_consecutive(sorted_N, return_counts=True)
    # No repeats: there is nothing to sum.
    if bags_N is None and rows_U.numel() == rows_N.numel():
        return rows_N.to(torch.int64), grads_SD
    if bags_N is not None and weights_N is not None:
        # Weights and bags, from lookup order to lookups sorted by row, shape (N,).
        weights_N, by_row_N = (each.index_select(0, by_row_N) for each in (weights_N, bags_N))
    offsets_U1 = torch.ops.fbgemm.asynchronous_complete_cumsum(counts_U)
    sums_UD = gather_sum(grads_SD.contiguous(), by_row_N, offsets_U1, weights_N)
    return rows_U.to(torch.int64), sums_UD
