"""Copies a batch, so that a model may write into it.

Only the constructor's tensors are copied, on the current stream. Values that jagged tensors cached
meanwhile, perhaps on another stream, are not copied.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from torchrec_picasso.batches.members import children_of, rebuild

__all__ = ["copy_batch"]


def copy_batch(value: Any) -> Any:
    """Copies a batch of any type; objects that cannot be copied are shared."""
    members = children_of(value)
    if members is not None:
        copied = [copy_batch(member) for _, member in members]
        return rebuild(value, copied, "batch", "let its constructor take its own fields")
    if isinstance(value, KeyedJaggedTensor):
        if value.variable_stride_per_key():
            return copy.deepcopy(value)
        return KeyedJaggedTensor(
            keys=value.keys(),
            values=value.values().clone(),
            weights=_cloned(value.weights_or_none()),
            lengths=value.lengths().clone(),
            stride=value.stride(),
            inverse_indices=_cloned_inverse(value),
        )
    if isinstance(value, JaggedTensor):
        return JaggedTensor(
            values=value.values().clone(),
            weights=_cloned(value.weights_or_none()),
            lengths=value.lengths().clone(),
        )
    if isinstance(value, KeyedTensor):
        values = value.values().clone()
        return KeyedTensor(value.keys(), value.length_per_key(), values, key_dim=value.key_dim())
    if isinstance(value, Tensor):
        return value.clone()
    try:
        return copy.deepcopy(value)
    except Exception:  # any error of a user's type
        return value


def _cloned_inverse(features: KeyedJaggedTensor) -> tuple[list[str], Tensor] | None:
    """The map from samples to deduplicated samples, if the features have one."""
    inverse = features.inverse_indices_or_none()
    return None if inverse is None else (list(inverse[0]), inverse[1].clone())


def _cloned(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.clone()
