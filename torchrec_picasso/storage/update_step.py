"""Optimizer step number and hyperparameters of a TBE, for updates with torch operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchrec_picasso._torchrec import SplitTableBatchedEmbeddingBagsCodegen

__all__ = ["RowUpdate", "UpdateStep"]


@dataclass(frozen=True, kw_only=True)
class UpdateStep:
    """One step of a fused optimizer. All numbers are rounded to float32, as kernel arguments are.

    Args:
        number: The step's number, counted from 1.
        learning_rate: The learning rate of this step.
        eps: The number that keeps divisions finite.
        beta1: The factor by which the moving mean of gradients decays in a step.
        beta2: The factor by which the moving mean of squared gradients decays in a step.
        weight_decay: The factor of the weight that Adam and LAMB add to their update.
    """

    number: int
    learning_rate: float
    eps: float
    beta1: float
    beta2: float
    weight_decay: float

    @staticmethod
    def begin(tbe: SplitTableBatchedEmbeddingBagsCodegen) -> UpdateStep:
        """Counts a step as the TBE's forward does, and reads the TBE's current hyperparameters."""
        if tbe.iter_cpu.item() == 0:  # ``set_optimizer_step`` writes ``iter`` only
            tbe.iter_cpu.copy_(tbe.iter)
        tbe.iter_cpu.add_(1)
        tbe.iter.add_(1)
        # Hyperparameters are read in every step, because a scheduler may change them.
        args = tbe.optimizer_args
        return UpdateStep(
            number=int(tbe.iter_cpu),
            learning_rate=tbe.get_learning_rate(),
            eps=_as_float32(args.eps),
            beta1=_as_float32(args.beta1),
            beta2=_as_float32(args.beta2),
            weight_decay=_as_float32(args.weight_decay),
        )


RowUpdate = Callable[[Tensor, Sequence[Tensor], Tensor, Tensor, UpdateStep], None]
"""Updates distinct rows in place.

Args:
    weights: Float32, shape ``(R, D)``.
    states: The optimizer's state tensors in FBGEMM's order, float32, shape ``(R, D)`` or ``(R,)``.
    rows: Distinct row numbers, int64, shape ``(U,)``.
    grads: The gradients of these rows, float32, shape ``(U, D)``; may be overwritten.
    step: The numbers of this step.
"""


def _as_float32(number: float) -> float:
    return float(torch.tensor(number, dtype=torch.float32))
