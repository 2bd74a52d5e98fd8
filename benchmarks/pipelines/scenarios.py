"""The comparisons that the project is judged by, each with its target."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.pipelines.question import Question

__all__ = ["SCENARIOS", "SIZES", "Scenario", "has_own_sizes"]

SIZES = ("hosts", "ranks_per_host", "batch_size", "dim", "max_rows")
"""Options of a question without which a scenario is another one, and its target says nothing."""

_STOCK = ("table_wise", "row_wise", "column_wise", "planner", "fused")
_BEST_STOCK = "table_wise"
"""Of the stock plans of this model at 1 Gbit/s; where a step takes seconds, only it takes part."""
_AUTOMATIC = ("hot_cold", "interleaved")
_BY_HAND = ("interleaved:4:5000", "interleaved:8:0")


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One comparison with a target; what is not named here is as a :class:`Question` has it.

    Args:
        name: Of the scenario and of its files.
        target: Least ratio of samples per second to the best stock variant.
        each_of_ours: Whether each of our variants must reach the target, not only the best.
        variants: Their names.
        rate_mbit: Rate of each host's link, Mbit/s; ``None`` = loopback.
        towers: Of the model.
        batch_size: Samples per rank and step.
        heldout_steps: Global batches that hot rows are chosen from.
        ids: Data to generate in place of the file.
        rounds: Turns of every variant; fewer where a step takes seconds.
        block_steps: Timed steps of a turn.
    """

    name: str
    target: float
    each_of_ours: bool = False
    variants: tuple[str, ...] = (*_STOCK, *_AUTOMATIC, *_BY_HAND)
    rate_mbit: float | None = 1000.0
    towers: str = "thin"
    batch_size: int = 4096
    heldout_steps: int = 4
    ids: str | None = None
    rounds: int = 6
    block_steps: int = 4

    def question(self, data: str, options: Mapping[str, Any] | None = None) -> Question:
        """What it asks.

        Args:
            data: A Criteo file, or data to generate.
            options: Arguments of :class:`Question` that replace the scenario's own.
        """
        own = Question(
            data=self.ids or data,
            rate_mbit=self.rate_mbit,
            towers=self.towers,
            batch_size=self.batch_size,
            heldout_steps=self.heldout_steps,
            variants=self.variants,
            rounds=self.rounds,
            block_steps=self.block_steps,
        )
        return dataclasses.replace(own, **(options or {}))


SCENARIOS = (
    Scenario(name="1gbit_thin", target=4.0),
    Scenario(name="1gbit_dlrm", target=3.0, towers="dlrm"),
    Scenario(
        name="100mbit_thin",
        target=6.0,
        rate_mbit=100.0,
        variants=(_BEST_STOCK, *_AUTOMATIC, *_BY_HAND),
        rounds=4,
        block_steps=3,
    ),
    Scenario(
        name="1gbit_thin_16384",
        target=4.5,
        batch_size=16384,
        heldout_steps=1,  # of 80,000 samples, one global batch for statistics leaves a circle
        variants=(_BEST_STOCK, *_AUTOMATIC, "interleaved:16:0"),
        rounds=4,
        block_steps=3,
    ),
    Scenario(
        name="1gbit_uniform",
        target=0.97,
        ids="uniform",
        variants=(*_STOCK, *_AUTOMATIC),
        each_of_ours=True,
    ),
    Scenario(name="loopback_thin", target=1.0, rate_mbit=None),
)


def has_own_sizes(scenario: Scenario, question: Mapping[str, Any]) -> bool:
    """Whether a question, as it is written, is of the scenario's sizes.

    Args:
        scenario: Whose.
        question: The ``question`` of a report's file.
    """
    own = dataclasses.asdict(scenario.question(question["data"]))
    return all(question[size] == own[size] for size in SIZES)
