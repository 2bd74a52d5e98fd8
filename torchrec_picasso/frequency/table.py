"""What counting needs to know of a table."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ModelTable"]


@dataclass(frozen=True, kw_only=True)
class ModelTable:
    """One embedding table.

    Args:
        name: Table name.
        num_embeddings: Rows; ``None`` = as many as the largest id asks for, found while counting.
        feature_names: Features that look it up.
    """

    name: str
    num_embeddings: int | None
    feature_names: tuple[str, ...]

    @property
    def row_range(self) -> str:
        """Its row ids, for messages."""
        return "0 and up" if self.num_embeddings is None else f"0..{self.num_embeddings - 1}"
