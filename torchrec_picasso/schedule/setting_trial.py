"""Which setting to try next, and which is the fastest: a walk in a few noisy steps.

Step times over micro-batches K have one valley: what is exposed shrinks like 1 / K, and every
micro-batch costs something. So the walk begins with the number that a plan was priced for, halves
it as long as steps get faster, and doubles it where halving did not pay. A larger K is tried only
from the fastest so far. Lookahead is left out for whole batches alone: with more micro-batches that
was never faster by more than 3 % where the two were trained in turn.

A setting's time is that of its fastest step: warm-up and steps that something else held up are
slower. Everything here is data and arithmetic: no clock, no ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torchrec_picasso.schedule.schedule import Setting

__all__ = ["NUM_STEPS", "Trial", "Turn"]

NUM_STEPS = 28
"""Steps that a trial takes at most: a long warm-up, from 16 micro-batches to 1, no lookahead."""

_TURN, _GLANCE = 4, 3
"""Batches of a turn. At its end all but the last two have been trained, so one step of a glance
counts; the others count later, but for the last, whose next batch has another setting."""
_LONGEST_WARMUP = 5
"""Batches that the first turn has more than a glance, at most."""
_WARMER = 0.9
"""The first turn goes on while a step is this much faster than those of its setting before."""
_HOPELESS, _HELD_UP = 1.2, 2.0
"""Between these factors of the best time, a turn ends with the glance. Beyond, something else took
the time: a kernel was compiled, memory was allocated."""
_LOST = 1.1
"""Factor of the time of whole batches from which on no more micro-batches are tried."""
_FASTER = 0.97
"""Factor of the first setting's time that another has to get below to be chosen."""


@dataclass(frozen=True)
class Turn:
    """Batches in a row with one setting."""

    setting: Setting
    num_batches: int


class Trial:
    """Gives turns, takes times, and in the end has chosen.

    Args:
        allowed: Settings.
        first: Micro-batches to begin with, if they are allowed; ``None`` = 2, from where whole
            batches are tried next.
    """

    def __init__(self, allowed: Sequence[Setting], first: int | None = None) -> None:
        pieces = sorted({setting.num_micro_batches for setting in allowed})
        self._first = Setting(
            first if first in pieces else pieces[:2][-1], any(each.lookahead for each in allowed)
        )
        self._fastest_s = dict.fromkeys(allowed, math.inf)
        self._turned = [self._first]
        self._turns = self._walk()

    def next_turn(self) -> Turn | None:
        """The next turn; ``None`` = the choice is made."""
        return next(self._turns, None)

    def note(self, setting: Setting, step_s: float) -> None:
        """Takes the time of a step; batches that were in flight before the trial tell as well."""
        if setting in self._fastest_s:
            self._fastest_s[setting] = min(step_s, self._fastest_s[setting])

    @property
    def chosen(self) -> Setting:
        """The fastest so far; the first one where none is clearly faster."""
        fastest = min(self._turned, key=self._fastest_s.__getitem__)
        is_clear = self._fastest_s[fastest] < _FASTER * self._fastest_s[self._first]
        return fastest if is_clear else self._first

    @property
    def times_ms(self) -> dict[Setting, float]:
        """Times of what was tried, in order of micro-batches."""
        found = [setting for setting in self._turned if self._fastest_s[setting] < math.inf]
        found.sort(key=lambda setting: (setting.num_micro_batches, not setting.lookahead))
        return {setting: 1e3 * self._fastest_s[setting] for setting in found}

    def _walk(self) -> Iterator[Turn]:
        yield from self._warm_up()
        yield from self._go_on(0.5)
        if self.chosen == self._first:
            yield from self._go_on(2.0)
        if self.chosen.num_micro_batches == 1:
            yield from self._try(Setting(1, lookahead=False))

    def _warm_up(self) -> Iterator[Turn]:
        """The first setting, until its steps get no faster."""
        yield Turn(self._first, _GLANCE)
        for _ in range(_LONGEST_WARMUP):
            before_s = self._fastest_s[self._first]
            yield Turn(self._first, 1)
            if not self._fastest_s[self._first] < _WARMER * before_s < math.inf:
                break

    def _go_on(self, factor: float) -> Iterator[Turn]:
        """Multiplies the micro-batches as long as steps get faster."""
        before = None
        while before != self.chosen:
            before = self.chosen
            pieces = int(factor * before.num_micro_batches)
            if factor > 1 and self._have_lost:
                pieces = 1
            yield from self._try(Setting(pieces, before.lookahead))

    @property
    def _have_lost(self) -> bool:
        """Whether some micro-batches were clearly slower than whole batches."""
        whole_s = self._fastest_s.get(Setting(1, self._first.lookahead), math.inf)
        return any(self._fastest_s[each] > _LOST * whole_s for each in self._turned)

    def _try(self, setting: Setting) -> Iterator[Turn]:
        if setting not in self._fastest_s or setting in self._turned:
            return
        self._turned.append(setting)
        yield Turn(setting, _GLANCE)
        slower = self._fastest_s[setting] / self._fastest_s[self.chosen]
        if not _HOPELESS < slower < _HELD_UP:
            yield Turn(setting, _TURN - _GLANCE)
