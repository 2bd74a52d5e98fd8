"""Measures a model's dense part alone: forward and backward with its pooled rows given.

All ranks measure at once, so that ranks that share cores slow each other as they will in training.
"""

from __future__ import annotations

import time
from statistics import median

import torch
import torch.distributed as dist
from torch import nn
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from torchrec_picasso.config import TrainConfig
from torchrec_picasso.cost.dense import DenseTimes
from torchrec_picasso.runs.trainer import unsharded_model
from torchrec_picasso.zoo.registry import make_source

__all__ = ["measure_dense"]

_WARMUP_STEPS, _TIMED_STEPS = 2, 7


def measure_dense(config: TrainConfig, device: torch.device | None = None) -> DenseTimes:
    """Times the dense part of a configuration's model on one of its batches.

    Collective: every rank of the default process group calls this, in the same order.

    Args:
        config: Model, data and seed.
        device: Where it runs; CPU if ``None``.

    Returns:
        The same times on every rank: those of the slowest.
    """
    device = device or torch.device("cpu")
    source = make_source(config.data, config.seed)
    model: nn.Module = unsharded_model(config, source)
    given = _give_rows(model, config.data.batch_size, device)
    model.to(device)
    batch = next(iter(source.batches(dist.get_rank(), dist.get_world_size()))).to(device)
    times_ms: list[list[float]] = []
    for _ in range(_WARMUP_STEPS + _TIMED_STEPS):
        model.zero_grad()
        for rows in given:
            rows.pooled.grad = None
        start_s = _now_s(device)
        loss, _ = model(batch)
        middle_s = _now_s(device)
        loss.backward()
        times_ms.append([(middle_s - start_s) * 1e3, (_now_s(device) - middle_s) * 1e3])
    typical = [median(of_part) for of_part in zip(*times_ms[_WARMUP_STEPS:])]
    slowest = torch.tensor(typical, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    forward_ms, backward_ms = slowest.tolist()
    return DenseTimes(
        forward_ms=forward_ms,
        backward_ms=backward_ms,
        parameter_bytes=sum(p.numel() * p.element_size() for p in model.parameters()),
        batch_size=config.data.batch_size,
    )


class _GivenRows(nn.Module):
    """Stands for tables: gives the same pooled rows for every batch, and takes their gradients."""

    def __init__(
        self, collection: EmbeddingBagCollection, batch_size: int, device: torch.device
    ) -> None:
        super().__init__()
        configs = collection.embedding_bag_configs()
        self._keys = [name for config in configs for name in config.feature_names]
        self._dims = [config.embedding_dim for config in configs for _ in config.feature_names]
        # no parameter, whose gradient ranks would sum
        self.pooled = torch.rand(batch_size, sum(self._dims), device=device).requires_grad_()

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """The pooled rows."""
        return KeyedTensor(keys=self._keys, length_per_key=self._dims, values=self.pooled)


def _give_rows(model: nn.Module, batch_size: int, device: torch.device) -> list[_GivenRows]:
    """Puts given rows in the place of every collection of tables."""
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, EmbeddingBagCollection)
    ]
    given = [_GivenRows(child, batch_size, device) for _, _, child in found]
    for (parent, name, _), rows in zip(found, given):
        setattr(parent, name, rows)
    return given


def _now_s(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
