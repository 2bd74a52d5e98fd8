"""A training run: training, checkpoints, resume, and the held-out AUC at the end.

Batches depend on the step alone, so a resumed run trains on the batches of an uninterrupted one.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torchrec.distributed.types import ShardingPlan

from torchrec_picasso.app.checkpoints.hot_rows import (
    adopt_hot_rows,
    read_hot_rows,
    read_uses,
    write_hot_rows,
    write_uses,
)
from torchrec_picasso.app.checkpoints.load import load_checkpoint, newest_undamaged
from torchrec_picasso.app.checkpoints.setting import read_setting, write_setting
from torchrec_picasso.app.checkpoints.writer import CheckpointWriter
from torchrec_picasso.app.config import TrainConfig
from torchrec_picasso.app.launch.progress import Progress
from torchrec_picasso.app.launch.quiet import quiet_upstream
from torchrec_picasso.app.runs.evaluate import areas_under_curves, evaluate
from torchrec_picasso.app.runs.pipelines import describe_pipeline, is_settled, pipeline_maker
from torchrec_picasso.app.runs.profiling import ProfileRequest, StepProfiler, Stretch, steps_at_once
from torchrec_picasso.app.runs.trainer import Trainer
from torchrec_picasso.app.runs.watching import RunWatch
from torchrec_picasso.app.zoo.data.source import BatchSource
from torchrec_picasso.app.zoo.registry import make_source
from torchrec_picasso.errors import ConfigError
from torchrec_picasso.exchange.peers import Peers


def train_on_rank(
    rank: int,
    world_size: int,
    config: TrainConfig,
    resume: bool,
    device: torch.device | None = None,
    profile: ProfileRequest | None = None,
) -> dict[str, Any]:
    """Runs the training. Collective: the main function of every rank.

    Args:
        rank: This rank; rank 0 prints.
        world_size: Ranks in the default process group.
        config: The run.
        resume: Whether to start from the newest complete checkpoint.
        device: Device, CPU if ``None``.
        profile: Steps to draw, if any.

    Returns:
        ``first_step``, the ``losses`` of the steps of this call, the ``auc`` of the first task on
        samples not trained on, the ``aucs`` of all, and those ``by_window``.

    Raises:
        PicassoError: If the input or the checkpoint cannot be used.
        PeerError: If another rank failed, with its message, or does not respond.
    """
    quiet_upstream()
    pg = dist.group.WORLD
    assert pg is not None, "init_process_group comes first"
    with Peers(pg).propagate_errors(lambda: "the run"):
        return _train(rank, world_size, config, resume, device, profile)


def _train(
    rank: int,
    world_size: int,
    config: TrainConfig,
    resume: bool,
    device: torch.device | None,
    profile: ProfileRequest | None,
) -> dict[str, Any]:
    source = make_source(config.data, config.seed)
    progress = Progress("train", config.steps, shown=rank == 0)
    folder = config.checkpoint.folder
    found = newest_undamaged(folder, progress.say) if resume and folder is not None else None
    watch = RunWatch(config.watch, config.data.batch_size * world_size)
    trainer = Trainer(
        config,
        source,
        device=device,
        make_pipeline=pipeline_maker(config.pipeline, watch.on_step),
        change_plan=_adopting(found, progress),
    )
    first_step = 0 if found is None else _resume(trainer, found, config, world_size, progress)
    progress.advance(first_step)
    writer = CheckpointWriter(config.checkpoint, progress.say)
    profiler = StepProfiler(profile, config, first_step, trainer.pipeline, writer.finish)
    batches = source.batches(rank, world_size, start_step=first_step)
    watch.begin(first_step)
    losses: list[float] = []
    by_window: dict[int, list[float]] = {}
    step, is_described = first_step, False
    while step < config.steps:
        stretch = Stretch(batches, step, step + steps_at_once(config, step))
        for loss in trainer.steps(stretch):
            step += 1
            losses += trainer.mean_over_ranks(loss.reshape(1))
            progress.advance()
            progress.tell(f"loss {losses[-1]:.5f}")
            if step % config.log_every == 0:
                progress.say(f"step {step} of {config.steps}: loss {losses[-1]:.5f}")
            if not is_described and (is_settled(trainer.pipeline) or step == config.steps):
                is_described = True
                summary = textwrap.indent(describe_pipeline(trainer.pipeline), "  ")
                progress.say(f"step {step}: pipeline\n{summary}")
            watch.after_step(step, losses[-1])
            profiler.after_step(step, stretch)
        if drawn := profiler.after_stretch():
            progress.say(drawn)
        is_due = step == config.steps or step % config.checkpoint.every_steps == 0
        if folder is not None and is_due:
            writer.save(step, trainer.state, _extra_writer(trainer, config, world_size))
        if step < config.steps and step % (config.data.window_steps or config.steps) == 0:
            by_window[step] = _evaluated(trainer, source, rank, config, progress)
    writer.finish()
    progress.close()
    aucs = by_window[step] = _evaluated(trainer, source, rank, config, progress)
    watch.end(step, aucs)
    on_others = {"auc": aucs[0], "aucs": aucs, "by_window": by_window}
    return {"first_step": first_step, "losses": losses, **on_others}


def _evaluated(
    trainer: Trainer, source: BatchSource, rank: int, config: TrainConfig, progress: Progress
) -> list[float]:
    """AUC of each task on samples not trained on. Collective."""
    labels_NT, scores_NT = evaluate(trainer, source, rank, config.data)
    aucs = areas_under_curves(labels_NT, scores_NT)
    shown = ", ".join(f"{auc:.5f}" for auc in aucs)
    which = "held-out samples" if config.data.window_steps is None else "samples of the next window"
    progress.say(f"AUC {shown} on {len(labels_NT)} {which}")
    return aucs


def _extra_writer(trainer: Trainer, config: TrainConfig, ranks: int) -> Callable[[Path], None]:
    """Collects hot set, access counts and tuned setting; returns their writer. Collective."""
    pipeline = trainer.interleaved
    if pipeline is None:
        return lambda path: None
    hot_rows, uses = pipeline.hot_rows(), pipeline.saved_uses()
    setting = None if config.pipeline.num_micro_batches else pipeline.setting

    def write(path: Path) -> None:
        write_hot_rows(path, hot_rows)
        if uses is not None:
            write_uses(path, uses)
        if setting is not None:
            write_setting(path, setting, ranks, config.data.batch_size)

    return write


def _adopting(found: Path | None, progress: Progress) -> Callable[[ShardingPlan], None] | None:
    """Returns a function that puts the hot rows of a checkpoint into the plan, if they fit."""
    hot_rows = None if found is None else read_hot_rows(found)
    if hot_rows is None:
        return None
    num_hot = sum(map(len, hot_rows.values()))

    def adopt(plan: ShardingPlan) -> None:
        if adopt_hot_rows(plan, hot_rows):
            progress.say(f"{num_hot} hot rows are those of {found}")
        else:
            progress.say(f"hot rows were chosen again: those of {found} are of another plan")

    return adopt


def _resume(
    trainer: Trainer, path: Path, config: TrainConfig, ranks: int, progress: Progress
) -> int:
    step = load_checkpoint(path, trainer.state(), trainer.load_state, is_checked=True)
    if step > config.steps:
        raise ConfigError(
            f"steps: {config.steps}, but {path} has trained {step} already; raise steps"
        )
    trainer.num_trained = step
    uses, setting = read_uses(path), read_setting(path, ranks, config.data.batch_size)
    pipeline = trainer.interleaved
    if pipeline is not None and uses is not None:
        pipeline.restore_uses(uses)
    if pipeline is not None and setting is not None:
        pipeline.settle_on(setting)
    progress.say(f"resumed from {path} at step {step}")
    return step
