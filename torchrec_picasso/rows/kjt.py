"""Builds a KeyedJaggedTensor from another one, with some tensors replaced."""

from __future__ import annotations

from typing import TypeVar

from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

__all__ = ["like"]

_Kind = TypeVar("_Kind", bound=KeyedJaggedTensor)


def like(
    features: KeyedJaggedTensor,
    kind: type[_Kind],
    values_N: Tensor,
    weights_N: Tensor | None,
    lengths_S: Tensor,
    offsets_S1: Tensor | None,
) -> _Kind:
    """Builds features with the keys, batch sizes and inverse indices of another object; no copy.

    Args:
        features: The original features. Counts that they cached on the host are not taken over.
        kind: Type of the result.
        values_N: Ids, shape ``(N,)``.
        weights_N: Per-sample weights, shape ``(N,)``; ``None`` = none.
        lengths_S: Lookups of each bag, shape ``(S,)``.
        offsets_S1: First lookup of each bag, and N, shape ``(S + 1,)``; ``None`` = computed from
            the lengths on demand.
    """
    variable = features.variable_stride_per_key()
    return kind(
        keys=features.keys(),
        values=values_N,
        weights=weights_N,
        lengths=lengths_S,
        offsets=offsets_S1,
        stride=None if variable else features.stride(),
        stride_per_key_per_rank=features.stride_per_key_per_rank() if variable else None,
        inverse_indices=features.inverse_indices_or_none(),
    )
