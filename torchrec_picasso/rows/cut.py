"""The split of a batch into micro-batches ("parts"): number of bags by matrix and micro-batch.

A schedule splits by samples. Without a split the batch is one micro-batch; only then may every
feature have its own batch size.

The lookups of one micro-batch of a matrix are one run, in bag order. A sequence matrix has one run
per feature, because each feature is a separate output whose length the host must know.

Shape letters: B samples, F features, K parts, M matrices, J runs, S bags.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_picasso.ops.pack_plan import PackPlan

__all__ = ["BatchCut", "filled_up"]


def filled_up(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Pads every feature with empty bags to the largest batch size of the features.

    Home ranks that pool bags for other ranks receive one number of samples, and sequences are
    returned with one batch size. TorchRec's ``pad_vbe_kjt_lengths`` drops weights and loops over
    features.

    Args:
        features: Features with different batch sizes.
    """
    lengths_S, num_features = features.lengths(), len(features.keys())
    sizes_F = torch.tensor(features.stride_per_key(), device=lengths_S.device)
    most = max(features.stride_per_key())
    # Mask (F, B_max) of the bags that exist; masked_scatter_ copies the lengths, which are ordered
    # by feature, into it. Values do not change: padded bags are empty.
    is_own_FS = torch.arange(most, device=lengths_S.device) < sizes_F.unsqueeze(1)
    lengths_FS = lengths_S.new_zeros(num_features, most).masked_scatter_(is_own_FS, lengths_S)
    return KeyedJaggedTensor(
        keys=features.keys(),
        values=features.values(),
        weights=features.weights_or_none(),
        lengths=lengths_FS.view(-1),
        stride=most,
        length_per_key=features.length_per_key_or_none(),
        offset_per_key=features.offset_per_key_or_none(),
    )


@dataclass(frozen=True, kw_only=True)
class BatchCut:
    """The micro-batches of a batch."""

    sizes_K: Sequence[int | None]
    """Samples of each micro-batch; ``None`` if every feature has its own batch size."""
    runs_MK: Sequence[Sequence[Sequence[int]]]
    """Number of bags of each run, by matrix and micro-batch."""
    mean_MK: Sequence[Sequence[Tensor | None]]
    """Whether a bag is averaged, by matrix and micro-batch, bool, in bag order; ``None`` = none."""

    @staticmethod
    def of(
        features: KeyedJaggedTensor, plan: PackPlan, sizes_K: Sequence[int] | None = None
    ) -> BatchCut:
        """Splits a batch.

        Args:
            features: The whole batch.
            plan: Plan with the features of each matrix.
            sizes_K: Samples of each micro-batch, summing to the batch size; ``None`` = one
                micro-batch.
        """
        if features.variable_stride_per_key():
            assert sizes_K is None, "samples of different features cannot be cut alike"
            assert not plan.bag_packs, "these features are filled up with empty bags"
            return BatchCut._by_feature(features.stride_per_key(), plan)
        sizes_K = [features.stride()] if sizes_K is None else sizes_K
        row_matrices = slice(plan.num_row_matrices)
        # A pooled matrix has one run of F_m * B_k bags, a sequence matrix F_m runs of B_k bags.
        # Pooled bags are ordered by sample, so the flags (F_m,) repeat for each sample.
        return BatchCut(
            sizes_K=sizes_K,
            runs_MK=[
                [[size] * num if is_sequence else [num * size] for size in sizes_K]
                for num, is_sequence in zip(plan.features_M[row_matrices], plan.is_sequence_M)
            ],
            mean_MK=[
                [None if mean_F is None else mean_F.repeat(size) for size in sizes_K]
                for mean_F in plan.mean_MF[row_matrices]
            ],
        )

    @staticmethod
    def _by_feature(strides: Sequence[int], plan: PackPlan) -> BatchCut:
        # Batch sizes of the features of each matrix; bags remain in feature order.
        strides_MF = [
            strides[start:end] for start, end in pairwise([0, *accumulate(plan.features_M)])
        ]
        return BatchCut(
            sizes_K=[None],
            runs_MK=[
                [list(strides_F) if is_sequence else [sum(strides_F)]]
                for strides_F, is_sequence in zip(strides_MF, plan.is_sequence_M)
            ],
            mean_MK=[
                [
                    None
                    if mean_F is None
                    else mean_F.repeat_interleave(torch.tensor(strides_F, device=mean_F.device))
                ]
                for mean_F, strides_F in zip(plan.mean_MF, strides_MF)
            ],
        )

    @property
    def num_parts(self) -> int:
        """Number of micro-batches, K."""
        return len(self.sizes_K)

    @property
    def bags_by_part(self) -> list[list[int]]:
        """Number of bags, by matrix and micro-batch."""
        return [[sum(runs) for runs in runs_K] for runs_K in self.runs_MK]

    @property
    def bags_by_run(self) -> list[int]:
        """Number of bags of each run, consecutive over matrices and micro-batches."""
        return [bags for runs_K in self.runs_MK for runs in runs_K for bags in runs]

    @property
    def part_by_run(self) -> list[int]:
        """Micro-batch of each run."""
        return [part for runs_K in self.runs_MK for part, runs in enumerate(runs_K) for _ in runs]

    def by_part(self, numbers_J: Sequence[int]) -> list[list[list[int]]]:
        """Groups one number per run by matrix and micro-batch.

        Args:
            numbers_J: One number for each run, in run order.
        """
        numbers = iter(numbers_J)
        return [[[next(numbers) for _ in runs] for runs in runs_K] for runs_K in self.runs_MK]
