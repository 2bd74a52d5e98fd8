"""The bags of a batch: their order, and the pooling of its micro-batches.

A KeyedJaggedTensor stores bags by feature; a pooled output ``(B, F * D)`` stores them by sample.
Reordering the lookups (integers) before the gather costs 1 ms; transposing the pooled rows (B * F *
D floats) would cost a pass over 54 MB at B=4,096, F=26, D=128. With a different batch size per
feature the output is flat and feature-major, so the order does not change. Sequences also remain in
feature order, within each micro-batch.

Bags are ordered by micro-batch, so the lookups of a micro-batch are one slice of each matrix's
lookups, and forward only slices. Backward needs the lookups grouped by row. The batch is already
sorted by id. With one micro-batch, the groups are put in request order, the order in which
gradients are sent. With several micro-batches, one stable sort of small integers distributes the
lookups, already grouped by row, over the micro-batches; sorting the rows of each micro-batch would
cost K comparison sorts.

A schedule splits by samples. Without a split the batch is one micro-batch; only then may every
feature have its own batch size. The bags of one micro-batch of a matrix are one segment, in bag
order. A sequence matrix has one segment per feature, because each feature is a separate output
whose length the host must know.

Shape letters: F features, G (micro-batch, row) pairs, J segments of bags, K micro-batches, M
matrices, N lookups, S bags, U unique rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, islice, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchrec_picasso.ops.ids import segment_of
from torchrec_picasso.ops.pack_plan import PackPlan
from torchrec_picasso.ops.row_order import LocatedRows, UniqueRows, first_of_runs, stable_order
from torchrec_picasso.ops.segment_reduction import PoolingIndex, bag_of_lookup
from torchrec_picasso.ops.streams import kept_by_stream

Counts = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Bags:
    """Lookups in bag order."""

    offsets_S1: Tensor
    """First lookup of each bag, and N; int64."""
    source_N: Tensor | None
    """KeyedJaggedTensor position of each lookup, int64; ``None`` when no caller needs it."""


def bag_order(
    plan: PackPlan, device: torch.device, sizes_K: tuple[int | None, ...]
) -> Tensor | None:
    """Permutes bags from feature-major to matrix-major, sample-major order.

    Bags of a sequence matrix are ordered by micro-batch, then feature, then sample. ``sizes_K`` are
    samples of each micro-batch, ``None`` if every feature has its own. Returns the old index of
    each bag in the new order, int32, shape ``(F * B,)``; ``None`` = bags keep their order.
    """
    sizes = [size for size in sizes_K if size is not None]
    if not sizes or (not plan.has_pooling and len(sizes) == 1):
        return None
    features_M, is_sequence_M = plan.features_M, plan.is_sequence_M
    num_features = sum(features_M)
    order_FB = torch.arange(num_features * sum(sizes), dtype=torch.int32, device=device)
    ordered = []
    for bags_FB, is_sequence in zip(
        order_FB.view(num_features, -1).split(list(features_M)), is_sequence_M
    ):
        # bags_FB is (F_m, B). Pooled bags: transpose to (B, F_m). The micro-batches are then
        # consecutive sample ranges. Sequences: split B first, so each micro-batch is (F_m, B_k),
        # feature by feature.
        pieces = bags_FB.split(sizes, dim=1) if is_sequence else [bags_FB.t()]
        ordered += [piece.reshape(-1) for piece in pieces]
    return torch.cat(ordered)


def incoming_bag_order(
    device: torch.device, num_features: int, samples_WK: Sequence[Sequence[int]]
) -> Tensor:
    """Permutes the bags of the ``num_features`` features that this home rank pools.

    Incoming bags are ordered by rank, then feature, then sample, as in a KeyedJaggedTensor. Returns
    the incoming position of each bag, bags ordered by micro-batch, rank, sample and feature: int32,
    shape ``(S,)``.
    """
    pieces_WK, start = [], 0
    for sizes_K in samples_WK:
        num_bags = num_features * sum(sizes_K)
        bags_S = torch.arange(start, start + num_bags, dtype=torch.int32, device=device)
        # Bags of one rank, from (feature, sample) order to (sample, feature) order.
        by_sample = bags_S.view(num_features, sum(sizes_K)).t()
        pieces_WK.append(by_sample.split(list(sizes_K)))
        start += num_bags
    # zip swaps (rank, micro-batch) to (micro-batch, rank).
    return torch.cat([piece.reshape(-1) for blocks_W in zip(*pieces_WK) for piece in blocks_W])


def reorder_bags(
    ids_N: Tensor,
    lengths_S: Tensor,
    order_S: Tensor,
    source_N: Tensor | None,
    offsets_S1: Tensor | None = None,
) -> tuple[Tensor, Bags]:
    """Puts lookups, given in KeyedJaggedTensor order, in bag order; returns their ids too.

    ``order_S`` is a result of :func:`bag_order`. ``source_N`` is the position of each lookup, as
    per-sample weights require; it is reordered as well. ``offsets_S1`` as :func:`move_segments`.
    """
    given = [ids_N] if source_N is None else [ids_N, source_N]
    moved_S1, (ids_N, *source) = move_segments(order_S, lengths_S, given, offsets_S1)
    source_N = source[0] if source else None
    return ids_N, Bags(offsets_S1=moved_S1.to(torch.int64), source_N=source_N)


def move_segments(
    order_S: Tensor,
    lengths_S: Tensor,
    values: Sequence[Tensor],
    offsets_S1: Tensor | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """Permutes segments of vectors, ``(N,)``: segment s of the results is ``order_S[s]`` of these.

    ``offsets_S1`` are the first entry of each given segment, and N, in the type of the lengths;
    ``None`` = unknown. Returns the same of the results, and the results.
    """
    num = values[0].numel()
    if lengths_S.device.type == "cpu":
        permute, order_S = torch.ops.fbgemm.permute_1D_sparse_data, order_S.to(torch.int32)
        moved = [permute(order_S, lengths_S, each, None, num) for each in values]
        lengths, vectors, _ = zip(*moved)
        return torch.ops.fbgemm.asynchronous_complete_cumsum(lengths[0]), list(vectors)
    if not num:  # the operators below refuse no segments
        return lengths_S.new_zeros(lengths_S.numel() + 1), list(values)
    # The operator above would sum the given and the moved lengths once more.
    to_offsets, order_S = torch.ops.fbgemm.asynchronous_complete_cumsum, order_S.to(lengths_S.dtype)
    offsets_S1 = to_offsets(lengths_S) if offsets_S1 is None else offsets_S1
    moved_S1 = to_offsets(lengths_S.index_select(0, order_S))
    source_N = torch.ops.fbgemm.expand_into_jagged_permute(order_S, offsets_S1, moved_S1, num)
    return moved_S1, [each.index_select(0, source_N) for each in values]


@dataclass(frozen=True, kw_only=True)
class BatchCut:
    """The micro-batches of the features of a route."""

    segments_MK: Sequence[Sequence[Sequence[int]]]
    """Number of bags of each segment, by matrix and micro-batch."""
    mean_MK: Sequence[Sequence[Tensor | None]]
    """Whether a bag is averaged, by matrix and micro-batch, bool, in bag order; ``None`` = none."""
    is_sequence_M: Sequence[bool]
    """Whether a matrix is of sequences."""

    @staticmethod
    def from_strides(
        strides_F: Sequence[int], sizes_K: Sequence[int | None], plan: PackPlan
    ) -> BatchCut:
        """Splits the features of a route with ``strides_F`` bags into samples of each micro-batch.
        ``sizes_K`` is one ``None`` if every feature has its own batch size."""
        # Bags of each feature, by micro-batch.
        bags_KF = [strides_F if size is None else [size] * len(strides_F) for size in sizes_K]
        segments_MK, mean_MK = [], []
        ends = accumulate(plan.features_M)
        matrices = zip(ends, plan.features_M, plan.is_sequence_M, plan.mean_MF)
        for end, num, is_sequence, mean_F in matrices:
            own_KF = [bags_F[end - num : end] for bags_F in bags_KF]
            # A pooled matrix has one segment per micro-batch, a sequence matrix one per feature.
            segments_MK.append(
                [list(bags_F) if is_sequence else [sum(bags_F)] for bags_F in own_KF]
            )
            pairs = zip(sizes_K, own_KF)
            mean_MK.append([None if mean_F is None else _flags(mean_F, *own) for own in pairs])
        return BatchCut(segments_MK=segments_MK, mean_MK=mean_MK, is_sequence_M=plan.is_sequence_M)

    @property
    def num_micro_batches(self) -> int:
        """Number of micro-batches, K."""
        return len(self.segments_MK[0])

    @property
    def bags_by_micro_batch(self) -> list[list[int]]:
        """Number of bags, by matrix and micro-batch."""
        return [[sum(bags_J) for bags_J in segments_K] for segments_K in self.segments_MK]

    @property
    def bags_by_segment(self) -> list[int]:
        """Number of bags of each segment, consecutive over matrices and micro-batches."""
        return [n for segments_K in self.segments_MK for bags_J in segments_K for n in bags_J]

    @property
    def micro_batch_by_segment(self) -> list[int]:
        """Micro-batch of each segment."""
        return [k for row in self.segments_MK for k, bags_J in enumerate(row) for _ in bags_J]

    def by_micro_batch(self, numbers_J: Sequence[int]) -> list[list[list[int]]]:
        """Groups one number per segment, in their order, by matrix and micro-batch."""
        rest = iter(numbers_J)
        return [[[next(rest) for _ in bags_J] for bags_J in row] for row in self.segments_MK]


def segment_edges(offsets_S1: Tensor, bags_J: Sequence[int]) -> Tensor:
    """Returns the first lookup of each segment of ``bags_J`` bags, and the last one's end: shape
    ``(J + 1,)``, in the offsets' type, on their device."""
    edges_J1 = [0, *accumulate(bags_J)]
    if offsets_S1.device.type == "cpu":
        return torch.from_numpy(offsets_S1.numpy()[edges_J1])
    return offsets_S1.index_select(0, _on_device(offsets_S1.device, tuple(edges_J1)))


