"""What a tensor of a model depends on, and how it lies along the batch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

__all__ = ["SAMPLES", "SAME", "Kind", "Unproved", "Value", "plain"]

SAMPLES = "samples"
"""The rows that a batch has one of per sample; other rows are the lookups of a feature."""


class Unproved(Exception):
    """Why a model is not proved, in words without a place."""


class Kind(Enum):
    """How a tensor follows from the samples of a batch."""

    SAME = "the same for every batch"
    ROWS = "an entry per row, each from its own row's inputs alone"
    MEAN = "a mean over samples, and what is the same for every batch"
    SUM = "a sum over samples, or over lookups"
    OFFSETS = "where each sample's lookups begin and end"
    LOOKUPS = "lookups of several features, one feature after the other"
    HIDDEN = "what an operator keeps for its backward"


@dataclass(frozen=True)
class Value:
    """What is known of a tensor.

    Args:
        kind: How it follows from the samples.
        rows: Whose entries lie along its batch dim: :data:`SAMPLES`, or a feature's lookups.
        dim: Which dim that is. Its size is ``outer * rows * inner``: an entry of row r is at
            ``(o * rows + r) * inner + i``.
        outer: Blocks of rows in this dim.
        counted: Entries are integers that count from the batch's first of these rows; a part of the
            batch counts from its own first. Empty = they do not.
        is_own: Whether such an integer is the place of the entry's own row.
        features: Of ``LOOKUPS`` and ``OFFSETS``, and of lengths: which features', in their order.
    """

    kind: Kind
    rows: str = ""
    dim: int = -1
    outer: int = 1
    counted: str = ""
    is_own: bool = False
    features: tuple[str, ...] = ()

    @property
    def is_partial(self) -> bool:
        """Whether parts of a batch give parts of it, to be added up."""
        return self.kind in (Kind.MEAN, Kind.SUM)


SAME = Value(Kind.SAME)


def plain(value: Value) -> Value:
    """The same rows with entries of which nothing else is known."""
    return replace(value, counted="", is_own=False, features=())
