"""Adam and LAMB for rows in host memory, with torch operators; FBGEMM has them on GPUs only.

    m = beta1 m + (1 - beta1) g         v = beta2 v + (1 - beta2) g^2
    u = m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps) + decay w
    Adam: w -= lr u                     LAMB: w -= lr |w| / |u| u

t counts steps of the optimizer, not of a row; a row that is not looked up keeps m, v and w. The
partial row-wise kinds keep one v per row, from the mean of g^2. LAMB's norms are norms of one row;
if u is zero in all columns, LAMB gives NaN, as in FBGEMM.

Source: Kingma and Ba, Adam (ICLR 2015), with the decay of Loshchilov and Hutter (ICLR 2019); You et
al., Large Batch Optimization (ICLR 2020); as in FBGEMM's ``codegen/genscript/optimizers.py``.

Shape letters: D dim, R rows of a matrix, U unique rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchrec_picasso.storage.update_step import UpdateStep

__all__ = ["adam", "lamb"]


def adam(
    weights_RD: Tensor,
    states: Sequence[Tensor],
    rows_U: Tensor,
    grads_UD: Tensor,
    step: UpdateStep,
) -> None:
    """Adam, partial row-wise if the second state has one value per row. A ``RowUpdate``."""
    weights_UD = weights_RD.index_select(0, rows_U)
    steps_UD = _steps(states, rows_U, grads_UD, step).add_(weights_UD, alpha=step.weight_decay)
    weights_RD.index_copy_(0, rows_U, weights_UD.add_(steps_UD, alpha=-step.learning_rate))


def lamb(
    weights_RD: Tensor,
    states: Sequence[Tensor],
    rows_U: Tensor,
    grads_UD: Tensor,
    step: UpdateStep,
) -> None:
    """LAMB, partial row-wise if the second state has one value per row. A ``RowUpdate``."""
    weights_UD = weights_RD.index_select(0, rows_U)
    steps_UD = _steps(states, rows_U, grads_UD, step).add_(weights_UD, alpha=step.weight_decay)
    weight_norms_U1, step_norms_U1 = (
        torch.linalg.vector_norm(rows_UD, dim=1, keepdim=True) for rows_UD in (weights_UD, steps_UD)
    )
    # (U, 1) scales every column of a row by |w| / |u|.
    steps_UD.mul_(weight_norms_U1.div_(step_norms_U1))
    weights_RD.index_copy_(0, rows_U, weights_UD.add_(steps_UD, alpha=-step.learning_rate))


def _steps(states: Sequence[Tensor], rows_U: Tensor, grads_UD: Tensor, step: UpdateStep) -> Tensor:
    """Updates both states; returns u without decay, shape ``(U, D)``."""
    means_RD, squares = states
    means_UD = means_RD.index_select(0, rows_U).mul_(step.beta1)
    means_UD.add_(grads_UD, alpha=1 - step.beta1)
    # Rows are distinct, so a copy back is exact; rows that were not looked up are not touched.
    means_RD.index_copy_(0, rows_U, means_UD)
    # The state of squares has one value per row, shape (R,), or per weight, shape (R, D).
    new_squares = grads_UD.square().mean(1) if squares.dim() == 1 else grads_UD.square_()
    new_squares.mul_(1 - step.beta2)
    new_squares.add_(squares.index_select(0, rows_U), alpha=step.beta2)
    squares.index_copy_(0, rows_U, new_squares)
    root = new_squares.div_(_bias_correction(step.beta2, step.number)).sqrt_().add_(step.eps)
    root = root.unsqueeze(1) if root.dim() == 1 else root  # (U, 1) divides every column of a row
    return means_UD.div_(_bias_correction(step.beta1, step.number)).div_(root)


def _bias_correction(beta: float, number: int) -> float:
    """``1 - beta^t``, the power rounded to float32 as by FBGEMM's ``powf``."""
    return 1 - float(torch.tensor(beta, dtype=torch.float32) ** number)
