"""Workloads: a model, its tables and its batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import nn
from torchrec.datasets.utils import Batch


@dataclass(frozen=True, kw_only=True)
class ModelTable:
    """One table of a model.

    Args:
        name: Name of the table.
        module: Path of its collection in the model.
        num_embeddings: Rows.
        dim: Columns.
        ids_per_sample: Lookups of a sample, over all its features; a mean where they vary.
        mean: Whether bags are averaged.
    """

    name: str
    module: str
    num_embeddings: int
    dim: int
    ids_per_sample: float
    mean: bool = False


class Workload(Protocol):
    """A model and where its batches come from; the same in every process."""

    @property
    def tables(self) -> Sequence[ModelTable]:
        """All tables, in the model's order."""

    def model(self) -> nn.Module:
        """The model before sharding, a row-wise optimizer fused into its tables.

        Its forward gives ``(loss, (loss, logits, labels))``.
        """

    def training(self, rank: int, num_batches: int) -> list[Batch]:
        """One rank's batches."""

    def heldout(self, world_size: int, num_steps: int) -> Iterator[Batch]:
        """All ranks' batches that hot rows are chosen from."""

    def in_words(self) -> str:
        """Description of the workload, for the head of a report."""
