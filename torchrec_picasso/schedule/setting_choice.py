"""The setting of each batch, chosen by timing settings on the first training steps.

Every setting trains the same model, so autotuning costs no step: the first steps simply run with
one setting after another. A step lasts as long as on its slowest rank, so ranks compare the same
times and choose the same setting. Times are measured, so another run may choose differently; set
the numbers explicitly to repeat a run bit for bit.

A step's time is noisy: the same step takes 10 to 15 % more or less on a shared machine, for some
steps on end. So all settings run in rounds, and only the fastest stay for the next round, as in
successive halving: a few slower steps cost less than a wrong choice for the rest of the run. The
number of micro-batches that the plan was priced for begins, and stays unless another one is clearly
faster. Lookahead is switched off for whole batches only: with more micro-batches, no lookahead was
never faster by more than 3 % in alternating runs. The first step of a run does not count: after one
with more micro-batches it took 7 % less than the later ones.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

from torchrec_picasso.schedule.schedule import Setting

_log = logging.getLogger(__name__)

NUM_MICRO_BATCHES = (1, 2, 4, 8, 16)
"""Numbers of micro-batches that are tried and priced."""
_FEWEST_SAMPLES = 64
"""Smaller micro-batches keep no core busy for longer than their operators take to start."""

_WARM_UP = 6
"""Batches of the first setting before the first round."""
_ROUNDS = ((5, 1.3, 4), (6, 1.15, 2), (6, 1.0, 1))
"""Consecutive batches of each setting in a round, and the settings that stay after it: those whose
times are within a factor of the fastest, and at most a number of them."""
_FASTER = 0.97
"""Factor of the first setting's time that another setting must beat to be chosen."""

NUM_STEPS = 72
"""Maximum number of steps of a trial: a warm-up, six settings, four, two. The last two steps of an
iterator of batches are none of them."""


def pieces_for(num_samples: int) -> tuple[int, ...]:
    """Returns the numbers of micro-batches that may be fastest, ascending. ``num_samples`` are
    those of the largest batch of a rank."""
    return tuple(k for k in NUM_MICRO_BATCHES if k == 1 or num_samples >= _FEWEST_SAMPLES * k)


@dataclass(frozen=True, kw_only=True)
class TimedStep:
    """A step that counts.

    Args:
        setting: Setting of its batch.
        num_samples: Samples of this rank's batch.
        span: The clock's timestamps of its start and end.
    """

    setting: Setting
    num_samples: int
    span: tuple[Any, Any]


class StepClock:
    """Times steps without blocking the device that runs them.

    On the CPU a step has ended when its call returns. On a device the host runs ahead: reading the
    time at every step would wait for the device, and a different setting would win. So events are
    recorded on the stream, and read after a run of several steps.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._end: Any = None
        """Timestamp of the end of the step before."""

    def end_step(self) -> tuple[Any, Any] | None:
        """Returns the timestamps of a step's start and end; ``None`` if it follows no step."""
        # A step lasts from the end of the step before: rows arrive between steps, too, above all
        # while ranks compare the times of a run, and the next step would seem short.
        start, self._end = self._end, self.stamp()
        return None if start is None else (start, self._end)

    def forget_step(self) -> None:
        """Lets the next step follow none: its rows may have travelled before it."""
        self._end = None

    def stamp(self) -> Any:
        """Returns a timestamp of the current moment on the host (CPU) or the current stream."""
        if self._device.type == "cpu":
            return perf_counter()
        event = torch.Event(self._device, enable_timing=True)
        event.record(torch.get_device_module(self._device).current_stream())
        return event

    def read(self, steps: Sequence[TimedStep], pg: dist.ProcessGroup) -> list[tuple[float, float]]:
        """Returns of each step its seconds on the slowest rank and the samples of the largest
        batch, and waits for the last step. Collective. All ranks get equal numbers."""
        spans = [step.span for step in steps]
        if self._device.type == "cpu":
            times = [end - start for start, end in spans]
        else:
            # spans ascend in time, so all earlier events are complete as well
            spans[-1][1].synchronize()
            times = [start.elapsed_time(end) / 1e3 for start, end in spans]
        most_2S = torch.tensor([times, [float(step.num_samples) for step in steps]])
        if pg.size() > 1:
            most_2S = most_2S.to(self._device)
            dist.all_reduce(most_2S, dist.ReduceOp.MAX, group=pg)
        times_S, samples_S = most_2S.tolist()
        return list(zip(times_S, samples_S))


def candidates(
    num_micro_batches: int | None,
    lookahead: bool | None,
    num_samples: int | None = None,
    is_interleaved: bool = True,
) -> list[Setting]:
    """Returns the allowed settings, simplest first; ``None`` = all values that may be fastest.

    ``num_samples`` are those of the largest batch of a rank, equal on all ranks. If no module is
    interleaved, there is nothing to hide, and whole batches with lookahead are fastest.
    """
    numbers: Sequence[int] = [num_micro_batches] if num_micro_batches else NUM_MICRO_BATCHES
    worthwhile = numbers if num_samples is None else pieces_for(num_samples)
    worthwhile = worthwhile if is_interleaved else [1]
    numbers = [k for k in numbers if k in worthwhile] or numbers
    if lookahead is not None:
        return [Setting(k, lookahead) for k in numbers]
    # lookahead is switched off for whole batches only, see above
    found = [Setting(k, True) for k in numbers]
    found += [Setting(k, False) for k in numbers if k == 1 and is_interleaved]
    return sorted(found, key=lambda setting: setting.num_micro_batches)


