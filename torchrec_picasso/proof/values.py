"""Values of the proof: how a tensor depends on the batch, and where the batch lies in it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

__all__ = ["SAMPLES", "SAME", "Kind", "UnprovedError", "Value", "plain"]

SAMPLES = "samples"
"""Name of the rows of which a batch has one per sample; other rows are a feature's lookups."""


class UnprovedError(Exception):
    """The reason why a model is unproved; completes a sentence that begins with the place."""


class Kind(Enum):
    """How a tensor depends on the samples of a batch.

    A ``ROWS`` tensor has an entry for each row, computed from that row's inputs alone. A ``MEAN``
    stays one if a term is added that is the same for every batch, because shares sum to 1.
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
    """The dependence of one tensor on the batch.

    Args:
        kind: How the tensor depends on the samples.
        rows: Rows along its batch dim: :data:`SAMPLES`, or the name of a feature's lookups.
        dim: Index of the batch dim. Its size is ``outer * rows * inner``: entry i of row r in block
            o is at ``(o * rows + r) * inner + i``.
        outer: Number of blocks of rows in this dim.
        counted: Rows that the entries are integer positions in, counted from the batch's first row;
            a part of the batch counts from its own first row. Empty = entries are no positions.
        is_own: Whether such a position is that of the entry's own row.
        features: Names of the features of ``LOOKUPS``, ``OFFSETS`` and lengths, in order.
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
        """Whether the values of a batch's parts add up to the value of the batch."""
        return self.kind in (Kind.MEAN, Kind.SUM)


SAME = Value(Kind.SAME)


def plain(value: Value) -> Value:
    """Keeps the rows of a value, and drops all else that is known about its entries."""
    return replace(value, counted="", is_own=False, features=())