@kept_by_stream
def _on_device(device: torch.device, numbers: tuple[int, ...]) -> Tensor:
    """Copies integers to a device, int64, without a host sync; kept for batches of equal sizes."""
    return torch.tensor(numbers, dtype=torch.int64).to(device, non_blocking=True)


def micro_batch_of_lookup(
    edges_J1: Tensor, micro_batch_J: Sequence[int], num_lookups: int
) -> Tensor:
    """Returns the micro-batch of each lookup in bag order, int64, shape ``(N,)``. ``edges_J1`` is a
    result of :func:`segment_edges`, ``micro_batch_J`` that of each segment."""
    numbers = _on_device(edges_J1.device, tuple(micro_batch_J))
    if edges_J1.device.type == "cpu":
        counts_J = torch.from_numpy(np.diff(edges_J1.numpy()))
        return torch.repeat_interleave(numbers, counts_J, output_size=num_lookups)
    return numbers.index_select(0, segment_of(edges_J1[1:], num_lookups))


def cut_pooling(
    bags: Bags,
    rows: UniqueRows,
    located: LocatedRows,
    fetch_position_U: Tensor,
    cut: BatchCut,
    *,
    micro_batch_N: Tensor | None,
    lookups_MK: Counts,
    num_rows_M: Sequence[int],
    most_lookups: int = 0,
) -> list[list[PoolingIndex]]:
    """Splits the pooling of a batch by micro-batch and matrix.

    ``fetch_position_U`` is the position of each unique row among the fetched rows, int64;
    ``micro_batch_N`` that of each lookup, ``None`` = there is one; ``most_lookups`` are those of a
    row, 0 on the CPU. O(N) for one micro-batch; for several one stable sort of N small integers,
    and a host sync on CUDA for G.
    """
    lookups_KM = [list(counts) for counts in zip(*lookups_MK)]
    # groups_KM: number of distinct rows.
    if micro_batch_N is None:
        grouped, groups_KM = _group_whole(rows, located), [list(num_rows_M)]
    else:
        grouped, groups_KM = _group_by_micro_batch(rows, located, micro_batch_N, lookups_KM)
    whole = _WholePooling(
        bags=bags,
        cut=cut,
        grouped=grouped,
        fetch_position_N=fetch_position_U.index_select(0, rows.row_of_lookup_N),
        most_lookups=most_lookups,
        row_edges=_edges([num_rows_M]),
        by_matrix=(_edges(cut.bags_by_micro_batch), _edges(lookups_MK)),
        by_micro_batch=(_edges(lookups_KM), _edges(groups_KM)),
    )
    num_matrices = len(num_rows_M)
    parts = [whole.part(k, m) for k in range(len(groups_KM)) for m in range(num_matrices)]
    shifted = iter(_shifted(parts))
    return [list(islice(shifted, num_matrices)) for _ in groups_KM]


