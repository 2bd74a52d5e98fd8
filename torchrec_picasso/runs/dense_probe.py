"""Measures a model's dense part alone: forward and backward with its rows given.

All ranks measure at once, so that ranks that share cores slow each other as they will in training.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.datasets.utils import Batch
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from torchrec_picasso.config import TrainConfig
from torchrec_picasso.cost.dense import DenseTimes
from torchrec_picasso.runs.trainer import unsharded_model
from torchrec_picasso.zoo.registry import make_source

__all__ = ["measure_dense", "measure_dense_of"]

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
    source = make_source(config.data, config.seed)
    return measure_dense_of(
        unsharded_model(config, source),
        next(iter(source.batches(dist.get_rank(), dist.get_world_size()))),
        config.data.batch_size,
        device,
    )


def measure_dense_of(
    model: nn.Module, batch: Batch, batch_size: int, device: torch.device | None = None
) -> DenseTimes:
    """Times the dense part of a model on a batch.

    Collective: every rank of the default process group calls this, in the same order.

    Args:
        model: Before sharding, its tables on any device, also ``meta``; its forward takes a batch
            and gives the loss first. It is left without its tables.
        batch: This rank's.
        batch_size: Samples of it.
        device: Where it runs; CPU if ``None``.

    Returns:
        The same times on every rank: those of the slowest.
    """
    device = device or torch.device("cpu")
    given = _give_rows(model, batch_size, device)
    model.to(device)
    batch = batch.to(device)
    times_ms: list[list[float]] = []
    for _ in range(_WARMUP_STEPS + _TIMED_STEPS):
        model.zero_grad()
        for rows in given:
            rows.forget_gradients()
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
        batch_size=batch_size,
    )


class _GivenRows(nn.Module):
    """Stands for tables: gives the same rows for every batch, and takes their gradients."""

    def __init__(self) -> None:
        super().__init__()
        self._rows: dict[str, Tensor] = {}  # no parameters, whose gradients ranks would sum

    def forget_gradients(self) -> None:
        """Lets go of what backward gave."""
        for rows in self._rows.values():
            rows.grad = None

    def _given(self, name: str, num_rows: int, dim: int, device: torch.device) -> Tensor:
        if name not in self._rows:
            self._rows[name] = torch.rand(num_rows, dim, device=device).requires_grad_()
        return self._rows[name]


class _GivenBags(_GivenRows):
    """For a pooled collection."""

    def __init__(
        self, collection: EmbeddingBagCollection, batch_size: int, device: torch.device
    ) -> None:
        super().__init__()
        configs = collection.embedding_bag_configs()
        self._keys = [name for config in configs for name in config.feature_names]
        self._dims = [config.embedding_dim for config in configs for _ in config.feature_names]
        self._shape = batch_size, sum(self._dims), device

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """All bags side by side, as a sharded collection gives them."""
        values = self._given("all", *self._shape)
        return KeyedTensor(keys=self._keys, length_per_key=self._dims, values=values)


class _GivenSequences(_GivenRows):
    """For a collection of sequences."""

    def __init__(
        self, collection: EmbeddingCollection, batch_size: int, device: torch.device
    ) -> None:
        super().__init__()
        self._device = device
        self._dims = {
            name: config.embedding_dim
            for config in collection.embedding_configs()
            for name in config.feature_names
        }

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Rows for every id."""
        bags = {name: features[name] for name in self._dims}
        return {
            name: JaggedTensor(
                values=self._given(name, of.values().numel(), self._dims[name], self._device),
                lengths=of.lengths(),
            )
            for name, of in bags.items()
        }


_STANDS_FOR: dict[type[nn.Module], Callable[..., _GivenRows]] = {
    EmbeddingBagCollection: _GivenBags,
    EmbeddingCollection: _GivenSequences,
}


def _give_rows(model: nn.Module, batch_size: int, device: torch.device) -> list[_GivenRows]:
    """Puts given rows in the place of every collection of tables."""
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) in _STANDS_FOR
    ]
    given = [_STANDS_FOR[type(child)](child, batch_size, device) for _, _, child in found]
    for (parent, name, _), rows in zip(found, given):
        setattr(parent, name, rows)
    return given


def _now_s(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
