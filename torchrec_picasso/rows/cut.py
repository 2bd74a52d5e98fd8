"""How a batch is cut into parts: in how many bags of each matrix.

A schedule cuts by samples. Where nothing cuts, the batch is one part; then, and only then, every
feature may have a batch size of its own.

Shape letters: B samples, F features, K parts, M matrices, S bags.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_picasso.ops.pack_plan import PackPlan

__all__ = ["BatchCut"]


@dataclass(frozen=True, kw_only=True)
class BatchCut:
    """The parts of a batch."""

    sizes_K: Sequence[int | None]
    """Samples of each part, ``None`` where every feature has its own number."""
    bags_MK: Sequence[Sequence[int]]
    """Bags of each part of each matrix."""
    mean_MK: Sequence[Sequence[Tensor | None]]
    """Which of them are averaged, bool, in their order; ``None`` = none."""

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
            return BatchCut._by_feature(features.stride_per_key(), plan)
        sizes_K = [features.stride()] if sizes_K is None else sizes_K
        return BatchCut(
            sizes_K=sizes_K,
            bags_MK=[[num * size for size in sizes_K] for num in plan.features_M],
            mean_MK=[
                [None if mean_F is None else mean_F.repeat(size) for size in sizes_K]
                for mean_F in plan.mean_MF
            ],
        )

    @staticmethod
    def _by_feature(strides: Sequence[int], plan: PackPlan) -> BatchCut:
        strides_MF = [
            strides[start:end] for start, end in pairwise([0, *accumulate(plan.features_M)])
        ]
        return BatchCut(
            sizes_K=[None],
            bags_MK=[[sum(strides_F)] for strides_F in strides_MF],
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