@dataclass(frozen=True)
class _Grouped:
    """Lookups grouped by row; groups are ordered by micro-batch, then matrix."""

    lookups_N: Tensor
    offsets_G1: Tensor
    """First lookup of each group; the last entry is N."""
    gradient_position_G: Tensor | None
    """Position in request order of each group's row; ``None`` = the groups are in request order."""


@dataclass(frozen=True, kw_only=True)
class _WholePooling:
    """The pooling of a whole batch, and where each micro-batch and matrix begins in its tensors."""

    bags: Bags
    cut: BatchCut
    grouped: _Grouped
    fetch_position_N: Tensor
    """The fetched row of each lookup in bag order, counted over all matrices."""
    most_lookups: int
    row_edges: Sequence[int]
    """First row of each matrix."""
    by_matrix: tuple[Sequence[int], Sequence[int]]
    """First bag, and first lookup in bag order, by matrix and micro-batch."""
    by_micro_batch: tuple[Sequence[int], Sequence[int]]
    """First lookup grouped by row, and first group, by micro-batch and matrix."""

    @cached_property
    def rows_and_sources(self) -> list[tuple[Any, ...]]:
        """The fetched row of each lookup, and its source, by matrix and micro-batch."""
        _, edges = self.by_matrix
        return list(zip(_cut(self.fetch_position_N, edges), _cut(self.bags.source_N, edges)))

    @cached_property
    def lookups_and_bags(self) -> list[tuple[Any, ...]]:
        """Lookups grouped by row, and their bags, by micro-batch and matrix; no bags where no
        matrix is pooled."""
        edges, _ = self.by_micro_batch
        offsets_S1, lookups_N, bag_N = self.bags.offsets_S1, self.grouped.lookups_N, None
        if not all(self.cut.is_sequence_M):
            if offsets_S1.device.type == "cpu":
                bag_N = bag_of_lookup(offsets_S1, lookups_N.numel()).index_select(0, lookups_N)
            else:
                bag_N = torch.searchsorted(offsets_S1[1:], lookups_N, right=True)
        return list(zip(_cut(lookups_N, edges), _cut(bag_N, edges)))

    @cached_property
    def positions(self) -> Sequence[Any]:
        """The position of the gradient of each group, by micro-batch and matrix."""
        _, edges = self.by_micro_batch
        return _cut(self.grouped.gradient_position_G, edges)

    def part(self, k: int, matrix: int) -> tuple[dict[str, int], PoolingIndex]:
        """Cuts out the pooling of one micro-batch and matrix, with the start of each tensor.

        Numbers in the tensors count from the start of the batch; :func:`_shifted` makes them count
        from the start of the matrix (rows) or of the micro-batch (lookups, bags).
        """
        place_MK = matrix * self.cut.num_micro_batches + k
        bag_edges, lookup_edges = self.by_matrix
        place_KM = k * (len(self.row_edges) - 1) + matrix
        by_row_edges, group_edges = self.by_micro_batch
        row_of_lookup_N, source_N = self.rows_and_sources[place_MK]
        lookups_by_row_N, bags_by_row_N = self.lookups_and_bags[place_KM]
        first_row, is_sequence = self.row_edges[matrix], self.cut.is_sequence_M[matrix]
        starts = {
            "row_of_lookup_N": first_row,
            "bag_offsets_S1": lookup_edges[place_MK],
            "bags_by_row_N": bag_edges[place_MK],
            "lookups_by_row_N": lookup_edges[place_MK],
            "row_offsets_U1": by_row_edges[place_KM],
            "gradient_position_U": first_row,
        }
        # Offsets have one entry more than bags, or groups.
        bags = slice(bag_edges[place_MK], bag_edges[place_MK + 1] + 1)
        groups = slice(group_edges[place_KM], group_edges[place_KM + 1] + 1)
        return starts, PoolingIndex(
            row_of_lookup_N=row_of_lookup_N,
            bag_offsets_S1=None if is_sequence else self.bags.offsets_S1[bags],
            bags_by_row_N=None if is_sequence else bags_by_row_N,
            lookups_by_row_N=lookups_by_row_N,
            row_offsets_U1=self.grouped.offsets_G1[groups],
            mean_S=self.cut.mean_MK[matrix][k],
            gradient_position_U=self.positions[place_KM],
            source_N=source_N,
            most_lookups=self.most_lookups,
        )


