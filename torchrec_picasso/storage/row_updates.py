"""Optimizers that update rows in host memory with torch operators, and their state.

FBGEMM has CPU kernels for SGD, Adagrad and row-wise Adagrad. Row-wise Adagrad is faster here on
Intel's processors only. Adam, LAMB and their partial row-wise kinds exist on the CPU only here. The
TBE of such a pack is created for SGD, which keeps no state; the state is stored beside the TBE,
with the names, shapes and types of FBGEMM's state on a GPU.

A separate call updates the replicas. The shapes of that call are equal on all ranks, so the
operators sum in the same order on all ranks and replicas stay bitwise identical.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torchrec.modules.embedding_configs import DataType

from torchrec_picasso._torchrec import EmbOptimType
from torchrec_picasso.ops.processor import is_intel
from torchrec_picasso.storage.adam import adam, lamb
from torchrec_picasso.storage.row_wise_adagrad import row_wise_adagrad
from torchrec_picasso.storage.update_step import RowUpdate

__all__ = ["ONLY_HERE", "PARTIAL", "new_states", "row_update"]

ONLY_HERE: Mapping[EmbOptimType, RowUpdate] = {
    EmbOptimType.ADAM: adam,
    EmbOptimType.PARTIAL_ROWWISE_ADAM: adam,
    EmbOptimType.LAMB: lamb,
    EmbOptimType.PARTIAL_ROWWISE_LAMB: lamb,
}
"""Optimizers without a CPU kernel in FBGEMM."""

PARTIAL = (EmbOptimType.PARTIAL_ROWWISE_ADAM, EmbOptimType.PARTIAL_ROWWISE_LAMB)
"""Optimizers whose second state has one value per row."""
_PLAIN_ADAGRAD = {
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
"""TBE arguments that modify row-wise Adagrad, with the values that disable the modification."""


def row_update(
    fused_params: Mapping[str, Any], *, data_type: DataType, is_on_host: bool, has_replicas: bool
) -> RowUpdate | None:
    """Returns the update of a pack with torch operators.

    Args:
        fused_params: TBE arguments, FBGEMM types.
        data_type: Type of the weights.
        is_on_host: Whether the rows are in host memory.
        has_replicas: Whether the pack has hot rows.

    Returns:
        The update, or ``None`` if FBGEMM updates: another optimizer, memory or type, an argument
        that modifies the update, or a processor on which FBGEMM's kernel is faster.
    """
    optimizer = fused_params.get("optimizer")
    if not is_on_host or data_type != DataType.FP32:
        return None
    if optimizer != EmbOptimType.EXACT_ROWWISE_ADAGRAD:
        return ONLY_HERE.get(optimizer) if optimizer is not None else None
    if any(fused_params.get(name, plain) != plain for name, plain in _PLAIN_ADAGRAD.items()):
        return None
    # Replicas are updated on all ranks: by the same operators, whatever processor a rank has.
    return row_wise_adagrad if has_replicas or is_intel() else None


def new_states(
    optimizer: EmbOptimType, num_rows: int, dim: int, device: torch.device
) -> dict[str, Tensor]:
    """Returns the initial state of a table, for an optimizer of :data:`ONLY_HERE`.

    Args:
        optimizer: The optimizer.
        num_rows: Rows of the table.
        dim: Columns of the table.
        device: Device of the state.

    Returns:
        State tensors by FBGEMM's names, float32, shape ``(num_rows, dim)`` or ``(num_rows,)``.
    """
    squares_shape = (num_rows,) if optimizer in PARTIAL else (num_rows, dim)
    return {
        "exp_avg": torch.zeros(num_rows, dim, device=device),
        "exp_avg_sq": torch.zeros(squares_shape, device=device),
    }
