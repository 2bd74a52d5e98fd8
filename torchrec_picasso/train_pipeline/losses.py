"""The meaning of a model's losses, and so the loss of one micro-batch.

As in TorchRec, a batch trains the sum of its losses. The gradients of micro-batches add up to those
of the batch if the loss of a micro-batch is scaled as follows.

- ``"mean"`` over samples: times its share of the samples.
- ``"sum"`` over samples: not scaled.
- ``"ratio"`` of two sums over samples, such as weighted losses over weights: the model returns
  ``((numerators, denominators), output)``. With N and D the sums over the whole batch,
  ``d(N / D) = sum over k of dn_k / D - N / D^2 dd_k``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchrec_picasso.errors import CompatError, ConfigError

_REDUCTIONS = ("mean", "sum", "ratio")


class Losses:
    """Computes losses of batches and of their micro-batches."""

    def __init__(self, reduction: str) -> None:
        if reduction not in _REDUCTIONS:
            raise ConfigError(
                f"loss_reduction is {reduction!r}, expected one of {', '.join(_REDUCTIONS)}"
            )
        self.reduction = reduction

    def checked(self, losses: Any) -> Any:
        """Returns the losses that a model returned, unchanged.

        Raises CompatError if the reduction is a ratio and the losses are no pair of tensors, or the
        losses are tensors without data that the model kept from a proof.
        """
        if type(losses).__name__ == "FakeTensor":
            raise CompatError(
                "the model kept a tensor without data of the proof that its batches may be cut; "
                "use num_micro_batches=1, and report the model"
            )
        if self.reduction != "ratio":
            return losses
        if isinstance(losses, tuple) and len(losses) == 2:
            numerators, denominators = losses
            if isinstance(numerators, Tensor) and isinstance(denominators, Tensor):
                return losses
        raise CompatError(
            f"loss_reduction is 'ratio', but the model's losses are a {type(losses).__name__}; "
            "return ((numerators, denominators), output), tensors of sums over samples"
        )

    def whole(self, losses: Any) -> Any:
        """Returns the losses of a whole batch, a vector or 0-d."""
        if self.reduction != "ratio":
            return losses
        numerators, denominators = losses
        return numerators / denominators

    def stand_in(self, losses: Any) -> Tensor:
        """Makes a 0-d loss for a batch without samples; its value has no meaning."""
        if self.reduction != "ratio":
            return torch.sum(losses, dim=0)
        return torch.stack([part.sum() for part in losses]).sum()  # a ratio would divide by 0

    def share(self, losses_K: Mapping[int, Any], index: int, sizes_K: Sequence[int]) -> Tensor:
        """Computes the 0-d loss of one micro-batch; their gradients sum up to those of the batch.
        ``losses_K`` are those of all micro-batches that have samples."""
        losses = losses_K[index]
        if self.reduction != "ratio":
            # a sum of one number would be two operators more in each micro-batch
            loss: Tensor = torch.sum(losses, dim=0) if losses.dim() else losses
            return loss if self.reduction == "sum" else loss * (sizes_K[index] / sum(sizes_K))
        numerators, denominators = losses
        # N and D are constants of the gradient: the formula at the head of the file has dn and dd
        whole_N, whole_D = _whole_sums(losses_K)
        terms = numerators / whole_D - denominators * (whole_N / whole_D.square())
        return torch.sum(terms, dim=0)

    def batch(self, losses_K: Mapping[int, Any], sizes_K: Sequence[int]) -> Tensor:
        """Computes the 0-d loss of a whole batch from all that have samples, without its graph."""
        with torch.no_grad():
            if self.reduction == "ratio":
                numerators, denominators = _whole_sums(losses_K)
                return torch.sum(numerators / denominators, dim=0)
            parts = [self.share(losses_K, index, sizes_K) for index in losses_K]
            return torch.stack(parts).sum()


@torch.no_grad()
def _whole_sums(losses_K: Mapping[int, Any]) -> list[Tensor]:
    """Sums the numerators and the denominators over micro-batches, without their graphs."""
    return [torch.stack(sums).sum(0) for sums in zip(*losses_K.values())]
