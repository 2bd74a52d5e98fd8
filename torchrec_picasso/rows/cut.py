"""How a batch is cut into parts: in how many bags of each matrix of rows.

A schedule cuts by samples. Where nothing cuts, the batch is one part; then, and only then, every
feature may have a batch size of its own.

The lookups of a matrix's part are one run, in the order of its bags. Of sequences they are a run
for each feature, since each is an output of its own, whose length the host has to know.

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
    """Gives every feature as many bags as the one with most, empty ones at its end.

    Homes that pool bags for other ranks are told one number of samples, and sequences are given out
    with one. TorchRec's ``pad_vbe_kjt_lengths`` does without weights, feature by feature.

    Args:
        features: Each with a batch size of its own.
    """
    lengths_S, num_features = features.lengths(), len(features.keys())
    sizes_F = torch.tensor(features.stride_per_key(), device=lengths_S.device)
    most = max(features.stride_per_key())
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
    """The parts of a batch."""

    sizes_K: Sequence[int | None]
    """Samples of each part, ``None`` where every feature has its own number."""
    runs_MK: Sequence[Sequence[Sequence[int]]]
    """Bags of each run of each part of each matrix."""
    mean_MK: Sequence[Sequence[Tensor | None]]
    """Which bags of each part are averaged, bool, in their order; ``None`` = none."""

    @staticmethod
    def of(
        features: KeyedJaggedTensor, plan: PackPlan, sizes_K: Sequence[int] | None = None
    ) -> BatchCut:
        """Cuts a batch.

        Args:
            features: The whole batch.
            plan: Tells the features of each matrix.
            sizes_K: Samples of each part, summing to the batch's; ``None`` = one part.
        """
        if features.variable_stride_per_key():
            assert sizes_K is None, "samples of different features cannot be cut alike"
            assert not plan.bag_packs, "these features are filled up with empty bags"
            return BatchCut._by_feature(features.stride_per_key(), plan)
        sizes_K = [features.stride()] if sizes_K is None else sizes_K
        of_rows = slice(plan.num_row_matrices)
        return BatchCut(
            sizes_K=sizes_K,
            runs_MK=[
                [[size] * num if is_sequence else [num * size] for size in sizes_K]
                for num, is_sequence in zip(plan.features_M[of_rows], plan.is_sequence_M)
            ],
            mean_MK=[
                [None if mean_F is None else mean_F.repeat(size) for size in sizes_K]
                for mean_F in plan.mean_MF[of_rows]
            ],
        )

    @staticmethod
    def _by_feature(strides: Sequence[int], plan: PackPlan) -> BatchCut:
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
        """Parts K."""
        return len(self.sizes_K)

    @property
    def bags_by_part(self) -> list[list[int]]:
        """Bags of each part of each matrix."""
        return [[sum(runs) for runs in runs_K] for runs_K in self.runs_MK]

    @property
    def bags_by_run(self) -> list[int]:
        """Bags of each run, one after the other."""
        return [bags for runs_K in self.runs_MK for runs in runs_K for bags in runs]

    @property
    def part_by_run(self) -> list[int]:
        """Part of each run."""
        return [part for runs_K in self.runs_MK for part, runs in enumerate(runs_K) for _ in runs]

    def by_part(self, numbers_J: Sequence[int]) -> list[list[list[int]]]:
        """A number of each run, by matrix and part."""
        numbers = iter(numbers_J)
        return [[[next(numbers) for _ in runs] for runs in runs_K] for runs_K in self.runs_MK]
