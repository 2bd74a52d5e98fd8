"""The setting of each batch, chosen by timing settings on the first training steps.

Every setting trains the same model, so autotuning costs no step: the first steps simply run with
one setting after another. A step lasts as long as on its slowest rank, so ranks compare the same
times and choose the same setting. Times are measured, so another run may choose differently; set
the numbers explicitly to repeat a run bit for bit.

Step times over micro-batches K have one minimum: exposed communication shrinks like 1 / K, and
every micro-batch has a fixed cost. So the search begins with the number that the plan was priced
for, halves it while steps get faster, and, if that did not clearly help, doubles it in the same
way. Lookahead is switched off for whole batches only: with more micro-batches, no lookahead was
never faster by more than 3 % in alternating runs.

A few steps find the neighbourhood of the minimum only, and those of the first setting are still
warming up. So the two fastest settings run again if their times are near each other; the median of
these steps counts. The first step of a setting does not count: after one with more micro-batches it
took 7 % less than the later ones.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Iterator, Sequence
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

NUM_STEPS = 40
"""Maximum number of steps of a trial: a long warm-up, from 16 micro-batches to 1, no lookahead, and
the two fastest again."""

_FULL_RUN, _PROBE = 5, 4
"""Consecutive batches with one setting, in full or as a probe. At the end all but the last two are
trained, so one step of a probe counts, since the first does not. The others count later, except the
last, whose next batch has another setting."""
_LONGEST_WARMUP = 5
"""Maximum number of batches that the first run has beyond a probe."""
_WARMER = 0.9
"""The first run continues while a step is faster than this factor of the step before."""
_HOPELESS, _HELD_UP = 1.2, 2.0
"""A run ends with the probe if its time is between these factors of the best time. A larger time
indicates a disturbance, such as kernel compilation or memory allocation."""
_NEAR, _AGAIN = 1.08, 5
"""Settings whose times are within this factor run again, for so many consecutive batches."""
_LOST = 1.1
"""Factor of the whole-batch time above which no further numbers of micro-batches are tried."""
_FASTER = 0.97
"""Factor of the first setting's time that another setting must beat to be chosen."""


def pieces_for(num_samples: int) -> tuple[int, ...]:
    """Returns the numbers of micro-batches that may be fastest, ascending. ``num_samples`` are
    those of the largest batch of a rank."""
    return tuple(k for k in NUM_MICRO_BATCHES if k == 1 or num_samples >= _FEWEST_SAMPLES * k)


