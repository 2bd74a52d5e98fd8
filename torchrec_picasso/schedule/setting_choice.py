"""The setting of each batch, chosen by timing settings on the first training steps.

Every setting trains the same model, so autotuning costs no step: the first steps simply run with
one setting after another (:mod:`.setting_trial`). A step lasts as long as on its slowest rank, so
ranks compare the same times and choose the same setting. Times are measured, so another run may
choose differently; set the numbers explicitly to repeat a run bit for bit.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

from torchrec_picasso.schedule.schedule import Setting
from torchrec_picasso.schedule.setting_trial import Trial

__all__ = ["NUM_MICRO_BATCHES", "SettingChoice", "StepClock", "candidates", "pieces_for"]

_log = logging.getLogger(__name__)

NUM_MICRO_BATCHES = (1, 2, 4, 8, 16)
"""Numbers of micro-batches that are tried and priced."""
_FEWEST_SAMPLES = 64
"""Smaller micro-batches keep no core busy for longer than their operators take to start."""


def pieces_for(num_samples: int) -> tuple[int, ...]:
    """Returns the numbers of micro-batches that may be fastest, ascending.

    ``num_samples`` are those of the largest batch of a rank.
    """
    return tuple(k for k in NUM_MICRO_BATCHES if k == 1 or num_samples >= _FEWEST_SAMPLES * k)


class StepClock:
    """Times steps without blocking the device that runs them.

    On the CPU a step has ended when its call returns. On a device the host runs ahead: reading the
    time at every step would wait for the device, and a different setting would win. So events are
    recorded on the stream, and read after a turn of several steps.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def stamp(self) -> Any:
        """Returns a timestamp of the current moment on the host (CPU) or the current stream."""
        if self._device.type == "cpu":
            return perf_counter()
        event = torch.Event(self._device, enable_timing=True)
        event.record(torch.get_device_module(self._device).current_stream())
        return event

    def seconds(self, spans: Sequence[tuple[Any, Any]]) -> list[float]:
        """Returns the seconds of each span, a pair of timestamps; waits for the last span."""
        if self._device.type == "cpu":
            return [end - start for start, end in spans]
        # Spans ascend in time, so all earlier events are complete as well.
        if spans:
            spans[-1][1].synchronize()
        return [start.elapsed_time(end) / 1e3 for start, end in spans]


def candidates(num_micro_batches: int | None, lookahead: bool | None) -> list[Setting]:
    """Returns the allowed settings, simplest first; ``None`` = all values that may be fastest."""
    numbers = NUM_MICRO_BATCHES if num_micro_batches is None else (num_micro_batches,)
    if lookahead is not None:
        return [Setting(k, lookahead) for k in numbers]
    # Lookahead is tried both ways for whole batches only, see setting_trial.py.
    return [Setting(k, ahead) for k in numbers for ahead in ((True, False) if k == 1 else (True,))]


class SettingChoice:
    """Assigns a setting to every batch, and finally the fastest one.

    A step counts for a setting if its batch and the next batch have that setting; the operations of
    the batch after that are small. The candidates are ``allowed``, the simplest first; the trial
    starts with ``first`` micro-batches, if that is a candidate.
    """

    def __init__(self, allowed: Sequence[Setting], first: int | None = None) -> None:
        self._allowed = list(allowed)
        self._first = first
        self._known: Setting | None = None
        self._start()

    def _start(self) -> None:
        self._trial = Trial(self._allowed, self._first)
        self._spans: list[tuple[Setting, tuple[Any, Any]]] = []
        # A setting of an earlier run, or a single candidate, needs no trial.
        known = [setting for setting in self._allowed if setting == self._known]
        self.current = (known or self._allowed)[0]
        """The setting of the next batch."""
        self.is_settled = bool(known) or len(self._allowed) == 1
        """Whether all further batches have the current setting."""
        if not self.is_settled:
            self._take_turn()

    def __str__(self) -> str:
        if not self.is_settled:
            return f"{self.current}; trying {len(self._allowed)} settings"
        if not self._trial.times_ms:
            known = ", as an earlier run chose" if self.current == self._known else ""
            return f"{self.current}{known}"
        times = ", ".join(f"{setting}: {ms:.0f} ms" for setting, ms in self._trial.times_ms.items())
        return f"{self.current}; the fastest of {times}"

    def settle_on(self, setting: Setting | None) -> None:
        """Adopts the setting of an earlier run, if it is a candidate, without a trial."""
        if setting in self._allowed:
            self._known = setting
            self._start()

    def narrow(self, num_samples: int, is_interleaved: bool) -> None:
        """Removes candidates that cannot be fastest, unless none would be left.

        ``num_samples`` are those of the largest batch of a rank, equal on all ranks. If no module
        is interleaved, there is nothing to hide.
        """
        pieces = pieces_for(num_samples) if is_interleaved else (1,)
        remaining = [each for each in self._allowed if each.num_micro_batches in pieces]
        remaining = remaining if is_interleaved else remaining[:1]
        # Other candidates: the trial starts over.
        if remaining and remaining != self._allowed:
            self._allowed = remaining
            self._start()

    def note_step(
        self,
        settings: Sequence[Setting],
        span: tuple[Any, Any] | None,
        clock: StepClock,
        pg: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        """Records a step on batches with these settings. Collective at the end of a turn.

        ``span`` are the clock's timestamps at the beginning and the end of the step; ``None``, on
        all ranks = the step did other work than training.
        """
        if self.is_settled:
            return
        if span is not None and len(set(settings[:2])) == 1:
            self._spans.append((settings[0], span))
        self._batches_left -= 1
        if not self._batches_left:
            self._read_times(clock, pg, device)
            self._take_turn()

    def _read_times(self, clock: StepClock, pg: dist.ProcessGroup, device: torch.device) -> None:
        """Records the time of each step on its slowest rank. Collective."""
        if not self._spans:
            return
        times_s = torch.tensor(clock.seconds([span for _, span in self._spans]))
        # One maximum over ranks for all steps of the turn, so all ranks compare equal times.
        if pg.size() > 1:
            times_s = times_s.to(device)
            dist.all_reduce(times_s, dist.ReduceOp.MAX, group=pg)
        for (setting, _), time_s in zip(self._spans, times_s.tolist()):
            self._trial.note(setting, time_s)
        self._spans = []

    def _take_turn(self) -> None:
        turn = self._trial.next_turn()
        self.is_settled = turn is None
        if turn is None:
            self.current = self._trial.chosen
            _log.info("setting chosen: %s", self)
        else:
            self.current, self._batches_left = turn.setting, turn.num_batches
