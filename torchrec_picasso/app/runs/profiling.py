"""``train --profile``: draws some steps of a run once its pipeline has found its setting.

A profile must end without a batch in flight, since gloo may crash on a message that outlives its
profile. So the pipeline is drained there, as at a checkpoint, which changes no result.
:mod:`torchrec_picasso.app.timeline.timeline` describes the content of the picture.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile
from torchrec.datasets.utils import Batch
from torchrec.distributed.train_pipeline import TrainPipeline

from torchrec_picasso.app.config import TrainConfig
from torchrec_picasso.app.runs.pipelines import is_settled
from torchrec_picasso.app.timeline.picture import draw_timeline
from torchrec_picasso.app.timeline.timeline import Timeline
from torchrec_picasso.errors import ConfigError, PicassoError
from torchrec_picasso.schedule.schedule import NUM_BATCHES

_EXTRA_STEPS = 3
"""Steps that are profiled but not drawn: one before, whose exchanges extend into the first drawn
step, and two after, which lack further batches in flight."""
_MOST_RANKS = 4
"""Ranks in the picture."""


@dataclass(frozen=True)
class ProfileRequest:
    """Number of steps to draw, and the picture; its suffix determines the format."""

    num_steps: int
    path: str


def check_profile(config: TrainConfig, num_steps: int, path: str | None) -> ProfileRequest:
    """Checks the arguments of ``--profile``.

    Args:
        config: The run.
        num_steps: Steps to draw.
        path: Picture; ``None`` = beside the checkpoint folder, or in the current folder.

    Raises:
        ConfigError: If the pipeline has no timeline, or the run has too few steps between two
            checkpoints.
        PicassoError: If matplotlib is missing.
    """
    if num_steps < 1:
        raise ConfigError(f"--profile: expected at least 1 step, got {num_steps}")
    if config.pipeline.kind != "interleaved":
        raise ConfigError(
            f"--profile {num_steps}: only the interleaved pipeline's steps can be drawn, and "
            f"pipeline.kind is {config.pipeline.kind}; set it to interleaved, or remove --profile"
        )
    _last_start(config, 0, num_steps)
    if find_spec("matplotlib") is None:
        raise PicassoError("--profile needs the package matplotlib; pip install matplotlib")
    folder = config.checkpoint.folder
    default = "timeline.svg" if folder is None else f"{folder.rstrip('/')}.timeline.svg"
    return ProfileRequest(num_steps, path or default)


def steps_at_once(config: TrainConfig, step: int) -> int:
    """Steps until the pipeline is drained for a checkpoint, an evaluation or the end."""
    every = [config.data.window_steps or config.steps]
    if config.checkpoint.folder is not None:
        every.append(config.checkpoint.every_steps)
    return min(config.steps - step, *(one - step % one for one in every))


class Stretch(Iterator[Batch]):
    """The batches of steps ``start`` to ``end``; the end may move closer while they are read."""

    def __init__(self, batches: Iterator[Batch], start: int, end: int) -> None:
        self._batches = batches
        self._num_read = start
        self.end = end

    def __next__(self) -> Batch:
        if self._num_read >= self.end:
            raise StopIteration
        self._num_read += 1
        return next(self._batches)

    def end_at(self, step: int) -> None:
        """Moves the end; the pipeline may have read some batches before it already."""
        assert self._num_read <= step <= self.end, (self._num_read, step, self.end)
        self.end = step


class StepProfiler:
    """Profiles steps of a run once and draws them; does nothing without a request.

    Starts when the setting is found, at the latest such that the steps fit into the run.

    Args:
        request: Steps to draw.
        config: The run.
        first_step: Steps trained before.
        pipeline: The train pipeline.
        before: Called on all ranks before the profile; ends other communication.

    Raises:
        ConfigError: If the rest of the run has too few steps between two checkpoints.
    """

    def __init__(
        self,
        request: ProfileRequest | None,
        config: TrainConfig,
        first_step: int,
        pipeline: TrainPipeline,
        before: Callable[[], None],
    ) -> None:
        self._request = request
        self._first_step = first_step
        self._pipeline = pipeline
        self._before = before
        self._num_settled = 0  # steps since the setting was found
        self._profile: Any = None
        if request is not None:
            self._last_start = _last_start(config, first_step, request.num_steps)

    def after_step(self, step: int, stretch: Stretch) -> None:
        """Starts the profile after ``step`` trained steps, if it is time to. Collective."""
        if self._request is None or self._profile is not None:
            return
        end = step + self._request.num_steps + _EXTRA_STEPS
        # batches in flight when the setting was found still have other settings
        is_ready = self._num_settled >= NUM_BATCHES - 1
        self._num_settled += is_settled(self._pipeline)
        if end <= stretch.end and (is_ready or step == self._last_start):
            stretch.end_at(end)
            self._before()
            gc.collect()  # a full collection takes tenths of a second, of a step that is drawn
            dist.barrier()
            self._profile = profile(activities=[ProfilerActivity.CPU])
            self._profile.start()

    def after_stretch(self) -> str | None:
        """Ends the profile, if any, and draws it; returns a line about it. Collective."""
        if self._request is None or self._profile is None:
            return None
        self._profile.stop()
        whole = Timeline.from_profile(self._profile)
        timeline = whole.for_steps(*whole.steps[1 : 1 + self._request.num_steps])
        # the pipeline counts its own steps from 0, the picture those of the run from 1
        offset = self._first_step + 1
        spans = tuple(replace(span, step=span.step + offset) for span in timeline.spans)
        drawn = [step + offset for step in whole.steps[1 : 1 + self._request.num_steps]]
        timeline = replace(timeline, spans=spans)
        timelines: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(timelines, timeline if dist.get_rank() < _MOST_RANKS else None)
        path = Path(self._request.path)
        self._request = None
        if dist.get_rank() == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
            draw_timeline({f"rank {each.rank}": each for each in timelines if each}, path)
        return f"steps {drawn[0]} to {drawn[-1]}: timeline in {path}"


def _last_start(config: TrainConfig, first_step: int, num_steps: int) -> int:
    """The latest step after which a profile can start; not before the first step of a stretch."""
    step, needed, longest, last_start = first_step, 1 + num_steps + _EXTRA_STEPS, 0, None
    while step < config.steps:
        length = steps_at_once(config, step)
        longest = max(longest, length)
        step += length
        if length >= needed:
            last_start = step - needed + 1
    if last_start is None:
        raise ConfigError(
            f"--profile {num_steps}: that takes {needed} steps in a row without a checkpoint, and "
            f"this run has {longest}; draw fewer, or raise steps or checkpoint.every_steps"
        )
    return last_start
