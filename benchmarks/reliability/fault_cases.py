"""Injected faults: their kind, their place, and how the ranks were started."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

WORLD_SIZE = 2
STEPS, EVERY_STEPS = 24, 4

KINDS = {
    "kill_step": "kill -9 of a rank at a step",
    "kill_write": "kill -9 of a rank at a byte of what it writes",
    "kill_job": "kill -9 of all, and of who started them, at a step",
    "disk_full": "no room from a byte on, on one rank",
    "flip": "kill -9 of a rank, then a bit of the newest checkpoint flipped",
    "truncate": "kill -9 of a rank, then a file of the newest checkpoint cut off",
    "raise": "an exception in a rank's model",
    "hang": "a rank that hangs in its model",
}
LAUNCHERS = {
    "run_ranks": ("kill_step", "kill_write", "disk_full", "flip", "truncate", "raise", "hang"),
    "torchrun": ("kill_step", "kill_write", "kill_job"),
}
_MOST_BYTES = 150_000  # some more than three checkpoints of a rank


@dataclass(frozen=True)
class Case:
    """One fault.

    Args:
        kind: One of :data:`KINDS`.
        launcher: One of :data:`LAUNCHERS`.
        seed: Seed of everything else.
    """

    kind: str
    launcher: str
    seed: int

    @property
    def name(self) -> str:
        """Name of the case, its folder and its outcome."""
        return f"{self.kind}-{self.launcher}-{self.seed}"

    @property
    def chance(self) -> random.Random:
        """For what is drawn of the case, always the same."""
        return random.Random(self.name)

    @property
    def rank(self) -> int:
        """Rank that it strikes."""
        return self.chance.randrange(WORLD_SIZE)

    @property
    def step(self) -> int:
        """Steps trained before it; two checkpoints at least where the newest one is damaged."""
        first = 2 * EVERY_STEPS + 1 if self.kind in ("flip", "truncate") else 1
        return self.chance.randrange(first, STEPS)

    @property
    def room(self) -> int:
        """Bytes that are written before it."""
        return self.chance.randrange(_MOST_BYTES)

    @property
    def async_save(self) -> bool:
        """Whether checkpoints are written while training goes on."""
        return self.seed % 2 == 1


def all_cases(launchers: Sequence[str], kinds: Sequence[str], seeds: int) -> list[Case]:
    """Every kind under every launcher that has it."""
    return [
        Case(kind, launcher, seed)
        for launcher in launchers
        for kind in LAUNCHERS[launcher]
        if kind in kinds
        for seed in range(seeds)
    ]