def _group_whole(rows: UniqueRows, located: LocatedRows) -> _Grouped:
    # Move whole segments (the lookups of one row) from ascending id order to request order.
    offsets_U1, (lookups_N,) = move_segments(
        located.order_U, rows.counts, [rows.lookups_by_row_N], rows.edges_U1
    )
    return _Grouped(lookups_N, offsets_U1, gradient_position_G=None)


def _group_by_micro_batch(
    rows: UniqueRows, located: LocatedRows, micro_batch_N: Tensor, lookups_KM: Counts
) -> tuple[_Grouped, list[list[int]]]:
    """Groups lookups by row in each micro-batch; counts groups by (micro-batch, matrix)."""
    edges = torch.tensor(_edges(lookups_KM)).to(micro_batch_N.device, non_blocking=True)
    # lookups_by_row_N is grouped by row. A stable sort by micro-batch keeps this grouping within
    # each micro-batch, so N keys below K suffice.
    order_N = stable_order(micro_batch_N.index_select(0, rows.lookups_by_row_N), len(lookups_KM))
    lookups_N = rows.lookups_by_row_N.index_select(0, order_N)
    row_N = rows.row_of_lookup_N.index_select(0, lookups_N)
    # Shape (G,): a group starts where the row changes or a new (micro-batch, matrix) begins. The
    # mask has one entry more than rows, so that the last edge (= N) is a valid index.
    is_start_N1 = first_of_runs(row_N).index_fill_(0, edges, True)
    # The only host copy: G_km = number of group starts between neighbouring edges.
    if is_start_N1.device.type == "cpu":
        start_G = is_start_N1[:-1].nonzero().squeeze(1)
        first_KM = torch.searchsorted(start_G, edges)
        groups_KM = torch.diff(first_KM).view(len(lookups_KM), -1).tolist()
    else:
        first_KM = is_start_N1.cumsum(0).index_select(0, edges)
        groups_KM = torch.diff(first_KM).view(len(lookups_KM), -1).tolist()
        start_G = torch.nonzero_static(is_start_N1[:-1], size=sum(map(sum, groups_KM))).squeeze(1)
    position_G = located.request_positions.index_select(0, row_N.index_select(0, start_G))
    return _Grouped(lookups_N, torch.cat([start_G, edges[-1:]]), position_G), groups_KM


