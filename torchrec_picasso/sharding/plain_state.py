"""Gathers a sharded model's weights into an unsharded state dict, for serving.

Rank 0 receives shards table by table, in messages of bounded size, straight into the whole tensor.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchrec.distributed.shards_wrapper import LocalShardsWrapper
from torchrec.distributed.types import ShardedTensor

from torchrec_picasso.errors import CompatError

__all__ = ["export_plain"]

_MOST_BYTES = 64 << 20
"""Upper bound of a message in bytes, and of the memory needed beside the state itself."""


_Piece = tuple[slice, ...]
"""Index of one shard in the whole tensor."""


@dataclass(frozen=True)
class _Parts:
    """One rank's shards of one tensor; ``pieces`` is ``None`` if every rank has all of it."""

    size: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[_Piece, ...] | None


def export_plain(model: nn.Module) -> dict[str, Tensor]:
    """Gathers a sharded model's weights and buffers into an unsharded state dict.

    The unsharded model loads it with ``strict=True``. Collective: every rank of the default process
    group calls this, between steps.

    Args:
        model: A ``DistributedModelParallel`` whose tables have any plan, hot/cold or stock.

    Returns:
        On rank 0 CPU copies by the keys of the unsharded model; on other ranks an empty dict.

    Raises:
        CompatError: If a tensor is not sharded by TorchRec, or a part of a table is in no rank's
            state dict. Raised on all ranks.

    Cost:
        Memory of the whole state and 64 MiB on rank 0, of 64 MiB at most on other ranks.
    """
    state = model.state_dict()
    shards = {name: _shards_of(value) for name, value in state.items()}
    own = {name: _parts_of(value, shards[name]) for name, value in state.items()}
    is_first = dist.get_rank() == 0
    parts_by_rank: list[Any] = [None] * dist.get_world_size()
    dist.gather_object(own, parts_by_rank if is_first else None)
    # rank 0 alone checks; all ranks learn its result, so that all raise or none does
    problem: list[Any] = [_problem(parts_by_rank) if is_first else None]
    dist.broadcast_object_list(problem)
    if problem[0] is not None:
        raise CompatError(f"export_plain: {problem[0]}")
    if not is_first:
        # messages have no names: both sides go through the tensors in sorted order
        for name in sorted(name for name, parts in own.items() if parts.pieces):
            _send(shards[name] or ())
        return {}
    return {
        name: _joined(name, state.get(name), shards.get(name), parts_by_rank)
        for name in sorted({name for rank_parts in parts_by_rank for name in rank_parts})
    }


def _shards_of(value: Any) -> list[tuple[_Piece, Tensor]] | None:
    """Finds this rank's shards of a tensor; ``None`` if the rank has the whole tensor."""
    local = value.to_local() if isinstance(value, DTensor) else None
    if isinstance(value, ShardedTensor):
        found = [(s.metadata.shard_offsets, s.tensor) for s in value.local_shards()]
    elif isinstance(local, LocalShardsWrapper):
        # zip is not strict: a rank without shards still lists one offset
        found = list(zip(local.local_offsets(), local.local_shards()))
    else:
        return None
    return [
        (tuple(slice(o, o + n) for o, n in zip(offsets, shard.shape, strict=True)), shard.detach())
        for offsets, shard in found
    ]


def _parts_of(value: Any, shards: Sequence[tuple[_Piece, Tensor]] | None) -> _Parts:
    """Describes this rank's shards of a tensor, without their data."""
    pieces = tuple(piece for piece, _ in shards) if shards is not None else None
    if isinstance(value, DTensor) and pieces is None:
        pieces = ()  # not sharded by TorchRec: no rank has parts, so the check fails
    size = value.metadata().size if isinstance(value, ShardedTensor) else value.shape
    return _Parts(tuple(size), value.dtype, pieces)


def _problem(parts_by_rank: Sequence[Mapping[str, _Parts]]) -> str | None:
    """Describes the first tensor whose shards do not add up to the whole; ``None`` = all do."""
    found: Counter[str] = Counter()
    expected: dict[str, int] = {}
    for rank_parts in parts_by_rank:
        for name, parts in rank_parts.items():
            if parts.pieces is not None:
                expected[name] = math.prod(parts.size)
                for piece in parts.pieces:
                    found[name] += math.prod(where.stop - where.start for where in piece)
    for name, num_elements in expected.items():
        if found[name] != num_elements:
            return (
                f"{name} has {num_elements:,} elements, of which the ranks' state dicts hold "
                f"{found[name]:,}; export a model whose tables are all in its state dict, sharded "
                "by TorchRec alone"
            )
    return None


def _joined(
    name: str,
    value: Any,
    shards: Sequence[tuple[_Piece, Tensor]] | None,
    parts_by_rank: Sequence[Mapping[str, _Parts]],
) -> Tensor:
    """Joins one tensor on rank 0 from its own shards and the messages of other ranks."""
    if value is not None and shards is None:
        return torch.clone(value.detach().cpu(), memory_format=torch.contiguous_format)
    parts = next(rank_parts[name] for rank_parts in parts_by_rank if name in rank_parts)
    whole = torch.empty(parts.size, dtype=parts.dtype)
    for piece, shard in shards or ():
        whole[piece] = shard.cpu()
    device = _device_of_messages()
    for rank, rank_parts in enumerate(parts_by_rank):
        if rank > 0 and name in rank_parts:
            for piece in rank_parts[name].pieces or ():
                # the sender splits its shard into the same row blocks
                for rows in _row_blocks(whole[piece]):
                    message = torch.empty(rows.shape, dtype=rows.dtype, device=device)
                    dist.recv(message, src=rank)
                    rows.copy_(message)
    return whole


def _send(shards: Sequence[tuple[_Piece, Tensor]]) -> None:
    """Sends this rank's shards of one tensor to rank 0, in row blocks."""
    device = _device_of_messages()
    for _, shard in shards:
        for rows in _row_blocks(shard):
            dist.send(rows.to(device).contiguous(), dst=0)


def _row_blocks(tensor: Tensor) -> Iterator[Tensor]:
    """Splits a tensor into views of at most ``_MOST_BYTES``; no view if it is empty."""
    if not tensor.numel():
        return
    row_bytes = tensor[0].numel() * tensor.element_size()
    yield from tensor.split(max(1, _MOST_BYTES // row_bytes))


def _device_of_messages() -> torch.device:
    """The CPU under gloo, else this rank's CUDA device."""
    on_host = "gloo" in str(dist.get_backend_config())
    return torch.device("cpu") if on_host else torch.device("cuda", torch.cuda.current_device())