class StepClock:
    """Times steps without blocking the device that runs them.

    On the CPU a step has ended when its call returns. On a device the host runs ahead: reading the
    time at every step would wait for the device, and a different setting would win. So events are
    recorded on the stream, and read after a run of several steps.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._start: Any = None
        self._end: Any = None

    def start_step(self) -> None:
        """Notes the start of a step, before operations that wait for other ranks."""
        self._start = self.stamp()

    def end_step(self) -> tuple[Any, Any]:
        """Returns the timestamps of a step's start and end."""
        # A step lasts from the end of the step before: rows arrive between steps, too, above all
        # while ranks compare the times of a run, and the next step would seem short.
        start = self._start if self._end is None else self._end
        self._end = self.stamp()
        return start, self._end

    def forget_step(self) -> None:
        """Lets the next step begin at its own start: it follows no training step."""
        self._end = None

    def stamp(self) -> Any:
        """Returns a timestamp of the current moment on the host (CPU) or the current stream."""
        if self._device.type == "cpu":
            return perf_counter()
        event = torch.Event(self._device, enable_timing=True)
        event.record(torch.get_device_module(self._device).current_stream())
        return event

    def seconds(self, spans: Sequence[tuple[Any, Any]], pg: dist.ProcessGroup) -> list[float]:
        """Returns the seconds of each span on its slowest rank, and waits for the last. Collective.
        A span is a pair of timestamps. All ranks get equal times."""
        if self._device.type == "cpu":
            times = [end - start for start, end in spans]
        else:
            # spans ascend in time, so all earlier events are complete as well
            spans[-1][1].synchronize()
            times = [start.elapsed_time(end) / 1e3 for start, end in spans]
        times_s = torch.tensor(times)
        if pg.size() > 1:
            times_s = times_s.to(self._device)
            dist.all_reduce(times_s, dist.ReduceOp.MAX, group=pg)
        return times_s.tolist()


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
    the operations of the batch after that are small. The time of a setting is that of its fastest
    step: steps of the warm-up and disturbed steps are slower. If the last two settings run again,
    it is the median of these steps.

    Args:
        allowed: The candidates, the simplest first.
        first: Micro-batches that the trial starts with, if allowed, or else with 2, after which
            whole batches are tried next.
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
        self._times_s = dict.fromkeys(allowed, math.inf)
        self._tried = self._rivals = [self._first]
        self._before: Setting | None = None
        self._last_steps_s: dict[Setting, list[float]] = {}
        self._runs = self._walk()
        self._spans: list[tuple[Setting, tuple[Any, Any]]] = []
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
        found = [setting for setting in self._tried if self._times_s[setting] < math.inf]
        if not found or self._known is not None:
            known = ", as an earlier run chose" if self.current == self._known else ""
            return f"{self.current}{known}"
        found.sort(key=lambda setting: (setting.num_micro_batches, not setting.lookahead))
        times = ", ".join(f"{each}: {1e3 * self._times_s[each]:.0f} ms" for each in found)
        return f"{self.current}; the fastest of {times}"

    def settle_on(self, setting: Setting | None) -> None:
        """Adopts the setting of an earlier run, if it is a candidate, without a trial."""
        if setting is not None and setting in self.allowed:
            self.current = self._known = setting
            self.is_settled = True

    def note_step(
        self,
        settings: Sequence[Setting],
        span: tuple[Any, Any] | None,
        clock: StepClock,
        pg: dist.ProcessGroup,
    ) -> None:
        """Records a step on batches with these settings. Collective at the end of a run.

        ``span`` are the clock's timestamps at the beginning and the end of the step; ``None``, on
        all ranks = the step did other work than training.
        """
        if self.is_settled:
            return
        if span is not None and {self._before, *settings[:2]} == {settings[0]}:
            self._spans.append((settings[0], span))
        self._before = settings[0]
        self._batches_left -= 1
        if self._batches_left:
            return
        if self._spans:
            # all ranks compare the same times
            times_s = clock.seconds([span for _, span in self._spans], pg)
            for (setting, _), time_s in zip(self._spans, times_s):
                # in-flight batches from before the trial count as well
                if setting in self._times_s:
                    self._times_s[setting] = min(time_s, self._times_s[setting])
                self._last_steps_s.setdefault(setting, []).append(time_s)
            self._spans = []
        self._start_run()

    def _start_run(self) -> None:
        run = next(self._runs, None)
        self.is_settled = run is None
        if run is None:
            self.current = self._fastest
            _log.info("setting chosen: %s", self)
        else:
            self.current, self._batches_left = run

    @property
    def _fastest(self) -> Setting:
        """The fastest setting so far; the first setting if no setting is clearly faster."""
        return min(self._rivals, key=self._compared_s)

    def _compared_s(self, setting: Setting) -> float:
        """Returns a time, less for the first setting: it stays unless one is clearly faster."""
        return self._times_s[setting] * (_FASTER if setting == self._first else 1.0)

    def _walk(self) -> Iterator[tuple[Setting, int]]:
        """Yields the runs of the trial: warm-up, fewer micro-batches, more, no lookahead, the two
        fastest again. A run is a setting and the number of consecutive batches that have it."""
        yield from self._warm_up()
        yield from self._go_on(0.5)
        # Doubling is tried only if no smaller number was clearly faster.
        if self._fastest == self._first:
            yield from self._go_on(2.0)
        if self._fastest.num_micro_batches == 1:
            yield from self._try(Setting(1, lookahead=False))
        yield from self._compare_again()

    def _warm_up(self) -> Iterator[tuple[Setting, int]]:
        """Yields runs of the first setting, until its steps get no faster."""
        yield self._first, _PROBE
        for _ in range(_LONGEST_WARMUP):
            before_s = self._times_s[self._first]
            yield self._first, 1
            if not self._times_s[self._first] < _WARMER * before_s < math.inf:
                break

    def _go_on(self, factor: float) -> Iterator[tuple[Setting, int]]:
        """Multiplies the number of micro-batches, from the first, while steps get faster."""
        last = self._first
        while True:
            number = int(factor * last.num_micro_batches)
            # more micro-batches cannot help if some were clearly slower than whole batches
            whole_s = self._times_s.get(Setting(1, last.lookahead), math.inf)
            if factor > 1 and any(self._times_s[s] > _LOST * whole_s for s in self._tried):
                return
            setting = Setting(number, last.lookahead)
            yield from self._try(setting)
            if not self._times_s.get(setting, math.inf) < self._times_s[last]:
                return
            last = setting

    def _try(self, setting: Setting) -> Iterator[tuple[Setting, int]]:
        if setting not in self._times_s or setting in self._tried:
            return
        self._tried.append(setting)
        yield setting, _PROBE
        slower = self._times_s[setting] / self._times_s[self._fastest]
        # Continue if the setting may still win, or if a disturbance dominates the measured time.
        if not _HOPELESS < slower < _HELD_UP:
            yield setting, _FULL_RUN - _PROBE

    def _compare_again(self) -> Iterator[tuple[Setting, int]]:
        """Yields longer runs of the two fastest settings, the second first, if their times are near
        each other; the medians of their steps become their times."""
        rivals = sorted(self._tried, key=self._compared_s)[:2]
        if self._times_s[rivals[-1]] > _NEAR * self._times_s[rivals[0]]:
            return
        self._rivals, self._last_steps_s = rivals, {}
        yield rivals[-1], _AGAIN
        yield rivals[0], _AGAIN + 1  # the last step does not count
        for setting in rivals:
            steps_s = self._last_steps_s.get(setting)  # none, if all did other work than training
            self._times_s[setting] = statistics.median(steps_s or [self._times_s[setting]])
