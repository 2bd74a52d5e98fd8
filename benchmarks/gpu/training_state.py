"""A trainer's state as plain tensors: kept, put back, compared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torchrec.distributed.types import ShardedTensor

from torchrec_picasso.app.runs.trainer import Trainer

__all__ = ["keep_state", "largest_difference", "put_back", "weights_of"]


def keep_state(trainer: Trainer) -> list[Tensor]:
    """Copies of all weights and optimizer states."""
    return [tensor.clone() for tensor in _tensors(trainer.state())]


def put_back(trainer: Trainer, kept: Sequence[Tensor]) -> None:
    """Writes what :func:`keep_state` gave into the trainer; no batch may be in flight."""
    with torch.no_grad():
        for tensor, saved in zip(_tensors(trainer.state()), kept, strict=True):
            tensor.copy_(saved)


def weights_of(trainer: Trainer) -> dict[str, Tensor]:
    """Copies of all weights by name, on the CPU; for world size 1."""
    weights = {}
    for name, value in trainer.model.state_dict().items():
        shards = list(_tensors(value))
        assert len(shards) == 1, f"{name} has {len(shards)} shards, expected 1"
        weights[name] = shards[0].to("cpu", copy=True)
    return weights


def largest_difference(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Largest difference of any element, relative to its tensor's largest element.

    NaN in either counts as infinitely far.

    Raises:
        KeyError: If names differ.
    """
    if found.keys() != expected.keys():
        raise KeyError(f"different names: {sorted(found.keys() ^ expected.keys())}")
    largest = 0.0
    for name, tensor in expected.items():
        if tensor.numel():
            scale = tensor.abs().max().clamp(min=torch.finfo(torch.float32).tiny)
            relative = float((found[name] - tensor).abs().max() / scale)
            largest = max(largest, relative if relative == relative else float("inf"))
    return largest


def _tensors(value: object) -> Iterator[Tensor]:
    """Every tensor in nested containers, in order; of a sharded one what is on this rank."""
    if isinstance(value, ShardedTensor):
        for shard in value.local_shards():
            yield shard.tensor.detach()
    elif isinstance(value, Tensor):
        yield value.detach()
    elif isinstance(value, Mapping):
        for member in value.values():
            yield from _tensors(member)
    elif isinstance(value, (list, tuple)):
        for member in value:
            yield from _tensors(member)
