"""The model of many generated fields for variants."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from torchrec.datasets.utils import Batch

from benchmarks.fields.model import FieldsModel, build_model, model_tables
from benchmarks.fields.question import Question
from benchmarks.fields.workload import ModelTable
from torchrec_picasso.app.zoo.data.field_specs import WIDEST, draw_fields
from torchrec_picasso.app.zoo.data.fields import FieldsSource

_LEAST_DIM = 4  # FBGEMM's narrowest table


class FieldsWorkload:
    """Fields that a seed draws.

    Args:
        question: Number and sizes of the fields; the widest ones have ``dim`` columns.
    """

    def __init__(self, question: Question) -> None:
        self._question = question
        fields = draw_fields(question.fields, question.max_rows, question.seed)
        self._fields = tuple(
            replace(field, dim=max(_LEAST_DIM, field.dim * question.dim // WIDEST))
            for field in fields
        )
        self._source = FieldsSource(
            self._fields, question.batch_size, question.heldout_steps, question.seed
        )

    @property
    def tables(self) -> Sequence[ModelTable]:
        """All tables, in the model's order."""
        return model_tables(self._fields)

    def model(self) -> FieldsModel:
        """The model before sharding."""
        return build_model(self._fields, self._question.seed)

    def training(self, rank: int, num_batches: int) -> list[Batch]:
        """One rank's batches."""
        return list(itertools.islice(self._source.batches(rank, self._question.hosts), num_batches))

    def heldout(self, world_size: int, num_steps: int) -> Iterator[Batch]:
        """All ranks' batches of a stream that is never trained on."""
        shares = [self._source.heldout(rank, world_size) for rank in range(world_size)]
        return itertools.chain.from_iterable(itertools.islice(zip(*shares), num_steps))

    def in_words(self) -> str:
        """Description of the workload, for the head of a report."""
        return f"{len(self._fields)} generated fields"
