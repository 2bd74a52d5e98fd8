"""When a hot set is looked at again, and how readily it changes."""

from __future__ import annotations

from dataclasses import dataclass

from torchrec_picasso.rules import Rules, rule

__all__ = ["Refresh"]


@dataclass(frozen=True, kw_only=True)
class Refresh(Rules):
    """How hot rows follow what is looked up.

    The number of hot rows stays the plan's; which they are changes. A row enters where it was used
    more than a hot one, by more than chance, and that one leaves. A use is a batch of one rank that
    looks the row up, however often in it.

    Raises:
        ConfigError: If a number is out of range.
    """

    every_steps: int = rule(100, "Steps between two looks.", at_least=1)
    half_life_steps: float | None = rule(
        None, "Steps after which a use counts half; null = every_steps.", above=0
    )
    deviations: float = rule(
        3.0,
        "Standard deviations by which the entering row's uses must exceed the leaving one's, so "
        "that rows used alike do not change places to and fro.",
        at_least=0,
    )
    most_moved: float = rule(
        1.0, "Largest part of the hot rows that changes at once.", above=0, at_most=1
    )
    check_steps: int | None = rule(
        10, "Steps between two checks of the coverage; null = no check.", at_least=1
    )
    coverage_kept: float = rule(
        0.9,
        "Looks ahead of time, after half of every_steps at the soonest, when a check finds less "
        "than this part of the coverage that was there after the last looks.",
        at_least=0,
        at_most=1,
    )

    @property
    def half_life(self) -> float:
        """Steps after which a use counts half."""
        return self.every_steps if self.half_life_steps is None else self.half_life_steps

    @property
    def fading(self) -> float:
        """Weight of a use a step later."""
        return float(0.5 ** (1 / self.half_life))