def _edges(counts: Counts) -> list[int]:
    """Returns the start of each counted range in a concatenation, and the end of the last range."""
    return [0, *accumulate(count for row in counts for count in row)]


def _cut(numbers: Tensor | None, edges: Sequence[int]) -> Sequence[Any]:
    """Cuts numbers into consecutive ranges, all in one operator; ``None`` into ``None`` each."""
    sizes = [end - start for start, end in pairwise(edges)]
    return [None] * len(sizes) if numbers is None else numbers.split(sizes)


def _shifted(parts: Sequence[tuple[dict[str, int], PoolingIndex]]) -> list[PoolingIndex]:
    """Subtracts a start from each of the named tensors, all in one operator."""
    changes: list[dict[str, Any]] = [{} for _ in parts]
    wanted = [
        (changed, name, getattr(index, name), start)
        for (starts, index), changed in zip(parts, changes)
        for name, start in starts.items()
        if start and getattr(index, name) is not None
    ]
    if wanted:
        owners, names, tensors, starts = zip(*wanted)
        for changed, name, tensor in zip(owners, names, torch._foreach_sub(tensors, starts)):
            changed[name] = tensor
    return [replace(index, **changed) for (_, index), changed in zip(parts, changes)]


def _flags(mean_F: Tensor, size: int | None, bags_F: Sequence[int]) -> Tensor:
    """Whether each bag is averaged; bags are ordered by sample, or by feature without a size."""
    if size is not None:
        return mean_F.repeat(size)
    return mean_F.repeat_interleave(torch.tensor(bags_F, device=mean_F.device))
