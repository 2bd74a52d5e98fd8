"""The model of many generated fields for contestants."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torchrec.datasets.utils import Batch

from benchmarks.fields.field_specs import draw_fields
from benchmarks.fields.model import FieldsModel, build_model, model_tables
from benchmarks.fields.question import Question
from benchmarks.fields.samples import Samples
from benchmarks.fields.workload import ModelTable

__all__ = ["FieldsWorkload"]


class FieldsWorkload:
    """Fields that a seed draws.

    Args:
        question: How many, and how large.
    """

    def __init__(self, question: Question) -> None:
        self._question = question
        self._fields = draw_fields(question.fields, question.max_rows, question.seed)
        self._samples = Samples(self._fields, question.batch_size, question.seed, question.weighted)

    @property
    def tables(self) -> Sequence[ModelTable]:
        """All tables, in the model's order."""
        return model_tables(self._fields)

    def model(self) -> FieldsModel:
        """The model before sharding."""
        return build_model(self._fields, self._question.weighted, self._question.seed)

    def training(self, rank: int, num_batches: int) -> list[Batch]:
        """One rank's batches."""
        return self._samples.training(rank, num_batches)

    def heldout(self, world_size: int, num_steps: int) -> Iterator[Batch]:
        """All ranks' batches of a stream that is never trained on."""
        return self._samples.heldout(world_size, num_steps)

    def in_words(self) -> str:
        """What is trained, for the head of a report."""
        return f"{len(self._fields)} generated fields"
