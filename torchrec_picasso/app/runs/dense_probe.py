"""Measures a model's dense part alone: forward and backward with its rows given, whole and cut.

All ranks measure at once, so that ranks that share cores slow each other as they will in training.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.datasets.utils import Batch
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from torchrec_picasso.app.config import TrainConfig
from torchrec_picasso.app.runs.trainer import unsharded_model
from torchrec_picasso.app.zoo.registry import make_source
from torchrec_picasso.batches.split import split_batch
from torchrec_picasso.cost.dense import DenseTimes

__all__ = ["measure_dense", "measure_dense_of"]

_WARMUP_STEPS, _TIMED_STEPS = 2, 7
_PIECES, _FEWEST_SAMPLES = (1, 4, 16), 64
"""Micro-batches that a batch is measured in, and the samples that each must have."""


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
    given = _give_rows(model, device)
    model.to(device)
    batch = batch.to(device)
    measured = [
        (pieces, *_in_parts(model, given, batch, batch_size, pieces, device))
        for pieces in _PIECES
        if batch_size >= _FEWEST_SAMPLES * pieces or pieces == 1
    ]
    (_, forward_ms, backward_ms), *in_parts = measured
    return DenseTimes(
        forward_ms=forward_ms,
        backward_ms=backward_ms,
        parameter_bytes=sum(p.numel() * p.element_size() for p in model.parameters()),
        batch_size=batch_size,
        in_parts=tuple(in_parts),
    )


def _in_parts(
    model: nn.Module,
    given: Sequence[_GivenRows],
    batch: Batch,
    batch_size: int,
    pieces: int,
    device: torch.device,
) -> tuple[float, float]:
    """Forward and backward of a batch in so many equal parts, one after the other. Collective."""
    each, more = divmod(batch_size, pieces)
    parts = split_batch(batch, [each + (index < more) for index in range(pieces)])
    times_ms: list[list[float]] = []
    for _ in range(_WARMUP_STEPS + _TIMED_STEPS):
        model.zero_grad()
        forward_ms = backward_ms = 0.0
        for part in parts:
            for rows in given:
                rows.forget_gradients()
            start_s = _now_s(device)
            loss, _ = model(part)
            middle_s = _now_s(device)
            loss.backward()
            forward_ms += (middle_s - start_s) * 1e3
            backward_ms += (_now_s(device) - middle_s) * 1e3
        times_ms.append([forward_ms, backward_ms])
    for rows in given:
        rows.forget()
    typical = [median(of) for of in zip(*times_ms[_WARMUP_STEPS:])]
    slowest = torch.tensor(typical, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    forward_ms, backward_ms = slowest.tolist()
    return forward_ms, backward_ms


class _GivenRows(nn.Module):
    """Stands for tables: gives the same rows for every batch, and takes their gradients."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._rows: dict[tuple[str, int], Tensor] = {}  # no parameters, which ranks would sum

    def forget_gradients(self) -> None:
        """Lets go of what backward gave."""
        for rows in self._rows.values():
            rows.grad = None

    def forget(self) -> None:
        """Lets go of the rows."""
        self._rows = {}

    def _given(self, name: str, num_rows: int, dim: int) -> Tensor:
        place = name, num_rows
        if place not in self._rows:
            self._rows[place] = torch.rand(num_rows, dim, device=self._device).requires_grad_()
        return self._rows[place]


class _GivenBags(_GivenRows):
    """For a pooled collection."""

    def __init__(self, collection: EmbeddingBagCollection, device: torch.device) -> None:
        super().__init__(device)
        configs = collection.embedding_bag_configs()
        self._keys = [name for config in configs for name in config.feature_names]
        self._dims = [config.embedding_dim for config in configs for _ in config.feature_names]

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """All bags side by side, as a sharded collection gives them."""
        values = self._given("all", features.stride(), sum(self._dims))
        return KeyedTensor(keys=self._keys, length_per_key=self._dims, values=values)


class _GivenSequences(_GivenRows):
    """For a collection of sequences."""

    def __init__(self, collection: EmbeddingCollection, device: torch.device) -> None:
        super().__init__(device)
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
                values=self._given(name, of.values().numel(), self._dims[name]),
                lengths=of.lengths(),
            )
            for name, of in bags.items()
        }


_STANDS_FOR: dict[type[nn.Module], Callable[..., _GivenRows]] = {
    EmbeddingBagCollection: _GivenBags,
    EmbeddingCollection: _GivenSequences,
}


def _give_rows(model: nn.Module, device: torch.device) -> list[_GivenRows]:
    """Puts given rows in the place of every collection of tables."""
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) in _STANDS_FOR
    ]
    given = [_STANDS_FOR[type(child)](child, device) for _, _, child in found]
    for (parent, name, _), rows in zip(found, given):
        setattr(parent, name, rows)
    return given


def _now_s(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
