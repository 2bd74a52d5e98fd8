"""One DIN-like model trained under any plan on clicks in time order, its exchange counted.

Every plan starts from equal weights and sees the same batches, so losses compare step by step.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torchrec.datasets.utils import Batch
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from torchrec_picasso.app.launch.quiet import quiet_upstream
from torchrec_picasso.app.zoo.click_model import ClickModel
from torchrec_picasso.app.zoo.data.clicks import Clicks
from torchrec_picasso.app.zoo.din import build_din
from torchrec_picasso.app.zoo.initial_tables import write_initial_tables
from torchrec_picasso.app.zoo.tables import tables_of
from torchrec_picasso.errors import InputError
from torchrec_picasso.exchange.meter import WireMeter
from torchrec_picasso.sharding.sharder import (
    HotColdEmbeddingBagCollectionSharder,
    HotColdEmbeddingCollectionSharder,
)
from torchrec_picasso.train_pipeline.interleaved import InterleavedTrainPipeline

__all__ = ["SequenceTask", "Trained", "train_plans"]

_TABLE_LR, _DENSE_LR = 0.1, 0.02


@dataclass(frozen=True, kw_only=True, eq=False)
class SequenceTask:
    """What is trained.

    Args:
        clicks: Samples in time order.
        batch_size: Samples per rank and step.
        heldout_steps: Global batches at the start that are counted and not trained on.
        steps: Global batches to train on, those that follow.
        sequence_dim: Columns of the tables of targets and histories.
        profile_dim: Columns of the other tables.
        seed: Draws first weights.

    Raises:
        InputError: When a batch is made, if there are fewer samples than all steps need.
    """

    clicks: Clicks
    batch_size: int
    heldout_steps: int
    steps: int
    sequence_dim: int = 16
    profile_dim: int = 8
    seed: int = 0

    def model(self) -> ClickModel:
        """The model before sharding, row-wise Adagrad fused into its tables."""
        train = build_din(self.clicks, self.sequence_dim, self.profile_dim, self.seed)
        tables = train.embeddings.parameters()
        apply_optimizer_in_backward(RowWiseAdagrad, tables, {"lr": _TABLE_LR})
        return train

    def heldout(self, world_size: int) -> Iterator[Batch]:
        """Batches of all ranks, to count lookups in."""
        return (
            self._batch(step, rank, world_size)
            for step in range(self.heldout_steps)
            for rank in range(world_size)
        )

    def training(self, rank: int, world_size: int) -> Iterator[Batch]:
        """One rank's batches."""
        steps = range(self.heldout_steps, self.heldout_steps + self.steps)
        return (self._batch(step, rank, world_size) for step in steps)

    def _batch(self, step: int, rank: int, world_size: int) -> Batch:
        first = (step * world_size + rank) * self.batch_size
        needed = (self.heldout_steps + self.steps) * world_size * self.batch_size
        if needed > len(self.clicks):
            raise InputError(
                f"the clicks make {len(self.clicks):,} samples, but {needed:,} are needed "
                "((heldout_steps + steps) x ranks x batch_size); give a longer log, or lower these"
            )
        return self.clicks.batch(np.arange(first, first + self.batch_size))


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What a training left behind.

    Args:
        losses: Of every global batch.
        sent_bytes: Bytes that this rank sent, per step.
        collectives: Calls that moved data, per step.
        summary: What the pipeline says of its modules; empty for TorchRec's own.
    """

    losses: list[float]
    sent_bytes: float
    collectives: float
    summary: str


def train_plans(
    rank: int,
    world_size: int,
    task: SequenceTask,
    plans: Mapping[str, ShardingPlan],
    num_micro_batches: Mapping[str, int],
) -> dict[str, Trained]:
    """Trains under one plan after the other. Collective: the main function of every rank.

    Args:
        rank: This rank.
        world_size: Ranks in the default process group.
        task: What is trained.
        plans: By name.
        num_micro_batches: Of the plans trained by ``InterleavedTrainPipeline`` and this package's
            sharders; the others take TorchRec's own.
    """
    quiet_upstream()
    batches = list(task.training(rank, world_size))
    return {
        name: _train(task, plan, num_micro_batches.get(name), batches)
        for name, plan in plans.items()
    }


def _train(
    task: SequenceTask, plan: ShardingPlan, num_micro_batches: int | None, batches: Sequence[Batch]
) -> Trained:
    pg = dist.group.WORLD
    assert pg is not None, "init_process_group comes first"
    sharders: list[Any] = [EmbeddingBagCollectionSharder(), EmbeddingCollectionSharder()]
    if num_micro_batches is not None:
        sharders = [HotColdEmbeddingBagCollectionSharder(), HotColdEmbeddingCollectionSharder()]
    device, unsharded = torch.device("cpu"), task.model()
    tables = tables_of(unsharded)
    model = DistributedModelParallel(
        module=unsharded,
        env=ShardingEnv.from_process_group(pg),
        device=device,
        plan=plan,
        sharders=sharders,
    )
    write_initial_tables(model, tables, task.seed)
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(model.named_parameters())),
        lambda parameters: torch.optim.Adagrad(parameters, lr=_DENSE_LR),
    )
    optimizer = CombinedOptimizer([model.fused_optimizer, dense])
    pipeline: Any = TrainPipelineSparseDist(model, optimizer, device)
    if num_micro_batches is not None:
        pipeline = InterleavedTrainPipeline(
            model, optimizer, device, num_micro_batches=num_micro_batches
        )
    model.train()
    losses, stream = [], iter(batches)
    with WireMeter() as meter:
        for _ in itertools.count():
            try:
                loss, _, _ = pipeline.progress(stream)
            except StopIteration:
                break
            losses.append(loss)
    total = torch.stack(losses).to(torch.float64)
    dist.all_reduce(total)
    return Trained(
        losses=[float(loss) / pg.size() for loss in total],
        sent_bytes=meter.count.sent_bytes / len(losses),
        collectives=meter.count.num_collectives / len(losses),
        summary=pipeline.summary() if num_micro_batches is not None else "",
    )
