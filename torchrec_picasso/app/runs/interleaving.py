"""Interleaved training against the plain loop on the same batches, and a look at its steps.

Every run starts from equal weights. Whole tables are put together on every rank, so that runs
compare however their rows are placed; that suits models of a few million weights.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torchrec.datasets.utils import Batch
from torchrec.distributed.types import ShardedTensor

from torchrec_picasso.app.config import TrainConfig
from torchrec_picasso.app.launch.quiet import quiet_upstream
from torchrec_picasso.app.runs.trainer import Trainer
from torchrec_picasso.app.timeline.timeline import Timeline
from torchrec_picasso.app.zoo.registry import make_source
from torchrec_picasso.schedule.schedule import Setting
from torchrec_picasso.train_pipeline.interleaved import InterleavedTrainPipeline

__all__ = ["Exactness", "compare_with_plain", "trace_steps"]

_WARMUP_STEPS = 3


@dataclass(frozen=True, kw_only=True)
class Exactness:
    """How far a run is from the plain loop.

    Args:
        losses: Of every global batch.
        loss_difference: Largest relative one of a step.
        weight_difference: Largest absolute one of any weight after the last step.
    """

    losses: list[float]
    loss_difference: float
    weight_difference: float


def compare_with_plain(
    rank: int, world_size: int, config: TrainConfig, settings: Sequence[Setting]
) -> dict[str, Exactness]:
    """Trains ``config.steps`` steps by the plain loop and by each setting. Collective.

    Args:
        rank: This rank.
        world_size: Ranks in the default process group.
        config: The run; its tables are hot/cold.
        settings: Interleaved runs.

    Returns:
        ``"plain loop"``, ``"plain loop, stock"`` (table-wise) and each setting by its name.
    """
    quiet_upstream()
    batches = list(_batches(config, rank, world_size, config.steps))
    plain = _plain_loop(config, batches, "hot_cold")
    runs = {"plain loop": plain, "plain loop, stock": _plain_loop(config, batches, "table_wise")}
    for setting in settings:
        trainer = _interleaved(config, setting)
        losses = trainer.mean_over_ranks(trainer.train(batches))
        runs[str(setting)] = (losses, _whole_weights(trainer))
    return {name: _exactness(run, plain) for name, run in runs.items()}


def trace_steps(
    rank: int, world_size: int, config: TrainConfig, setting: Setting, num_steps: int = 1
) -> Timeline:
    """Profiles steps of a running training. Collective.

    Args:
        rank: This rank.
        world_size: Ranks in the default process group.
        config: The run.
        setting: How it is interleaved.
        num_steps: Steps to show; one more on either side is profiled, so that the exchanges of
            those shown are seen whole.
    """
    quiet_upstream()
    trainer = _interleaved(config, setting)
    total = _WARMUP_STEPS + num_steps + 4  # the last step has no next batch
    steps = trainer.steps(_batches(config, rank, world_size, total))
    for _ in range(_WARMUP_STEPS):
        next(steps)
    dist.barrier()
    # to the end of data: gloo may not survive a message that outlives the profile it began in
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        for _ in steps:
            pass
    timeline = Timeline.from_profile(profiled, rank)
    return timeline.of_steps(*timeline.steps[1 : 1 + num_steps])


_Run = tuple[list[float], dict[str, Tensor]]


def _batches(config: TrainConfig, rank: int, world_size: int, num_steps: int) -> Iterator[Batch]:
    source = make_source(config.data, config.seed)
    return itertools.islice(source.batches(rank, world_size), num_steps)


def _interleaved(config: TrainConfig, setting: Setting) -> Trainer:
    return Trainer(
        config,
        make_source(config.data, config.seed),
        placement="hot_cold",
        make_pipeline=lambda model, optimizer, device: InterleavedTrainPipeline(
            model,
            optimizer,
            device,
            num_micro_batches=setting.num_micro_batches,
            lookahead=setting.lookahead,
        ),
    )


def _plain_loop(config: TrainConfig, batches: Sequence[Batch], placement: str) -> _Run:
    trainer = Trainer(config, make_source(config.data, config.seed), placement=placement)
    model, losses = trainer.model.train(), []
    for batch in batches:
        trainer.optimizer.zero_grad()
        loss, _ = model(batch)
        loss.backward()
        trainer.optimizer.step()
        losses.append(loss.detach())
    return trainer.mean_over_ranks(torch.stack(losses)), _whole_weights(trainer)


def _whole_weights(trainer: Trainer) -> dict[str, Tensor]:
    """Every weight of the model, tables put together. Collective."""
    whole = {}
    for name, value in trainer.model.state_dict().items():
        if isinstance(value, ShardedTensor):
            table = torch.zeros(value.metadata().size)
            for shard in value.local_shards():
                row, column = shard.metadata.shard_offsets
                num_rows, num_columns = shard.metadata.shard_sizes
                table[row : row + num_rows, column : column + num_columns] = shard.tensor
            dist.all_reduce(table)
            value = table
        whole[name] = value.detach().cpu().clone()
    return whole


def _exactness(run: _Run, plain: _Run) -> Exactness:
    (losses, weights), (plain_losses, plain_weights) = run, plain
    assert weights.keys() == plain_weights.keys()
    mine, its = (
        torch.cat([tensors[name].flatten() for name in weights])
        for tensors in (weights, plain_weights)
    )
    return Exactness(
        losses=losses,
        loss_difference=max(abs(a - b) / abs(b) for a, b in zip(losses, plain_losses)),
        weight_difference=float((mine - its).abs().max()),
    )
