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
from itertools import accumulate

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_picasso.ops.pack_plan import PackPlan

__all__ = ["BatchCut", "padded"]


def padded(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Pads features of different batch sizes with empty bags to the largest batch size.

    Home ranks that pool bags for other ranks receive one number of samples, and sequences are
    returned with one batch size. TorchRec's ``pad_vbe_kjt_lengths`` drops weights and loops over
    features.
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
    """The micro-batches of the features of a route."""

    runs_MK: Sequence[Sequence[Sequence[int]]]
    """Number of bags of each run, by matrix and micro-batch."""
    mean_MK: Sequence[Sequence[Tensor | None]]
    """Whether a bag is averaged, by matrix and micro-batch, bool, in bag order; ``None`` = none."""

    @staticmethod
    def from_strides(
        strides_F: Sequence[int], sizes_K: Sequence[int | None], plan: PackPlan
    ) -> BatchCut:
        """Splits the features of a route with ``strides_F`` bags into samples of each micro-batch.

        ``sizes_K`` is one ``None`` if every feature has its own batch size.
        """
        # Bags of each feature, by micro-batch.
        bags_KF = [strides_F if size is None else [size] * len(strides_F) for size in sizes_K]
        runs_MK, mean_MK = [], []
        ends = accumulate(plan.features_M)
        matrices = zip(ends, plan.features_M, plan.is_sequence_M, plan.mean_MF)
        for end, num, is_sequence, mean_F in matrices:
            own_KF = [bags_F[end - num : end] for bags_F in bags_KF]
            # A pooled matrix has one run per micro-batch, a sequence matrix one per feature.
            runs_MK.append([list(bags_F) if is_sequence else [sum(bags_F)] for bags_F in own_KF])
            mean_MK.append(
                [
                    None if mean_F is None else _flags(mean_F, size, bags_F)
                    for size, bags_F in zip(sizes_K, own_KF)
                ]
            )
        return BatchCut(runs_MK=runs_MK, mean_MK=mean_MK)

    @property
    def num_parts(self) -> int:
        """Number of micro-batches, K."""
        return len(self.runs_MK[0])

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
        """Groups one number per run, in run order, by matrix and micro-batch."""
        numbers = iter(numbers_J)
        return [[[next(numbers) for _ in runs] for runs in runs_K] for runs_K in self.runs_MK]


def _flags(mean_F: Tensor, size: int | None, bags_F: Sequence[int]) -> Tensor:
    """Whether each bag is averaged; bags are ordered by sample, or by feature without a size."""
    if size is not None:
        return mean_F.repeat(size)
    return mean_F.repeat_interleave(torch.tensor(bags_F, device=mean_F.device))
