"""The order of a trial over settings, and the fastest setting: a search in a few noisy steps.

Step times over micro-batches K have one minimum: exposed communication shrinks like 1 / K, and
every micro-batch has a fixed cost. So the search begins with the number that the plan was priced
for, halves it while steps get faster, and doubles it if halving did not help. A larger K is tried
only from the fastest K so far. Lookahead is switched off for whole batches only: with more
micro-batches, no lookahead was never faster by more than 3 % in alternating runs.

The time of a setting is that of its fastest step: steps of the warm-up and disturbed steps are
slower. This file contains only data and arithmetic: no clock, no ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torchrec_picasso.schedule.schedule import Setting

__all__ = ["NUM_STEPS", "Trial", "Turn"]

NUM_STEPS = 28
"""Maximum number of steps of a trial: a long warm-up, from 16 micro-batches to 1, no lookahead."""

_TURN, _GLANCE = 4, 3
"""Batches of a full turn and of a glance. At the end of a turn all but its last two batches are
trained, so one step of a glance counts. The other steps count later, except the last step, whose
next batch has another setting."""
_LONGEST_WARMUP = 5
"""Maximum number of batches that the first turn has beyond a glance."""
_WARMER = 0.9
"""The first turn continues while a step is faster than this factor of the step before."""
_HOPELESS, _HELD_UP = 1.2, 2.0
"""A turn ends with the glance if its time is between these factors of the best time. A larger time
indicates a disturbance, such as kernel compilation or memory allocation."""
_LOST = 1.1
"""Factor of the whole-batch time above which no further numbers of micro-batches are tried."""
_FASTER = 0.97
"""Factor of the first setting's time that another setting must beat to be chosen."""


@dataclass(frozen=True)
class Turn:
    """Consecutive batches with one setting."""

    setting: Setting
    num_batches: int


class Trial:
    """Generates turns, records times, and determines the fastest of the allowed settings.

    The trial starts with ``first`` micro-batches, if allowed, or else with 2, after which whole
    batches are tried next.
    """

    def __init__(self, allowed: Sequence[Setting], first: int | None = None) -> None:
        numbers = sorted({setting.num_micro_batches for setting in allowed})
        self._first = Setting(
            first if first in numbers else numbers[:2][-1],
            any(each.lookahead for each in allowed),
        )
        self._fastest_s = dict.fromkeys(allowed, math.inf)
        self._turned = [self._first]
        self._turns = self._walk()

    def next_turn(self) -> Turn | None:
        """Returns the next turn; ``None`` = the trial is over."""
        return next(self._turns, None)

    def note(self, setting: Setting, step_s: float) -> None:
        """Records the time of a step; in-flight batches from before the trial count as well."""
        if setting in self._fastest_s:
            self._fastest_s[setting] = min(step_s, self._fastest_s[setting])

    @property
    def chosen(self) -> Setting:
        """The fastest setting so far; the first setting if no setting is clearly faster."""
        fastest = min(self._turned, key=self._fastest_s.__getitem__)
        is_clear = self._fastest_s[fastest] < _FASTER * self._fastest_s[self._first]
        return fastest if is_clear else self._first

    @property
    def times_ms(self) -> dict[Setting, float]:
        """Times of the tried settings, in milliseconds, in order of micro-batches."""
        found = [setting for setting in self._turned if self._fastest_s[setting] < math.inf]
        found.sort(key=lambda setting: (setting.num_micro_batches, not setting.lookahead))
        return {setting: 1e3 * self._fastest_s[setting] for setting in found}

    def _walk(self) -> Iterator[Turn]:
        """Yields the turns of the trial: warm-up, fewer micro-batches, more, no lookahead."""
        yield from self._warm_up()
        yield from self._go_on(0.5)
        # Doubling is tried only if no smaller number was faster.
        if self.chosen == self._first:
            yield from self._go_on(2.0)
        if self.chosen.num_micro_batches == 1:
            yield from self._try(Setting(1, lookahead=False))

    def _warm_up(self) -> Iterator[Turn]:
        """Yields turns of the first setting, until its steps get no faster."""
        yield Turn(self._first, _GLANCE)
        for _ in range(_LONGEST_WARMUP):
            before_s = self._fastest_s[self._first]
            yield Turn(self._first, 1)
            if not self._fastest_s[self._first] < _WARMER * before_s < math.inf:
                break

    def _go_on(self, factor: float) -> Iterator[Turn]:
        """Multiplies the number of micro-batches while steps get faster."""
        before = None
        while before != self.chosen:
            before = self.chosen
            number = int(factor * before.num_micro_batches)
            # More micro-batches cannot help if some were slower than whole batches: try whole
            # batches.
            if factor > 1 and self._have_lost:
                number = 1
            yield from self._try(Setting(number, before.lookahead))

    @property
    def _have_lost(self) -> bool:
        """Whether any tried setting was clearly slower than whole batches."""
        whole_s = self._fastest_s.get(Setting(1, self._first.lookahead), math.inf)
        return any(self._fastest_s[setting] > _LOST * whole_s for setting in self._turned)

    def _try(self, setting: Setting) -> Iterator[Turn]:
        """Yields the turns of a setting that was not tried before."""
        if setting not in self._fastest_s or setting in self._turned:
            return
        self._turned.append(setting)
        yield Turn(setting, _GLANCE)
        slower = self._fastest_s[setting] / self._fastest_s[self.chosen]
        # Continue if the setting may still win, or if a disturbance dominates the measured time.
        if not _HOPELESS < slower < _HELD_UP:
            yield Turn(setting, _TURN - _GLANCE)
