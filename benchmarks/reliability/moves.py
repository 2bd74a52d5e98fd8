"""Moves of a checkpoint, with those that stock TorchRec cannot make."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

from benchmarks.reliability.small_model import BAGS, SEQUENCES
from benchmarks.reliability.small_trainer import num_column_shards


@dataclass(frozen=True, order=True)
class Side:
    """A plan on a number of ranks."""

    plan: str
    world_size: int

    @property
    def name(self) -> str:
        """Such as ``bags@3``."""
        return f"{self.plan}@{self.world_size}"

    def column_shards(self) -> tuple[int, ...]:
        """Column shards of each table."""
        dims = [dim for _, dim in (BAGS | SEQUENCES).values()]
        if self.plan != "column_wise":
            return (1,) * len(dims)
        return tuple(num_column_shards(dim, self.world_size) for dim in dims)


@dataclass(frozen=True, order=True)
class Move:
    """A checkpoint that one side writes and the other loads."""

    optimizer: str
    source: Side
    target: Side

    @property
    def name(self) -> str:
        """Such as ``adagrad, rows@2 to bags@3``."""
        return f"{self.optimizer}, {self.source.name} to {self.target.name}"

    @property
    def fits(self) -> bool:
        """Whether the optimizer's state means the same on both sides.

        Row-wise Adagrad's is one value per row of a column shard.
        """
        same_columns = self.source.column_shards() == self.target.column_shards()
        return self.optimizer != "rowwise_adagrad" or same_columns

    @property
    def stock(self) -> Side:
        """The stock training, never cut in two, that goes as the target should go on."""
        is_column_wise = self.target.plan == "column_wise"
        return Side("column_wise" if is_column_wise else "table_wise", self.target.world_size)


def all_moves(optimizers: Iterable[str], sides: Iterable[Side]) -> list[Move]:
    """Every pair of sides in both directions, and each side to itself, by optimizer."""
    pairs = list(itertools.product(sides, repeat=2))
    return sorted(Move(optimizer, *pair) for optimizer in optimizers for pair in pairs)
