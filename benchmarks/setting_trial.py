"""How many steps the choice of a setting takes, and how far from the best it ends: on paper.

    python -m benchmarks.setting_trial

Step times are those measured in ``benchmarks/results/`` and ``docs/dev/log.md``, with noise of 3,
5 and 10 %, one step of twenty held up, a slow warm-up, and a first step after one with more
micro-batches that is faster by 7 %. Trials begin with the best number of
micro-batches, with the one beside it, or with none, as if a plan had said so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import numpy as np

from torchrec_picasso.schedule.schedule import Setting
from torchrec_picasso.schedule.setting_choice import SettingChoice, TimedStep, candidates

NOISES = (0.03, 0.05, 0.10)
"""Noise of a step's time, as a share of it."""
HINTS = ("best", "best", "beside", "none")
"""Numbers of micro-batches that trials begin with, by share. Plans priced by the machine's own
curves named the best one in five cases of five (``benchmarks/results/sweep_*.json``)."""


@dataclass(frozen=True)
class Curve:
    """Step times of one model on one machine.

    Args:
        ms: By micro-batches, with lookahead.
        without: Factor without lookahead, of whole batches.
        cut_without: Factor without lookahead, of batches that are cut.
        guessed: Keys of ``ms`` that were not measured, but interpolated.
    """

    ms: Mapping[int, float]
    without: float = 1.0
    cut_without: float = 1.0
    guessed: tuple[int, ...] = ()

    def times_ms(self) -> dict[Setting, float]:
        """By setting."""
        times = {}
        for k, ms in self.ms.items():
            times[Setting(k, True)] = ms
            times[Setting(k, False)] = ms * (self.without if k == 1 else self.cut_without)
        return times


CURVES = {
    "thin": Curve({1: 366, 2: 349, 4: 300, 8: 252, 16: 290}, 1.0, 0.97, (16,)),
    "thin, 5,000 hot": Curve({1: 534, 2: 450, 4: 380, 8: 367, 16: 440}, 1.0, 0.97, (1, 2)),
    "DLRM towers": Curve({1: 850, 2: 708, 4: 614, 8: 622, 16: 690}, 1.0, 1.0, (1, 16)),
    "uniform ids": Curve({1: 335, 2: 325, 4: 318, 8: 329, 16: 341}, 1.0, 1.006),
    "thin, 16,384": Curve({1: 2100, 2: 1800, 4: 1548, 8: 1236, 16: 1216}, 1.0, 1.01, (1, 2)),
    "thin, 100 Mbit/s": Curve({1: 1320, 2: 1150, 4: 1032, 8: 1068, 16: 1055}, 1.0, 1.0, (2,)),
    "thin, loopback": Curve({1: 560, 2: 454, 4: 392, 8: 352, 16: 380}, 1.0, 1.0, (1, 16)),
    "small steps, loopback": Curve({1: 27, 2: 35, 4: 32}, 0.63),
    "460 fields": Curve({1: 1600, 2: 1414, 4: 1216, 8: 1228, 16: 1284}, 1.0, 1.012, (1,)),
    "460 fields, later": Curve({1: 1457, 2: 1585, 4: 1492, 8: 1530, 16: 1585}, 1.09, 1.0, (8,)),
    "460 fields, loopback": Curve({1: 2150, 2: 2418, 4: 2607, 8: 2450, 16: 2302}, 0.97, 1, (8,)),
    "130 fields": Curve({1: 383, 2: 436, 4: 438, 8: 435, 16: 450}, 1.05),
    "130 fields, loopback": Curve({1: 428, 2: 428, 4: 503, 8: 540, 16: 579}, 0.99, 1.0, (8,)),
    "40 fields": Curve({1: 68, 2: 79, 4: 80, 8: 98, 16: 122}, 1.0, 1.0, (8,)),
    "40 fields, loopback": Curve({1: 58, 2: 74, 4: 76, 8: 95, 16: 120}, 1.09, 1.0, (8,)),
    "Globo": Curve({1: 68, 2: 72, 4: 78, 8: 91}, 0.97),
    "sequences": Curve({1: 473, 2: 360, 4: 339, 8: 370, 16: 411}, 1.0, 0.99),
    "sequences, 5,000 hot": Curve({1: 480, 2: 446, 4: 428, 8: 430, 16: 497}, 1.0, 1.0, (1,)),
    "sequences, 100 Mbit/s": Curve({1: 711, 2: 653, 4: 593, 8: 610, 16: 705}, 1.0, 1.06),
    "Wide & Deep": Curve({1: 264, 2: 250, 4: 340, 8: 375, 16: 410}, 0.93, 1.05, (8,)),
    "DLRM": Curve({1: 261, 2: 245, 4: 282, 8: 305, 16: 350}, 1.0, 0.985, (8,)),
    "DeepFM": Curve({1: 95, 2: 108, 4: 113, 8: 127, 16: 144}, 0.945, 1.0, (8,)),
    "DeepFM, 100 Mbit/s": Curve({1: 270, 2: 286, 4: 298, 8: 325, 16: 352}, 1.03, 1.0, (8,)),
    "DIN": Curve({1: 212, 2: 225, 4: 219, 8: 243, 16: 275}, 0.93, 1.02),
    "DIEN": Curve({1: 410, 2: 390, 4: 540, 8: 640, 16: 750}, 1.18, 1.19, (8,)),
    "DIEN, 100 Mbit/s": Curve({1: 583, 2: 536, 4: 589, 8: 742}, 1.0, 1.01),
    "MMoE": Curve({1: 207, 2: 221, 4: 244, 8: 290}, 0.98),
    "CAN": Curve({1: 158, 2: 162, 4: 193, 8: 230}, 0.985),
    "Wukong": Curve({1: 681, 2: 708, 4: 766, 8: 800, 16: 840}, 1.07, 1.0, (8,)),
    "DHEN": Curve({1: 1215, 2: 1078, 4: 915, 8: 955}, 1.0, 1.05),
    "TBSM": Curve({1: 219, 2: 178, 4: 150, 8: 193}, 1.0, 0.95),
}
"""Criteo and 1 Gbit/s unless named."""


