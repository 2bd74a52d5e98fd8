"""What a tensor of a model depends on, and how it lies along the batch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

__all__ = ["SAMPLES", "SAME", "Kind", "UnprovedError", "Value", "plain"]

SAMPLES = "samples"
"""The rows that a batch has one of per sample; other rows are the lookups of a feature."""


class UnprovedError(Exception):
    """Why a model is not proved, in words without a place."""


class Kind(Enum):
    """How a tensor follows from the samples of a batch.

    ``ROWS`` has an entry for each row, from that row's inputs alone. To a ``MEAN`` something may be
    added that is the same for every batch: shares sum to 1.
    """

    SAME = "the same for every batch"
    ROWS = "entries of samples"
    MEAN = "a mean over samples"
    SUM = "a sum over the batch"
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
