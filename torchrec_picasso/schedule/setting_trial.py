"""Which setting to try next, and which is the fastest: a search in a few noisy steps.

Step times over micro-batches K have one valley: what is exposed shrinks like 1 / K, and every
micro-batch costs something. So the search starts wide (1, 4, 16), looks at the neighbours of the
best, and gives the two best that it knows more steps. Where a plan says which number it was made
for, that one is the first, and the wide start has every other number from there. A curve
``a + b / K + c K`` through all that was measured is weighed in with every measured time, which
takes out half of the noise where steps vary by five percent. Looking ahead is rarely worse, so it
is left out only once, for the best K.

Everything here is data and arithmetic: no clock, no ranks.

Shape letters: K micro-batches, an entry for each number of them that was measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from torchrec_picasso.schedule.schedule import Setting

__all__ = ["NUM_STEPS", "WARMUP_STEPS", "Trial", "Turn", "typical_s"]

NUM_STEPS = 40
"""Steps that a trial takes at most, warm-up included."""
WARMUP_STEPS = 2
"""First steps, which are not measured: memory is allocated, caches fill."""

_SHORT_TURN, _LONG_TURN = 3, 5
"""Batches of a turn. With n batches n - 1 steps count; of the last turn before a decision, the last
of these ends after it."""
_FEWEST_BATCHES = 2
"""Of a turn in which a step counts."""
_CURVE_WEIGHT = 12
"""Steps that the curve through all settings weighs, in the time of one."""
_EQUAL = 1.001
"""Times up to this factor are the same; then fewer micro-batches are chosen."""
_CLEARLY_FASTER = 0.95
"""Factor from which on lookahead is left out: five steps of a noisy machine tell no less apart, and
more often than not it was luck (Alimama's sequences: 0.98 in the trial, 1.08 afterwards)."""
_SPIKE = 1.15
"""From this factor of a setting's faster half on, a step was held up by something else."""


@dataclass(frozen=True)
class Turn:
    """Batches in a row with one setting."""

    setting: Setting
    num_batches: int


class Trial:
    """Gives turns, takes times, and in the end has chosen.

    Args:
        allowed: Settings, the plainest first.
        first: Micro-batches to begin with, if they are allowed; ``None`` = the fewest.
    """

    def __init__(self, allowed: Sequence[Setting], first: int | None = None) -> None:
        self._pieces = sorted({setting.num_micro_batches for setting in allowed})
        self._first = first if first in self._pieces else self._pieces[0]
        looks = {setting.lookahead for setting in allowed}
        self._first_look = max(looks)
        self._may_leave_out = len(looks) > 1
        self._times_s: dict[Setting, list[float]] = {}
        self._steps_left = NUM_STEPS - WARMUP_STEPS
        self._turns = self._search()
        self._chosen: Setting | None = None

    def next_turn(self) -> Turn | None:
        """The next turn; ``None`` = there is a choice."""
        turn = next(self._turns, None)
        if turn is not None:
            self._steps_left -= turn.num_batches
        return turn

    def note(self, setting: Setting, step_s: float) -> None:
        """Takes the time of a step."""
        self._times_s.setdefault(setting, []).append(step_s)

    @property
    def chosen(self) -> Setting:
        """The fastest."""
        assert self._chosen is not None
        return self._chosen

    @property
    def times_ms(self) -> dict[Setting, float]:
        """Typical step times of what was tried, in order of micro-batches."""
        order = sorted(self._times_s, key=lambda s: (s.num_micro_batches, not s.lookahead))
        return {setting: 1e3 * self._typical_s(setting) for setting in order}

    def _search(self) -> Iterator[Turn]:
        start = self._pieces[self._pieces.index(self._first) % 2 :: 2]
        yield from self._round(sorted(start, key=lambda k: (k != self._first, k)))
        best = self._best()
        near = [k for k in self._beside(best) if self._looking(k) not in self._times_s]
        yield from self._round(near)
        for_others = _LONG_TURN * self._may_leave_out
        ranked = self._ranked()[:2]
        if len(ranked) > 1:
            yield from self._share_out(ranked, self._steps_left - for_others)
        setting = self._looking(self._best())
        self._chosen = setting
        most_of: dict[Setting, float] = {}
        if self._may_leave_out:
            most_of[replace(setting, lookahead=False)] = _CLEARLY_FASTER
        for other in most_of:
            yield Turn(other, _LONG_TURN)
        if most_of and len(self._pieces) == 1:
            for again in (setting, *most_of):
                yield Turn(again, _LONG_TURN)
        time_s = min(self._smoothed()[setting.num_micro_batches], self._typical_s(setting))
        faster = [of for of, most in most_of.items() if self._typical_s(of) < most * time_s]
        self._chosen = min(faster, key=self._typical_s, default=setting)

    def _typical_s(self, setting: Setting) -> float:
        return typical_s(self._times_s[setting])

    def _round(self, pieces: Sequence[int]) -> Iterator[Turn]:
        for k in pieces:
            yield Turn(self._looking(k), _LONG_TURN if k == pieces[-1] else _SHORT_TURN)

    def _share_out(self, pieces: Sequence[int], num_steps: int) -> Iterator[Turn]:
        """More steps for some, the best last: what is compared with it next is near in time."""
        each, more = divmod(num_steps, len(pieces))
        if each < _FEWEST_BATCHES:
            return
        for place, k in enumerate(reversed(pieces)):
            yield Turn(self._looking(k), each + (place < more))

    def _looking(self, num_micro_batches: int) -> Setting:
        return Setting(num_micro_batches, self._first_look)

    def _beside(self, num_micro_batches: int) -> list[int]:
        place = self._pieces.index(num_micro_batches)
        return [*self._pieces[max(place - 1, 0) : place], *self._pieces[place + 1 : place + 2]]

    def _smoothed(self) -> dict[int, float]:
        """By micro-batches, times of those that were tried."""
        measured = [k for k in self._pieces if self._times_s.get(self._looking(k))]
        return smoothed_s({k: self._times_s[self._looking(k)] for k in measured})

    def _ranked(self) -> list[int]:
        times_s = self._smoothed()
        return sorted(times_s, key=lambda k: times_s[k])

    def _best(self) -> int:
        times_s = self._smoothed()
        limit_s = _EQUAL * min(times_s.values())
        return next(k for k, time_s in times_s.items() if time_s <= limit_s)


def typical_s(times_s: Sequence[float]) -> float:
    """The mean of steps that nothing else held up."""
    ordered = sorted(times_s)
    middle = ordered[(len(ordered) - 1) // 2]
    return float(np.mean([time_s for time_s in ordered if time_s <= _SPIKE * middle]))


def smoothed_s(times_s: Mapping[int, Sequence[float]]) -> dict[int, float]:
    """Typical times by micro-batches, drawn towards a curve with one valley.

    Args:
        times_s: Of steps, by micro-batches, ascending.
    """
    typical_K = np.array([typical_s(times) for times in times_s.values()])
    steps_K = np.array([len(times) for times in times_s.values()])
    if len(typical_K) >= 3:
        curve_K = _valley(np.array(list(times_s), dtype=float), typical_K, steps_K)
        typical_K = (steps_K * typical_K + _CURVE_WEIGHT * curve_K) / (steps_K + _CURVE_WEIGHT)
    return dict(zip(times_s, typical_K.tolist()))


def _valley(pieces_K: np.ndarray, times_K: np.ndarray, steps_K: np.ndarray) -> np.ndarray:
    """``a + b / K + c K`` with b and c not below 0, by least squares of relative errors."""
    weights_K = np.sqrt(steps_K) / times_K
    terms = [1 / pieces_K, pieces_K]
    best, least = times_K, np.inf
    for used in ([], terms[:1], terms[1:], terms):
        columns = np.stack([np.ones_like(pieces_K), *used], axis=1)
        scaled = columns * weights_K[:, None]
        factors = np.linalg.lstsq(scaled, times_K * weights_K, rcond=None)[0]
        error = float(np.square(scaled @ factors - times_K * weights_K).sum())
        if (factors[1:] >= 0).all() and error < least - 1e-12:
            best, least = columns @ factors, error
    return best
