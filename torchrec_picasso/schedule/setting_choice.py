"""How a batch is interleaved, chosen by trying on the first training steps.

Every setting trains the same model, so a trial costs no step: the first ones simply run under one
setting after another (:mod:`.setting_trial`). A step lasts as long as on its slowest rank, so ranks
compare the same times and choose alike. Times are measured, so another run may choose differently;
give the numbers to repeat a run bit for bit.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from torchrec_picasso.schedule.schedule import Setting
from torchrec_picasso.schedule.setting_trial import Trial

__all__ = ["Clock", "SettingChoice", "candidates", "pieces_for"]

_log = logging.getLogger(__name__)

_NUM_MICRO_BATCHES = (1, 2, 4, 8, 16)
_FEWEST_SAMPLES = 64
"""A smaller micro-batch keeps no core busy for longer than its operators take to start."""


def pieces_for(num_samples: int) -> tuple[int, ...]:
    """Numbers of micro-batches that may win, for batches of a size; the fewest first.

    Args:
        num_samples: Of the largest batch of a rank.
    """
    return tuple(k for k in _NUM_MICRO_BATCHES if k == 1 or num_samples >= _FEWEST_SAMPLES * k)


class Clock(Protocol):
    """What reads stamps; :class:`.step_clock.StepClock`."""

    def seconds(self, spans: Sequence[tuple[Any, Any]]) -> list[float]:
        """Seconds of each span."""


def candidates(num_micro_batches: int | None, lookahead: bool | None) -> list[Setting]:
    """The settings that are allowed, the plainest first; ``None`` = any that may win."""
    pieces = _NUM_MICRO_BATCHES if num_micro_batches is None else (num_micro_batches,)
    if lookahead is not None:
        return [Setting(k, lookahead) for k in pieces]
    return [Setting(k, look) for k in pieces for look in ((True, False) if k == 1 else (True,))]


class SettingChoice:
    """Gives every batch its setting, and settles on the fastest one.

    A step counts for a setting when its batch and the next have it: what belongs to the one after
    is small.

    Args:
        allowed: Candidates, the plainest first.
        first: Micro-batches to begin the trial with, if they are among the candidates.
    """

    def __init__(self, allowed: Sequence[Setting], first: int | None = None) -> None:
        self._allowed = list(allowed)
        self._first = first
        self._known: Setting | None = None
        self._start()

    def _start(self) -> None:
        self._trial = Trial(self._allowed, self._first)
        self._spans: list[tuple[Setting, tuple[Any, Any]]] = []
        known = [setting for setting in self._allowed if setting == self._known]
        self._current = (known or self._allowed)[0]
        self._is_settled = bool(known) or len(self._allowed) == 1
        if not self._is_settled:
            self._take_turn()

    @property
    def current(self) -> Setting:
        """The setting of the next batch."""
        return self._current

    @property
    def is_settled(self) -> bool:
        """Whether all further batches have the current setting."""
        return self._is_settled

    def __str__(self) -> str:
        if not self._is_settled:
            return f"{self._current}; trying {len(self._allowed)} settings"
        if not self._trial.times_ms:
            known = ", as an earlier run chose" if self._current == self._known else ""
            return f"{self._current}{known}"
        times = ", ".join(f"{setting}: {ms:.0f} ms" for setting, ms in self._trial.times_ms.items())
        return f"{self._current}; the fastest of {times}"

    def settle_on(self, setting: Setting | None) -> None:
        """Takes what an earlier run chose, and tries nothing.

        Args:
            setting: ``None``, or one that is not a candidate, changes nothing.
        """
        if setting in self._allowed:
            self._known = setting
            self._start()

    def narrow(self, num_samples: int, is_interleaved: bool) -> None:
        """Leaves out what cannot win, unless it is the only candidate. Ranks give the same.

        Args:
            num_samples: Of the largest batch of a rank.
            is_interleaved: Whether any module is; else there is nothing to hide.
        """
        left = [
            setting
            for setting in self._allowed
            if setting.num_micro_batches == 1
            or (is_interleaved and num_samples >= _FEWEST_SAMPLES * setting.num_micro_batches)
        ]
        left = left if is_interleaved else left[:1]
        if left and left != self._allowed:
            self._allowed = left
            self._start()

    def note_step(
        self,
        settings: Sequence[Setting],
        span: tuple[Any, Any] | None,
        clock: Clock,
        pg: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        """Takes a training step's beginning and end. Collective where a turn ends.

        Args:
            settings: Of the batches that the step worked on.
            span: Stamps of ``clock``; ``None`` = the step had other work than training. The same on
                all ranks.
            clock: Reads them.
            pg: Process group.
            device: Where collectives of ``pg`` run.
        """
        if self._is_settled:
            return
        if span is not None and len(set(settings[:2])) == 1:
            self._spans.append((settings[0], span))
        self._batches_left -= 1
        if not self._batches_left:
            self._read_times(clock, pg, device)
            self._take_turn()

    def _read_times(self, clock: Clock, pg: dist.ProcessGroup, device: torch.device) -> None:
        """Notes how long steps took on their slowest ranks."""
        if not self._spans:
            return
        times_s = torch.tensor(clock.seconds([span for _, span in self._spans]))
        if pg.size() > 1:
            times_s = times_s.to(device)
            dist.all_reduce(times_s, dist.ReduceOp.MAX, group=pg)
        for (setting, _), time_s in zip(self._spans, times_s.tolist()):
            self._trial.note(setting, time_s)
        self._spans = []

    def _take_turn(self) -> None:
        turn = self._trial.next_turn()
        self._is_settled = turn is None
        if turn is None:
            self._current = self._trial.chosen
            _log.info("setting chosen: %s", self)
        else:
            self._current, self._batches_left = turn.setting, turn.num_batches
