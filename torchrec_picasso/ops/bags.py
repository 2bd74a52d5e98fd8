"""The bags of a batch: their order, and the pooling of its micro-batches.

A KeyedJaggedTensor stores bags by feature; a pooled output ``(B, F * D)`` stores them by sample.
Reordering the lookups (integers) before the gather costs 1 ms; transposing the pooled rows (B * F *
D floats) would cost a pass over 54 MB at B=4,096, F=26, D=128. Sequences remain in feature order,
within each micro-batch, and so do bags where every feature has its own batch size, whose output is
flat. Only a batch in one micro-batch may have such features.

Bags are ordered by micro-batch, so forward only slices each matrix's lookups. Backward needs the
lookups grouped by row, as the sort of the ids left them. With one micro-batch, the groups are put
in request order, the order in which gradients are sent. With several, one stable sort of small
integers distributes the grouped lookups over the micro-batches; sorting the rows of each would cost
K comparison sorts.

The bags of one micro-batch of a matrix are one segment, in bag order. A sequence matrix has one
segment per feature, because each feature is a separate output whose length the host must know.

Shape letters: F features, G (micro-batch, row) pairs, J segments of bags, K micro-batches, M
matrices, N lookups, S bags, U unique rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, islice, pairwise, product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchrec_picasso.ops.ids import counting, segment_of
from torchrec_picasso.ops.pack_plan import PackPlan
from torchrec_picasso.ops.row_order import LocatedRows, UniqueRows
from torchrec_picasso.ops.segment_reduction import PoolingIndex, bag_of_lookup
from torchrec_picasso.ops.sorts import first_of_runs, key_type, stable_order
from torchrec_picasso.ops.streams import kept_by_stream

Counts = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Bags:
    """Lookups in bag order."""

    offsets_S1: Tensor
    """First lookup of each bag, and N; int64."""
    source_N: Tensor | None
    """KeyedJaggedTensor position of each lookup, int64; ``None`` when no caller needs it."""


def bag_order(plan: PackPlan, device: torch.device, sizes: tuple[int, ...]) -> Tensor:
    """Permutes bags from feature-major to matrix-major, sample-major order.

    Bags of a sequence matrix are ordered by micro-batch, of ``sizes`` samples each, then feature,
    then sample. Returns the old index of each bag in the new order, int32, shape ``(F * B,)``.
    """
    num_features = sum(plan.features_M)
    order_FB = torch.arange(num_features * sum(sizes), dtype=torch.int32, device=device)
    by_matrix = order_FB.view(num_features, -1).split(list(plan.features_M))
    ordered = []
    for bags_FB, is_sequence in zip(by_matrix, plan.is_sequence_M):
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

    ``order_S`` is a result of :func:`bag_order` or :func:`incoming_bag_order`. ``source_N`` is the
    position of each lookup, int64, as per-sample weights require; it is reordered as well.
    ``offsets_S1`` as :func:`move_segments`.
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
    ``None`` = unknown. On an accelerator, empty segments may follow those of ``order_S``. Returns
    the same of the results, and the results.
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
    offsets_S1 = offsets_S1[: order_S.numel() + 1]
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
    return offsets_S1.index_select(0, _on_device(offsets_S1.device, (0, *accumulate(bags_J))))


@kept_by_stream
def _on_device(device: torch.device, numbers: tuple[int, ...]) -> Tensor:
    """Copies integers to a device, int64, without a host sync; kept for batches of equal sizes."""
    return torch.tensor(numbers, dtype=torch.int64).to(device, non_blocking=True)


def micro_batch_of_lookup(
    edges_J1: Tensor, micro_batch_J: Sequence[int], num_lookups: int
) -> Tensor:
    """Returns the micro-batch of each lookup in bag order, integer, shape ``(N,)``. ``edges_J1`` is
    a result of :func:`segment_edges`, ``micro_batch_J`` that of each segment."""
    if edges_J1.device.type == "cpu":
        numbers_J = np.array(micro_batch_J, key_type(1 + max(micro_batch_J)))
        return torch.from_numpy(np.repeat(numbers_J, np.diff(edges_J1.numpy())))
    numbers = _on_device(edges_J1.device, tuple(micro_batch_J))
    return numbers.index_select(0, segment_of(edges_J1[1:], num_lookups))


@dataclass(frozen=True)
class LookupGroups:
    """Lookups grouped by micro-batch, then row; G is not known on the host before the header."""

    lookups_N: Tensor
    """The lookups, group by group, int64."""
    row_N: Tensor
    """The row of each of these, int64."""
    start_G1: Tensor
    """First lookup of each group, and N, int64; on an accelerator entries without meaning follow,
    N + 1 in all."""
    counts: Tensor
    """Number of groups by micro-batch and matrix, int64, ``(K M,)``."""


def group_by_micro_batch(
    rows: UniqueRows, micro_batch_N: Tensor, edges_J1: Tensor, cut: BatchCut
) -> LookupGroups:
    """Groups lookups by row in each micro-batch; arguments as for :func:`micro_batch_of_lookup`.
    Costs one stable sort of N small integers, no host sync."""
    # lookups_by_row_N is grouped by row. A stable sort by micro-batch keeps this grouping within
    # each micro-batch, so N keys below K suffice.
    keys_N = micro_batch_N.index_select(0, rows.lookups_by_row_N)
    order_N = stable_order(keys_N, cut.num_micro_batches)
    lookups_N = rows.lookups_by_row_N.index_select(0, order_N)
    row_N = rows.row_of_lookup_N.index_select(0, lookups_N)
    # A group starts where the row changes or a new (micro-batch, matrix) begins. The mask has one
    # entry more than rows, so that the last edge (= N) is a valid index. Groups of a micro-batch
    # and matrix: number of starts between neighbouring edges.
    num_segments = [[len(bags_J) for bags_J in row] for row in cut.segments_MK]
    first, num_micro_batches = _edges(num_segments), cut.num_micro_batches
    # From counts by matrix and micro-batch to counts by micro-batch and matrix.
    if row_N.device.type == "cpu":
        lookups_MK = np.diff(edges_J1.numpy()[first]).reshape(-1, num_micro_batches)
        edges = np.cumsum([0, *lookups_MK.T.flat])
        sorted_n, is_start_n1 = row_N.numpy(), np.ones(row_N.numel() + 1, bool)
        np.not_equal(sorted_n[1:], sorted_n[:-1], out=is_start_n1[1:-1])
        is_start_n1[edges] = True
        starts = np.flatnonzero(is_start_n1)
        counts = np.diff(np.searchsorted(starts, edges))
        return LookupGroups(lookups_N, row_N, torch.from_numpy(starts), torch.from_numpy(counts))
    edges_MK = edges_J1.index_select(0, _on_device(row_N.device, tuple(first)))
    lookups_KM = torch.diff(edges_MK).view(-1, num_micro_batches).t().reshape(-1)
    edges_KM = torch.ops.fbgemm.asynchronous_complete_cumsum(lookups_KM)
    count_N1 = first_of_runs(row_N).index_fill_(0, edges_KM, True).cumsum(0)
    counting_N1 = counting(row_N.device, count_N1.numel())
    start_G1 = torch.searchsorted(count_N1, counting_N1, right=True)
    before = count_N1.index_select(0, edges_KM)
    return LookupGroups(lookups_N, row_N, start_G1, torch.diff(before))


def cut_pooling(
    bags: Bags,
    rows: UniqueRows,
    located: LocatedRows,
    fetch_position_U: Tensor,
    cut: BatchCut,
    *,
    groups: LookupGroups | None,
    groups_KM: Counts,
    lookups_MK: Counts,
    num_rows_M: Sequence[int],
    most_lookups: int = 0,
) -> list[list[PoolingIndex]]:
    """Splits the pooling of a batch by micro-batch and matrix; O(N), no host sync.

    ``fetch_position_U`` is the position of each unique row among the fetched rows, int64;
    ``groups`` are those of several micro-batches, ``groups_KM`` their counts; ``most_lookups`` are
    those of a row, 0 on the CPU.
    """
    if groups is None:
        # Move whole segments (the lookups of one row) from ascending id order to request order.
        offsets_G1, (lookups_N,) = move_segments(
            located.order_U, rows.counts, [rows.lookups_by_row_N], rows.edges_U1
        )
        position_G, groups_KM = None, [list(num_rows_M)]
    else:
        lookups_N = groups.lookups_N
        offsets_G1 = groups.start_G1[: sum(map(sum, groups_KM)) + 1]
        row_G = groups.row_N.index_select(0, offsets_G1[:-1])
        position_G = located.request_positions.index_select(0, row_G)
    whole = PoolingIndex(
        row_of_lookup_N=fetch_position_U.index_select(0, rows.row_of_lookup_N),
        bag_offsets_S1=None,  # by part
        bags_by_row_N=None if all(cut.is_sequence_M) else _bags_by_row(bags, lookups_N),
        lookups_by_row_N=lookups_N,
        row_offsets_U1=offsets_G1,
        mean_S=None,
        gradient_position_U=position_G,
        source_N=bags.source_N,
        most_lookups=most_lookups,
    )
    return _parts(whole, bags.offsets_S1, cut, lookups_MK, groups_KM, num_rows_M)


def _bags_by_row(bags: Bags, lookups_N: Tensor) -> Tensor:
    """Returns the bag of each of these lookups."""
    if lookups_N.device.type == "cpu":
        return bag_of_lookup(bags.offsets_S1, lookups_N.numel()).index_select(0, lookups_N)
    return torch.searchsorted(bags.offsets_S1[1:], lookups_N, right=True)


def _parts(
    whole: PoolingIndex,
    offsets_S1: Tensor,
    cut: BatchCut,
    lookups_MK: Counts,
    groups_KM: Counts,
    num_rows_M: Sequence[int],
) -> list[list[PoolingIndex]]:
    """Cuts the pooling of a batch by micro-batch and matrix. Tensors in bag order are ordered by
    matrix, then micro-batch; those grouped by row by micro-batch, then matrix."""
    row_edges, lookup_edges = _edges([num_rows_M]), _edges(lookups_MK)
    bag_edges = _edges(list(map(sum, segments_K)) for segments_K in cut.segments_MK)
    by_row_edges, group_edges = _edges(zip(*lookups_MK)), _edges(groups_KM)
    rows_MK = _cut(whole.row_of_lookup_N, lookup_edges)
    sources_MK = _cut(whole.source_N, lookup_edges)
    lookups_KM = _cut(whole.lookups_by_row_N, by_row_edges)
    bags_KM = _cut(whole.bags_by_row_N, by_row_edges)
    positions_KM = _cut(whole.gradient_position_U, group_edges)
    parts: list[tuple[dict[str, int], PoolingIndex]] = []
    for km, (k, m) in enumerate(product(range(len(groups_KM)), range(len(num_rows_M)))):
        mk, is_sequence = m * len(groups_KM) + k, cut.is_sequence_M[m]
        # Offsets have one entry more than bags, or groups.
        bags = slice(bag_edges[mk], bag_edges[mk + 1] + 1)
        groups = slice(group_edges[km], group_edges[km + 1] + 1)
        own = PoolingIndex(
            row_of_lookup_N=rows_MK[mk],
            bag_offsets_S1=None if is_sequence else offsets_S1[bags],
            bags_by_row_N=None if is_sequence else bags_KM[km],
            lookups_by_row_N=lookups_KM[km],
            row_offsets_U1=whole.row_offsets_U1[groups],
            mean_S=cut.mean_MK[m][k],
            gradient_position_U=positions_KM[km],
            source_N=sources_MK[mk],
            most_lookups=whole.most_lookups,
        )
        # Numbers that count from the start of the batch shall count from the start of the matrix
        # (rows), or of the micro-batch (lookups, bags).
        starts = {
            "row_of_lookup_N": row_edges[m],
            "bag_offsets_S1": lookup_edges[mk],
            "bags_by_row_N": bag_edges[mk],
            "lookups_by_row_N": lookup_edges[mk],
            "row_offsets_U1": by_row_edges[km],
            "gradient_position_U": row_edges[m],
        }
        parts.append((starts, own))
    shifted = iter(_shifted(parts))
    return [list(islice(shifted, len(num_rows_M))) for _ in groups_KM]


def _edges(counts: Iterable[Sequence[int]]) -> list[int]:
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
    """Whether each bag is averaged; bags are ordered by sample, or by feature without a size. No
    host sync."""
    if size is not None:
        return mean_F.repeat(size)
    on_device = _on_device(mean_F.device, tuple(bags_F))
    return mean_F.repeat_interleave(on_device, output_size=sum(bags_F))
