"""Times a model's dense part with random embeddings, for the batch and for micro-batches.

All ranks measure at the same time, so ranks that share cores slow each other as in training.
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
from torchrec_picasso.cost.local import DenseTimes

_WARMUP_STEPS, _FEWEST_STEPS, _LEAST_S = 2, 7, 0.3
"""A small dense part takes 1 ms, and the speed of a shared core changes within seconds."""
_NUM_PARTS, _FEWEST_SAMPLES = (1, 4, 16), 64
"""Numbers of micro-batches that are measured, and the samples that each must have."""


def measure_dense(config: TrainConfig, device: torch.device) -> DenseTimes:
    """:func:`measure_dense_of` for the model of a configuration and one of its batches."""
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
    """Times the dense part of a model on a batch; all ranks return the times of the slowest.

    Collective: every rank of the default process group calls this, in the same order.

    Args:
        model: Unsharded model, tables on any device; its forward takes a batch and returns the loss
            first. Its tables are replaced.
        batch: This rank's batch.
        batch_size: Samples of the batch.
        device: Device, CPU if ``None``.
    """
    device = device or torch.device("cpu")
    stand_ins = _replace_tables(model, device)
    model.to(device)
    batch = batch.to(device)
    measured = [
        (num_parts, *_time_parts(model, stand_ins, batch, batch_size, num_parts, device))
        for num_parts in _NUM_PARTS
        if batch_size >= _FEWEST_SAMPLES * num_parts or num_parts == 1
    ]
    (_, forward_ms, backward_ms), *in_parts = measured
    return DenseTimes(
        forward_ms=forward_ms,
        backward_ms=backward_ms,
        parameter_bytes=sum(p.numel() * p.element_size() for p in model.parameters()),
        batch_size=batch_size,
        in_parts=tuple(in_parts),
    )


def _time_parts(
    model: nn.Module,
    stand_ins: Sequence[_RandomRows],
    batch: Batch,
    batch_size: int,
    num_parts: int,
    device: torch.device,
) -> tuple[float, float]:
    """Forward and backward ms of a batch in ``num_parts`` equal micro-batches. Collective."""
    size, rest = divmod(batch_size, num_parts)
    parts = split_batch(batch, [size + (index < rest) for index in range(num_parts)])
    times_ms: list[list[float]] = []
    end_s = time.perf_counter() + _LEAST_S
    while len(times_ms) < _WARMUP_STEPS + _FEWEST_STEPS or time.perf_counter() < end_s:
        model.zero_grad()
        forward_ms = backward_ms = 0.0
        for part in parts:
            for stand_in in stand_ins:
                stand_in.zero_gradients()
            start_s = _now_s(device)
            loss, _ = model(part)
            middle_s = _now_s(device)
            loss.backward()
            forward_ms += (middle_s - start_s) * 1e3
            backward_ms += (_now_s(device) - middle_s) * 1e3
        times_ms.append([forward_ms, backward_ms])
    for stand_in in stand_ins:
        stand_in.rows.clear()
    medians = [median(phase_ms) for phase_ms in zip(*times_ms[_WARMUP_STEPS:])]
    slowest = torch.tensor(medians, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    forward_ms, backward_ms = slowest.tolist()
    return forward_ms, backward_ms


class _RandomRows(nn.Module):
    """Replaces tables: returns the same random rows for every batch, and takes their gradients."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self.rows: dict[tuple[str, int], Tensor] = {}  # no parameters: those would count as dense

    def zero_gradients(self) -> None:
        """Deletes the gradients of the rows."""
        for rows in self.rows.values():
            rows.grad = None

    def _get(self, name: str, num_rows: int, dim: int) -> Tensor:
        key = name, num_rows
        if key not in self.rows:
            self.rows[key] = torch.rand(num_rows, dim, device=self._device).requires_grad_()
        return self.rows[key]


class _RandomBags(_RandomRows):
    """For an EmbeddingBagCollection."""

    def __init__(self, collection: EmbeddingBagCollection, device: torch.device) -> None:
        super().__init__(device)
        configs = collection.embedding_bag_configs()
        self._keys = [name for config in configs for name in config.feature_names]
        self._dims = [config.embedding_dim for config in configs for _ in config.feature_names]

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Pooled embeddings of all features."""
        values = self._get("all", features.stride(), sum(self._dims))
        return KeyedTensor(keys=self._keys, length_per_key=self._dims, values=values)


class _RandomSequences(_RandomRows):
    """For an EmbeddingCollection."""

    def __init__(self, collection: EmbeddingCollection, device: torch.device) -> None:
        super().__init__(device)
        self._dims = {
            name: config.embedding_dim
            for config in collection.embedding_configs()
            for name in config.feature_names
        }

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """One row per id."""
        return {
            name: JaggedTensor(
                values=self._get(name, features[name].values().numel(), dim),
                lengths=features[name].lengths(),
            )
            for name, dim in self._dims.items()
        }


_STAND_INS: dict[type[nn.Module], Callable[..., _RandomRows]] = {
    EmbeddingBagCollection: _RandomBags,
    EmbeddingCollection: _RandomSequences,
}


def _replace_tables(model: nn.Module, device: torch.device) -> list[_RandomRows]:
    """Replaces every embedding collection by random rows."""
    collections = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) in _STAND_INS
    ]
    stand_ins = []
    for parent, name, child in collections:
        stand_ins.append(_STAND_INS[type(child)](child, device))
        setattr(parent, name, stand_ins[-1])
    return stand_ins


def _now_s(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
