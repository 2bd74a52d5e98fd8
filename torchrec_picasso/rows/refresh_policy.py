"""When a hot set is evaluated again, and how readily it changes."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from torchrec_picasso.errors import ConfigError

_NULL_MEANS_A_DEFAULT = ("half_life_steps", "check_steps")
_WHOLE = ("every_steps", "check_steps")
_AT_LEAST = {"every_steps": 1, "deviations": 0, "check_steps": 1, "coverage_kept": 0}
_ABOVE = {"half_life_steps": 0, "most_moved": 0}
_AT_MOST = {"most_moved": 1, "coverage_kept": 1}


@dataclass(frozen=True, kw_only=True)
class Refresh:
    """How hot rows follow what is looked up.

    The number of hot rows stays the plan's; which they are changes. A row enters where it was used
    more than a hot one, by more than chance, and that one leaves. A use is an access: a batch of
    one rank that looks the row up, however often in it.

    Args:
        every_steps: Steps between two evaluations, at least 1.
        half_life_steps: Steps after which a use counts half; ``None`` = ``every_steps``.
        deviations: Standard deviations by which the entering row's uses must exceed the leaving
            one's, so that rows used alike do not keep changing places.
        most_moved: Largest part of the hot rows that changes at once, above 0.
        check_steps: Steps between two checks of the coverage; ``None`` = no check.
        coverage_kept: Part of the coverage after the last evaluation below which a check starts the
            next one ahead of time, after half of ``every_steps`` at the soonest.

    Raises:
        ConfigError: If a number is out of range; names every such number.
    """

    every_steps: int = 100
    half_life_steps: float | None = None
    deviations: float = 3.0
    most_moved: float = 1.0
    check_steps: int | None = 10
    coverage_kept: float = 0.9

    def __post_init__(self) -> None:
        found = [(f.name, _problem(f.name, getattr(self, f.name))) for f in fields(self)]
        problems = [f"{name}: expected {problem}" for name, problem in found if problem]
        if problems:
            raise ConfigError("Refresh: " + "; ".join(problems))

    @property
    def decay(self) -> float:
        """Factor of a use a step later."""
        half_life = self.every_steps if self.half_life_steps is None else self.half_life_steps
        return float(0.5 ** (1 / half_life))


def _problem(name: str, value: object) -> str | None:
    """Says which value was expected of an argument, and what was found; ``None`` = it is fine."""
    if value is None and name in _NULL_MEANS_A_DEFAULT:
        return None
    kind, called = (int, "a whole number") if name in _WHOLE else ((int, float), "a number")
    if not isinstance(value, kind) or isinstance(value, bool):
        or_null = " or null" if name in _NULL_MEANS_A_DEFAULT else ""
        return f"{called}{or_null}, got {value!r:.200} ({type(value).__name__})"
    if isinstance(value, int) and value.bit_length() > 63:
        return f"a number of 64 bits at most, got one of {value.bit_length()}"
    if not math.isfinite(value):
        return f"a finite number, got {value}"
    if value < _AT_LEAST.get(name, -math.inf):
        return f"at least {_AT_LEAST[name]}, got {value}"
    if value <= _ABOVE.get(name, -math.inf):
        return f"more than {_ABOVE[name]}, got {value}"
    return f"at most {_AT_MOST[name]}, got {value}" if value > _AT_MOST.get(name, value) else None
