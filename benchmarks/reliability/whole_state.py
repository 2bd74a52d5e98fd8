"""A sharded state joined to whole tensors, read from the shards and from nothing else.

Checkpoints are compared with it, so it shares no code with saving, loading or exporting.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.distributed.types import ShardedTensor

_Piece = tuple[str, tuple[int, ...], tuple[int, ...], Tensor]
"""Name, size of the whole, offsets of the piece, and the piece."""


def join_state(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Joins every tensor of nested state dicts. Collective.

    Returns:
        On rank 0 copies of the whole tensors by path, NaN where no rank had an element; elsewhere
        nothing.
    """
    mine = list(_pieces("", state))
    is_first = dist.get_rank() == 0
    pieces_of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.gather_object(mine, pieces_of_ranks if is_first else None)
    joined: dict[str, Tensor] = {}
    pieces = itertools.chain.from_iterable(pieces or () for pieces in pieces_of_ranks)
    for name, size, offsets, piece in pieces:
        whole = joined.setdefault(name, torch.full(size, torch.nan))
        whole[tuple(slice(o, o + s) for o, s in zip(offsets, piece.shape))] = piece
    return joined


def differences(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> list[str]:
    """Names of tensors that are missing, too many, or differ in a bit. NaN differs from all."""
    common = found.keys() & expected.keys()
    unequal = {name for name in common if not torch.equal(found[name], expected[name])}
    return sorted(unequal | (found.keys() ^ expected.keys()))


def _pieces(path: str, value: Any) -> Iterator[_Piece]:
    if isinstance(value, Mapping):
        for key, member in value.items():
            yield from _pieces(f"{path}/{key}" if path else str(key), member)
    elif isinstance(value, ShardedTensor):
        for shard in value.local_shards():
            offsets = tuple(shard.metadata.shard_offsets)
            yield path, tuple(value.metadata().size), offsets, shard.tensor.detach().clone()
    elif isinstance(value, Tensor):
        yield path, tuple(value.shape), (0,) * value.dim(), value.detach().clone()