class SettingChoice:
    """Assigns a setting to every batch, and finally the fastest one.

    A step counts for a setting if its batch, the batch before and the next batch have that setting;
    the operations of the batch after that are small. So three of five batches count, four of six
    (one less of a round's last setting, before the round is decided), and six of the first setting,
    which follow its warm-up. Steps are compared by their time per sample, as batches differ. The
    time of a setting is the lower quartile of its steps, of three the fastest: those held up by
    others are slower.

    Args:
        allowed: The candidates, the simplest first.
        first: Micro-batches that the trial starts with, if allowed, or else with 2.
        known: The setting of an earlier run, see :meth:`settle_on`.
    """

    def __init__(
        self, allowed: Sequence[Setting], first: int | None = None, known: Setting | None = None
    ) -> None:
        self.allowed = list(allowed)
        """The candidates."""
        numbers = sorted({setting.num_micro_batches for setting in allowed})
        number = first if first in numbers else numbers[:2][-1]
        self._first = Setting(number, any(each.lookahead for each in allowed))
        self._steps_s: dict[Setting, list[float]] = {setting: [] for setting in allowed}
        """Seconds per sample of the steps that counted."""
        self._most_samples = 1.0
        self._rivals = sorted(allowed, key=lambda setting: setting != self._first)
        self._before: Setting | None = None
        self._runs = self._rounds()
        self._run: list[TimedStep] = []
        self._known: Setting | None = None
        self.current = self.allowed[0]
        """The setting of the next batch."""
        self.is_settled = len(self.allowed) == 1
        """Whether all further batches have the current setting."""
        self.settle_on(known)
        if not self.is_settled:
            self._start_run()

    def __str__(self) -> str:
        if not self.is_settled:
            return f"{self.current}; trying {len(self.allowed)} settings"
        found = [setting for setting in self.allowed if self._steps_s[setting]]
        if not found or self._known is not None:
            known = ", as an earlier run chose" if self.current == self._known else ""
            return f"{self.current}{known}"
        scale = 1e3 * self._most_samples
        times = ", ".join(f"{each}: {scale * self._time_s(each):.0f} ms" for each in found)
        return f"{self.current}; the fastest of {times}"

    @property
    def chosen(self) -> Setting | None:
        """The setting of all further batches; ``None`` before it is chosen, or if a trial ended in
        which no step counted."""
        is_found = len(self.allowed) == 1 or self.current == self._known
        is_found |= bool(self._steps_s[self.current])
        return self.current if self.is_settled and is_found else None

    def settle_on(self, setting: Setting | None) -> None:
        """Adopts the setting of an earlier run, if it is a candidate, without a trial."""
        if setting is not None and setting in self.allowed:
            self.current = self._known = setting
            self.is_settled = True

    def note_step(
        self,
        settings: Sequence[Setting],
        span: tuple[Any, Any] | None,
        num_samples: int,
        clock: StepClock,
        pg: dist.ProcessGroup,
    ) -> None:
        """Records a step on batches with these settings. Collective at the end of a run.

        ``span`` are the clock's timestamps at the beginning and the end of the step; ``None``, on
        all ranks = the step does not count. ``num_samples`` are those of this rank's batch.
        """
        if self.is_settled:
            return
        if span is not None and {self._before, *settings[:2]} == {settings[0]}:
            self._run.append(TimedStep(setting=settings[0], num_samples=num_samples, span=span))
        self._before = settings[0]
        self._batches_left -= 1
        if self._batches_left:
            return
        if self._run:
            # all ranks compare the same times
            for step, (time_s, num) in zip(self._run, clock.read(self._run, pg)):
                # in-flight batches from before the trial may have another setting
                if step.setting in self._steps_s and num:
                    self._steps_s[step.setting].append(time_s / num)
                    self._most_samples = max(self._most_samples, num)
            self._run = []
        self._start_run()

    def _start_run(self) -> None:
        run = next(self._runs, None)
        self.is_settled = run is None
        if run is None:
            self.current = self._rivals[0]
            _log.info("setting chosen: %s", self)
        else:
            self.current, self._batches_left = run

    def _rounds(self) -> Iterator[tuple[Setting, int]]:
        """Yields the runs of the trial: a setting, and the number of consecutive batches that have
        it. Afterwards the fastest setting is the only rival."""
        yield self._first, _WARM_UP
        for steps_s in self._steps_s.values():
            steps_s.clear()
        for num_batches, factor, most in _ROUNDS:
            for setting in self._rivals:
                yield setting, num_batches
            ranked = sorted(self._rivals, key=self._compared_s)
            limit_s = factor * self._compared_s(ranked[0])
            self._rivals = [each for each in ranked[:most] if self._compared_s(each) <= limit_s]
            if len(self._rivals) == 1:
                return

    def _compared_s(self, setting: Setting) -> float:
        """Returns a time, less for the first setting: it stays unless one is clearly faster."""
        return self._time_s(setting) * (_FASTER if setting == self._first else 1.0)

    def _time_s(self, setting: Setting) -> float:
        """Returns the lower quartile per sample of the steps that counted; of none, inf."""
        steps_s = sorted(self._steps_s[setting])
        return steps_s[len(steps_s) // 4] if steps_s else math.inf
