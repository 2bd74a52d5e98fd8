"""A placement under a pipeline on one device, and the batches that it trains on."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torchrec.datasets.utils import Batch
from torchrec.distributed.types import ShardingPlan

from benchmarks.gpu.settings import ModelSize
from torchrec_picasso import InterleavedTrainPipeline
from torchrec_picasso.app.config import DataConfig, ModelConfig, ShardingConfig, TrainConfig
from torchrec_picasso.app.runs.pipelines import sparse_dist
from torchrec_picasso.app.runs.trainer import MakePipeline, Trainer
from torchrec_picasso.app.zoo.data.source import BatchSource
from torchrec_picasso.app.zoo.registry import make_source

_ENDLESS = 1 << 40


def interleaved(num_micro_batches: int, lookahead: bool = True) -> MakePipeline:
    """Makes :class:`InterleavedTrainPipeline` with these arguments."""
    return lambda model, optimizer, device: InterleavedTrainPipeline(
        model, optimizer, device, num_micro_batches=num_micro_batches, lookahead=lookahead
    )


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Generated batches of one model size, in pinned memory where there is a GPU.

    From pinned memory a copy to the device really runs beside the host, so whoever uses a batch
    without waiting for its copy is found out.
    """

    config: TrainConfig
    source: BatchSource
    batches: Sequence[Batch]

    @staticmethod
    def make(size: ModelSize, num_batches: int, device: torch.device) -> Workload:
        """Makes the first ``num_batches`` batches."""
        config = TrainConfig(
            ranks=1,
            data=DataConfig(batch_size=size.batch_size, max_rows=size.max_rows, heldout_steps=2),
            model=ModelConfig(
                embedding_dim=size.dim, dense_layers=size.layers, over_layers=size.layers
            ),
        )
        source = make_source(config.data, config.seed)
        batches = list(itertools.islice(source.batches(0, 1), num_batches))
        if device.type == "cuda":
            batches = [batch.pin_memory() for batch in batches]
        return Workload(config=config, source=source, batches=batches)

    def trainer(
        self,
        device: torch.device,
        hot_rows: int | None,
        make_pipeline: MakePipeline | None = None,
        change_plan: Callable[[ShardingPlan], None] | None = None,
    ) -> Trainer:
        """A model ready to train."""
        config = TrainConfig(
            ranks=1,
            data=self.config.data,
            model=self.config.model,
            sharding=ShardingConfig(hot_rows=hot_rows or 0),
        )
        return Trainer(
            config,
            self.source,
            placement="table_wise" if hot_rows is None else "hot_cold",
            device=device,
            make_pipeline=make_pipeline or sparse_dist,
            change_plan=change_plan,
        )


class Variant:
    """A model that takes steps when it is told to, on batches that come again and again.

    Args:
        trainer: The model.
        batches: On the host.
    """

    def __init__(self, trainer: Trainer, batches: Sequence[Batch]) -> None:
        self._steps: Iterator[Tensor] = trainer.steps(itertools.cycle(batches), _ENDLESS)

    def train(self, num_steps: int) -> None:
        """Takes steps; does not wait for the device."""
        for _ in range(num_steps):
            next(self._steps)


def held_hbm_bytes(device: torch.device) -> int:
    """Bytes of device memory in tensors; managed memory of UVM tables is not among them."""
    if device.type != "cuda":
        return 0
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()
