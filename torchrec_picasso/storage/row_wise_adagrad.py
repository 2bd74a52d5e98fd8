"""Row-wise Adagrad for rows in the host's memory, by torch's operators.

FBGEMM's kernel for CPUs takes 0.7 to 1.1 us for each distinct row, of 8 columns or 64, since its
generated code mixes SSE with AVX instructions. A sort, a segmented sum and a few operators over all
rows take a quarter to a half of that, in float32 too; sums of squares are in another order.

Replicas are updated by a call of their own. Its shapes are the same on all ranks, so the operators
sum in the same order everywhere and replicas stay bit-equal.

Source: Duchi et al., Adaptive Subgradient Methods (JMLR 2011), with one accumulator per row, as in
FBGEMM's ``EXACT_ROWWISE_ADAGRAD``.

Shape letters: D dim, R rows of a matrix, U unique rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torchrec.modules.embedding_configs import DataType

from torchrec_picasso._torchrec import EmbOptimType

__all__ = ["RowWiseAdagrad"]

_DEFAULT_EPS = 1e-8
_WITHOUT = {
    "gradient_clipping": False,
    "max_norm": 0.0,
    "weight_decay": 0.0,
    "counter_based_regularization": None,
    "cowclip_regularization": None,
    "ensemble_mode": None,
    "emainplace_mode": None,
    "global_weight_decay": None,
    "extra_optimizer_config": None,
    "optimizer_state_dtypes": None,
}
"""TBE arguments that change the update, and the values with which they do not."""


class RowWiseAdagrad:
    """The update of rows with ``sum += mean(g^2)``, ``w -= lr g / (sqrt(sum) + eps)``.

    Args:
        eps: Keeps the division finite.
    """

    def __init__(self, eps: float) -> None:
        self._eps = eps

    @staticmethod
    def of(
        fused_params: Mapping[str, Any], *, data_type: DataType, is_on_host: bool
    ) -> RowWiseAdagrad | None:
        """The update of a pack, if it is this one.

        Args:
            fused_params: TBE arguments, FBGEMM types.
            data_type: Type of the weights.
            is_on_host: Whether they are in the host's memory.

        Returns:
            ``None`` where FBGEMM updates: another optimizer, memory or type, or an argument that
            changes the update.
        """
        optimizer = fused_params.get("optimizer")
        if optimizer != EmbOptimType.EXACT_ROWWISE_ADAGRAD or not is_on_host:
            return None
        if data_type != DataType.FP32:
            return None
        if any(fused_params.get(name, plain) != plain for name, plain in _WITHOUT.items()):
            return None
        return RowWiseAdagrad(float(fused_params.get("eps", _DEFAULT_EPS)))

    @torch.no_grad()
    def update(
        self,
        weights_RD: Tensor,
        sums_R: Tensor,
        rows_U: Tensor,
        grads_UD: Tensor,
        learning_rate: float,
    ) -> None:
        """Updates distinct rows in place.

        Args:
            weights_RD: Float32 weights.
            sums_R: Float32 sums of mean squares.
            rows_U: Rows, int64, each once.
            grads_UD: Their gradients, float32; overwritten with the steps taken.
            learning_rate: Of this step.
        """
        if not rows_U.numel():
            return
        norm_U = torch.linalg.vector_norm(grads_UD, dim=1)
        before_U = sums_R.index_select(0, rows_U)
        sums_U = torch.addcmul(before_U, norm_U, norm_U, value=1 / grads_UD.size(1))
        sums_R.index_copy_(0, rows_U, sums_U)
        scale_U = sums_U.sqrt_().add_(self._eps).reciprocal_().mul_(-learning_rate)
        steps_UD = grads_UD.mul_(scale_U.unsqueeze(1))
        weights_RD.scatter_add_(0, rows_U.unsqueeze(1).expand_as(steps_UD), steps_UD)
