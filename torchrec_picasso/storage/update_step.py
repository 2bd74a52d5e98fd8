"""What an update of rows by torch's operators is told: the numbers that a TBE gives its kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchrec_picasso._torchrec import SplitTableBatchedEmbeddingBagsCodegen

__all__ = ["RowUpdate", "UpdateStep"]


@dataclass(frozen=True, kw_only=True)
class UpdateStep:
    """One step of a fused optimizer; numbers are those that a float32 argument holds.

    Args:
        number: From 1.
        learning_rate: Of this step.
        eps: Keeps divisions finite.
        beta1: How much a moving mean of gradients keeps.
        beta2: Likewise, of their squares.
        weight_decay: Share of a weight that is added to its step, times the learning rate.
    """

    number: int
    learning_rate: float
    eps: float
    beta1: float
    beta2: float
    weight_decay: float

    @staticmethod
    def begin(tbe: SplitTableBatchedEmbeddingBagsCodegen) -> UpdateStep:
        """Counts a step as the TBE's own forward does, and reads what it may have been set to."""
        if tbe.iter_cpu.item() == 0:  # ``set_optimizer_step`` has reached the other counter alone
            tbe.iter_cpu.copy_(tbe.iter)
        tbe.iter_cpu.add_(1)
        tbe.iter.add_(1)
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
    states: The optimizer's, float32, each of shape ``(R, D)`` or ``(R,)``, in FBGEMM's order.
    rows: Int64, each once, shape ``(U,)``.
    grads: Their gradients, float32, shape ``(U, D)``; may be overwritten.
    step: Numbers of this step.
"""


def _as_float32(number: float) -> float:
    return float(torch.tensor(number, dtype=torch.float32))
