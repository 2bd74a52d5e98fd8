"""A trainer's state as plain tensors: kept, put back, compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from torchrec_picasso.app.runs.exchange_step import local_tensors
from torchrec_picasso.app.runs.trainer import Trainer


def keep_state(trainer: Trainer) -> list[Tensor]:
    """Copies of all weights and optimizer states."""
    return [tensor.clone() for tensor in local_tensors(trainer.state())]


def put_back(trainer: Trainer, kept: Sequence[Tensor]) -> None:
    """Writes what :func:`keep_state` gave into the trainer; no batch may be in flight."""
    with torch.no_grad():
        for tensor, saved in zip(local_tensors(trainer.state()), kept, strict=True):
            tensor.copy_(saved)


def weights_of(trainer: Trainer) -> dict[str, Tensor]:
    """Copies of all weights by name, on the CPU; for world size 1."""
    weights = {}
    for name, value in trainer.model.state_dict().items():
        shards = list(local_tensors(value))
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
