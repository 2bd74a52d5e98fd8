"""A sharded model's weights as the unsharded model has them, for whoever serves it.

Shards come to rank 0 table by table, in pieces of bounded size, straight into the whole tensor.
"""

from __future__ import annotations

import math
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
"""Of a message, and so of the memory needed beside the state itself."""


@dataclass(frozen=True)
class _Piece:
    """Where a rank's part of a tensor is in the whole."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def place(self) -> tuple[slice, ...]:
        return tuple(slice(o, o + s) for o, s in zip(self.offsets, self.sizes, strict=True))


@dataclass(frozen=True)
class _Parts:
    """What one rank has of one tensor; ``pieces`` is ``None`` where every rank has the whole."""

    size: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[_Piece, ...] | None


def export_plain(model: nn.Module) -> dict[str, Tensor]:
    """Gathers a sharded model's weights and buffers into an unsharded state dict.

    The unsharded model loads it with ``strict=True``. Collective: every rank of the default process
    group calls this, between steps.

    Args:
        model: A ``DistributedModelParallel``, of tables under any plan, ours or stock.

    Returns:
        On rank 0 copies on the CPU, by the keys of the unsharded model; on other ranks nothing.

    Raises:
        CompatError: If a tensor is sharded by something else than TorchRec, or parts of a table are
            in no rank's state dict. On all ranks.

    Cost:
        On rank 0 the whole state and 64 MiB, on another rank 64 MiB at most.
    """
    state = model.state_dict()
    shards = {name: _shards_of(value) for name, value in state.items()}
    mine = {name: _parts_of(value, shards[name]) for name, value in state.items()}
    is_first = dist.get_rank() == 0
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.gather_object(mine, of_ranks if is_first else None)
    problem: list[Any] = [_problem(of_ranks) if is_first else None]
    dist.broadcast_object_list(problem)
    if problem[0] is not None:
        raise CompatError(f"export_plain: {problem[0]}")
    if not is_first:
        for name in sorted(name for name, parts in mine.items() if parts.pieces):
            _send(shards[name] or ())
        return {}
    return {
        name: _joined(name, state.get(name), shards.get(name), of_ranks)
        for name in sorted({name for of_rank in of_ranks for name in of_rank})
    }


def _shards_of(value: Any) -> list[tuple[_Piece, Tensor]] | None:
    """This rank's shards of a tensor; ``None`` where it has the whole."""
    if isinstance(value, ShardedTensor):
        return [
            (_Piece(tuple(of.metadata.shard_offsets), tuple(of.tensor.shape)), of.tensor.detach())
            for of in value.local_shards()
        ]
    local = value.to_local() if isinstance(value, DTensor) else None
    if isinstance(local, LocalShardsWrapper):
        # a rank without shards has an offset all the same
        return [
            (_Piece(tuple(offsets), tuple(shard.shape)), shard.detach())
            for shard, offsets in zip(local.local_shards(), local.local_offsets())
        ]
    return None


def _parts_of(value: Any, shards: Sequence[tuple[_Piece, Tensor]] | None) -> _Parts:
    pieces = tuple(piece for piece, _ in shards) if shards is not None else None
    if isinstance(value, DTensor) and pieces is None:
        pieces = ()  # cut by another than TorchRec: nobody has it
    size = value.metadata().size if isinstance(value, ShardedTensor) else value.shape
    return _Parts(tuple(size), value.dtype, pieces)


def _problem(of_ranks: Sequence[Mapping[str, _Parts]]) -> str | None:
    """Names a tensor that the ranks do not have whole."""
    found: dict[str, int] = {}
    sizes: dict[str, tuple[int, ...]] = {}
    for of_rank in of_ranks:
        for name, parts in of_rank.items():
            sizes[name] = parts.size
            if parts.pieces is not None:
                numbers = sum(math.prod(piece.sizes) for piece in parts.pieces)
                found[name] = found.get(name, 0) + numbers
    for name, numbers in found.items():
        if numbers != math.prod(sizes[name]):
            return (
                f"{name} has {math.prod(sizes[name]):,} elements, of which the ranks' state dicts "
                f"hold {numbers:,}; export a model whose tables are all in its state dict, sharded "
                "by TorchRec alone"
            )
    return None


def _joined(
    name: str,
    value: Any,
    shards: Sequence[tuple[_Piece, Tensor]] | None,
    of_ranks: Sequence[Mapping[str, _Parts]],
) -> Tensor:
    """One whole tensor on rank 0, from its own shards and what others send."""
    if value is not None and shards is None:
        return torch.clone(value.detach().cpu(), memory_format=torch.contiguous_format)
    parts = next(of_rank[name] for of_rank in of_ranks if name in of_rank)
    whole = torch.empty(parts.size, dtype=parts.dtype)
    for piece, shard in shards or ():
        whole[piece.place] = shard.cpu()
    device = _device_of_messages()
    for rank, of_rank in enumerate(of_ranks):
        if rank > 0 and name in of_rank:
            for piece in of_rank[name].pieces or ():
                for rows in _row_blocks(whole[piece.place]):
                    message = torch.empty(rows.shape, dtype=rows.dtype, device=device)
                    dist.recv(message, src=rank)
                    rows.copy_(message)
    return whole


def _send(shards: Sequence[tuple[_Piece, Tensor]]) -> None:
    device = _device_of_messages()
    for _, shard in shards:
        for rows in _row_blocks(shard):
            dist.send(rows.to(device).contiguous(), dst=0)


def _row_blocks(tensor: Tensor) -> Iterator[Tensor]:
    """Views of at most so many bytes, none if there is nothing to send."""
    if not tensor.numel():
        return
    row_bytes = tensor[0].numel() * tensor.element_size()
    yield from tensor.split(max(1, _MOST_BYTES // row_bytes))


def _device_of_messages() -> torch.device:
    on_host = "gloo" in str(dist.get_backend_config())
    return torch.device("cpu") if on_host else torch.device("cuda", torch.cuda.current_device())
