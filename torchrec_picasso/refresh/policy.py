"""When a hot set is looked at again, and how readily it changes."""

from __future__ import annotations

from dataclasses import dataclass

from torchrec_picasso.errors import ConfigError

__all__ = ["Refresh"]


@dataclass(frozen=True, kw_only=True)
class Refresh:
    """How hot rows follow what is looked up.

    The number of hot rows stays the plan's; which they are changes. A row enters where it was used
    more than a hot one, by more than chance, and that one leaves.

    Args:
        every_steps: Steps between two looks.
        half_life_steps: Steps after which a use counts half; ``None`` = ``every_steps``.
        deviations: By how many standard deviations the entering row's uses must exceed the leaving
            one's, so that rows used alike do not change places to and fro. The variance of a count
            is taken for the count itself, as where uses come independently.
        most_moved: Largest part of a pack's hot rows that changes at once.
        check_steps: Steps between two checks of the coverage; ``None`` = no check.
        coverage_kept: The hot set is looked at ahead of time when a check finds less than this
            part of the coverage that the first check after the last look found.

    Raises:
        ConfigError: If a number is out of range.
    """

    every_steps: int = 100
    half_life_steps: float | None = None
    deviations: float = 3.0
    most_moved: float = 1.0
    check_steps: int | None = 10
    coverage_kept: float = 0.9

    def __post_init__(self) -> None:
        problems = [
            f"{name} is {getattr(self, name)!r}, expected {expected}"
            for name, is_right, expected in (
                ("every_steps", self.every_steps >= 1, "at least 1"),
                (
                    "half_life_steps",
                    self.half_life_steps is None or self.half_life > 0,
                    "a number of steps above 0",
                ),
                ("deviations", self.deviations >= 0, "at least 0"),
                ("most_moved", 0 < self.most_moved <= 1, "a part above 0, at most 1"),
                ("check_steps", (self.check_steps or 1) >= 1, "at least 1, or None"),
                ("coverage_kept", 0 <= self.coverage_kept <= 1, "a part between 0 and 1"),
            )
            if not is_right
        ]
        if problems:
            raise ConfigError("Refresh: " + "; ".join(problems))

    @property
    def half_life(self) -> float:
        """Steps after which a use counts half."""
        return self.every_steps if self.half_life_steps is None else self.half_life_steps

    def fading(self, num_steps: int) -> float:
        """What a use counts so many steps later."""
        return float(0.5 ** (num_steps / self.half_life))
