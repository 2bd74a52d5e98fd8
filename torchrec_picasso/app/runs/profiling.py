"""A picture of some steps of a run, once its pipeline has found its setting.

A profile ends where no batch is in flight, since gloo may not survive a message that outlives the
profile it began in. So a stretch of steps ends with it, as at a checkpoint, which changes no
result: the next stretch begins with an empty pipeline. What the picture knows, and that on an
accelerator its times are the host's, is told in :mod:`torchrec_picasso.app.timeline.timeline`.
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

__all__ = ["ProfileRequest", "StepProfiler", "Stretch", "check_profile", "steps_at_once"]

_AROUND = 3
"""Steps that are profiled but not drawn: one before, whose exchanges reach into the first drawn
one, and two after, which lack batches behind them."""
_MOST_RANKS = 4
"""Ranks in the picture."""


@dataclass(frozen=True)
class ProfileRequest:
    """Steps to draw, and the picture's file, whose name says the format."""

    num_steps: int
    path: str


def check_profile(config: TrainConfig, num_steps: int, path: str | None) -> ProfileRequest:
    """What is to be drawn, if it can be.

    Args:
        config: The run.
        num_steps: Steps to draw.
        path: The picture's file; ``None`` = beside the folder of the checkpoints, or here.

    Raises:
        ConfigError: If the pipeline has no timeline, no stretch of the run is long enough, or the
            file cannot be written.
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
    folder = config.checkpoint.folder
    if find_spec("matplotlib") is None:
        raise PicassoError("--profile needs the package matplotlib; pip install matplotlib")
    if path is None:
        path = "timeline.svg" if folder is None else f"{folder.rstrip('/')}.timeline.svg"
    else:
        _check_file(Path(path))
    return ProfileRequest(num_steps, path)


def steps_at_once(config: TrainConfig, step: int) -> int:
    """Steps until the pipeline is drained, so that no batch is in flight at a checkpoint."""
    if config.checkpoint.folder is None:
        return config.steps - step
    until_checkpoint = config.checkpoint.every_steps - step % config.checkpoint.every_steps
    return min(until_checkpoint, config.steps - step)


class Stretch(Iterator[Batch]):
    """The batches of some steps in a row, whose end may come nearer while they are read.

    Args:
        batches: Where they come from.
        start: Steps trained before.
        end: Steps trained once all are.
    """

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
        """Ends after that many steps, of which the pipeline may have read some already."""
        assert self._num_read <= step <= self.end, (self._num_read, step, self.end)
        self.end = step


class StepProfiler:
    """Profiles steps of a run once, and draws them; does nothing without a request.

    Begins when the setting is settled, or so that it just fits before the run ends.

    Args:
        request: What to draw.
        config: The run.
        first_step: Steps trained before it.
        pipeline: What trains.
        before: Called on all ranks before a profile begins; ends what else sends messages.

    Raises:
        ConfigError: If no stretch of what is left of the run is long enough.
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
        self._num_settled = 0  # steps taken since the setting was found
        self._profile: Any = None
        if request is not None:
            self._last_start = _last_start(config, first_step, request.num_steps)

    def after_step(self, step: int, stretch: Stretch) -> None:
        """Begins to profile, if it is time to. Collective.

        Args:
            step: Steps trained.
            stretch: What the pipeline reads; ends with the profile.
        """
        if self._request is None or self._profile is not None:
            return
        end = step + self._request.num_steps + _AROUND
        # the batches in flight when it was found have settings of before
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
        """Ends the profile and draws it, if there is one. Collective.

        Returns:
            What was drawn, in words.
        """
        if self._request is None or self._profile is None:
            return None
        self._profile.stop()
        whole = _renumbered(Timeline.from_profile(self._profile), self._first_step + 1)
        drawn = whole.steps[1 : 1 + self._request.num_steps]
        timeline = whole.of_steps(*drawn)
        timelines: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(timelines, timeline if dist.get_rank() < _MOST_RANKS else None)
        path = Path(self._request.path)
        self._request = None
        if dist.get_rank() == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
            draw_timeline({f"rank {of.rank}": of for of in timelines if of is not None}, path)
        return f"steps {drawn[0]} to {drawn[-1]}: timeline in {path}"


def _last_start(config: TrainConfig, first_step: int, num_steps: int) -> int:
    """The latest step after which a profile can begin; never before the first of a stretch."""
    step, needed, longest, found = first_step, 1 + num_steps + _AROUND, 0, None
    while step < config.steps:
        length = steps_at_once(config, step)
        longest = max(longest, length)
        step += length
        if length >= needed:
            found = step - needed + 1
    if found is None:
        raise ConfigError(
            f"--profile {num_steps}: that takes {needed} steps in a row without a checkpoint, and "
            f"this run has {longest}; draw fewer, or raise steps or checkpoint.every_steps"
        )
    return found


def _check_file(path: Path) -> None:
    """Refuses a picture that could not be written."""
    from matplotlib.figure import Figure  # here, because only a picture needs it; slow to import

    if not path.parent.is_dir():
        raise ConfigError(
            f"--profile-out {path}: there is no folder {path.parent}; make it or name another"
        )
    known = Figure().canvas.get_supported_filetypes()
    if path.suffix.removeprefix(".") not in known:
        raise ConfigError(
            f"--profile-out {path}: expected a name that ends in one of {', '.join(known)}"
        )


def _renumbered(timeline: Timeline, by: int) -> Timeline:
    """Steps counted as the run counts those trained, not as its pipeline does."""
    spans = tuple(replace(span, step=span.step + by) for span in timeline.spans)
    return replace(timeline, spans=spans)
