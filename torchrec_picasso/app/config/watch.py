"""Where a run leaves the curves of its training."""

from __future__ import annotations

from dataclasses import dataclass

from torchrec_picasso.rules import Rules, rule

__all__ = ["WatchConfig"]


@dataclass(frozen=True, kw_only=True)
class WatchConfig(Rules):
    """What is written while a run trains, for those who watch it."""

    tensorboard: str | None = rule(
        None, "Folder of event files for TensorBoard, written by rank 0; null = write none."
    )
    every_steps: int = rule(
        1,
        "Steps between two points of a curve; a point is of all steps since the last.",
        at_least=1,
    )