class PaperClock:
    """Stamps are seconds."""

    def __init__(self) -> None:
        self.num_readings = 0

    def read(self, steps: Sequence[TimedStep], pg: Any) -> list[tuple[float, float]]:
        """Seconds of each step, and its samples."""
        self.num_readings += 1
        return [(step.span[1] - step.span[0], step.num_samples) for step in steps]


def settle(
    choice: SettingChoice,
    step_s: Callable[[Setting], float],
    clock: PaperClock | None = None,
    samples: Iterable[int] | None = None,
) -> int:
    """Trains on paper until a choice is made, three batches in flight; ``samples`` are those of
    each step, of one by default.

    Returns:
        Steps.
    """
    timer: Any = clock or PaperClock()
    one_rank: Any = None
    in_flight = [Setting(1, choice.current.lookahead)] * 3  # nothing is proved yet
    for step, num in zip(range(1, 1000), samples or repeat(1)):
        span = 0.0, step_s(in_flight[0])
        choice.note_step(in_flight, span, num, timer, one_rank)
        if choice.is_settled:
            return step
        in_flight = [*in_flight[1:], choice.current]
    raise AssertionError("never settled")


@dataclass(frozen=True)
class Found:
    """Results of one curve's trials.

    Args:
        steps: Steps of each trial.
        losses: Slowdown of the choice against the best setting, as a share, of each trial.
    """

    steps: np.ndarray
    losses: np.ndarray


def simulate(curve: Curve, noise: float, hint: str, times: int, seed: int = 0) -> Found:
    """Trials of one curve."""
    draw = np.random.default_rng(seed)
    times_ms, pieces = curve.times_ms(), sorted(curve.ms)
    allowed = [s for s in candidates(None, None) if s.num_micro_batches in curve.ms]
    best = min(times_ms, key=lambda setting: times_ms[setting])
    found = []
    for _ in range(times):
        choice = SettingChoice(allowed, _hinted(hint, pieces, best, draw))
        seconds = _Steps(times_ms, noise, draw)
        steps = settle(choice, seconds)
        found.append((steps, times_ms[choice.current] / times_ms[best] - 1))
    steps_n, losses_n = np.array(found).T
    return Found(steps_n, losses_n)


def _hinted(
    hint: str, pieces: Sequence[int], best: Setting, draw: np.random.Generator
) -> int | None:
    if hint == "none":
        return None
    place = pieces.index(best.num_micro_batches)
    if hint == "beside":
        place += -1 if place == len(pieces) - 1 else 1 if place == 0 else int(draw.choice([-1, 1]))
    return pieces[place]


class _Steps:
    """Seconds of steps, one after another."""

    def __init__(
        self, times_ms: Mapping[Setting, float], noise: float, draw: np.random.Generator
    ) -> None:
        self._times_ms, self._noise, self._draw = times_ms, noise, draw
        self._done: list[Setting] = []

    def __call__(self, setting: Setting) -> float:
        held_up = self._draw.uniform(1.2, 2.0) if self._draw.random() < 0.05 else 1.0
        warm_up = 1 + 2 * math.exp(-len(self._done) / 0.7)
        first = 1.0 if setting in self._done else 1.15
        before = self._done[-1] if self._done else setting
        first *= 1 if before.num_micro_batches <= setting.num_micro_batches else 0.93
        self._done.append(setting)
        noise = math.exp(self._draw.normal(0, self._noise))
        return self._times_ms[setting] / 1e3 * noise * held_up * warm_up * first


def main() -> None:
    """Prints a line per curve, then the mean."""
    lines = []
    print("| scenario | best | steps | over the best, % |\n|---|---|---|---|")
    for name, curve in CURVES.items():
        times_ms = curve.times_ms()
        best = min(times_ms, key=lambda setting: times_ms[setting])
        found = [simulate(curve, noise, hint, 25) for noise in NOISES for hint in HINTS]
        steps = float(np.mean([each.steps for each in found]))
        loss = float(np.mean([each.losses for each in found]))
        lines.append((steps, loss))
        look = "" if best.lookahead else ", no lookahead"
        print(f"| {name} | K={best.num_micro_batches}{look} | {steps:.1f} | {100 * loss:.1f} |")
    steps, loss = np.mean(lines, axis=0)
    print(f"| mean | | {steps:.1f} | {100 * loss:.1f} |")


if __name__ == "__main__":
    main()
