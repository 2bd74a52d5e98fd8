"""Reorders bags from KeyedJaggedTensor order to the order in which pooled embeddings are stored.

A KeyedJaggedTensor stores bags by feature; a pooled output ``(B, F * D)`` stores them by sample.
Reordering the lookups (integers) before the gather costs 1 ms; transposing the pooled rows (B * F *
D floats) would cost a pass over 54 MB at B=4,096, F=26, D=128. With a different batch size per
feature the output is flat and feature-major, so the order does not change. Sequences also remain in
feature order, within each micro-batch ("part").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Bags:
    """Lookups in bag order."""

    ids_N: Tensor
    """Packed ids."""
    offsets_S1: Tensor
    """First lookup of each bag, and N; int64."""
    source_N: Tensor | None
    """KeyedJaggedTensor position of each lookup, int64; ``None`` when no caller needs it."""


def bag_order(
    features_M: Sequence[int],
    is_sequence_M: Sequence[bool],
    sizes_K: Sequence[int],
    device: torch.device,
) -> Tensor:
    """Permutes bags from feature-major to matrix-major, sample-major order.

    Bags of a sequence matrix are ordered by micro-batch, then feature, then sample. ``features_M``
    are numbers of features, ``sizes_K`` samples of each micro-batch. Returns the old index of each
    bag in the new order, int32, shape ``(F * B,)``.
    """
    num_features, sizes = sum(features_M), list(sizes_K)
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
    num_features: int, samples_WK: Sequence[Sequence[int]], device: torch.device
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
    ids_N: Tensor, lengths_S: Tensor, order_S: Tensor | None, source_N: Tensor | None
) -> Bags:
    """Puts lookups, given in KeyedJaggedTensor order, in bag order.

    ``order_S`` is a result of :func:`bag_order`, ``None`` keeps the order. ``source_N`` is the
    position of each lookup, as per-sample weights require; it is reordered as well.
    """
    if order_S is not None:
        permute = torch.ops.fbgemm.permute_1D_sparse_data
        old_lengths_S = lengths_S
        # Segments of ids_N move as units: bag s of the result is bag order_S[s] of the input.
        lengths_S, ids_N, _ = permute(order_S, old_lengths_S, ids_N, None, ids_N.numel())
        if source_N is not None:
            _, source_N, _ = permute(order_S, old_lengths_S, source_N, None, source_N.numel())
    offsets_S1 = torch.ops.fbgemm.asynchronous_complete_cumsum(lengths_S.to(torch.int64))
    return Bags(ids_N=ids_N, offsets_S1=offsets_S1, source_N=source_N)
