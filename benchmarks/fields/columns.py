"""Columns of a log as fields with one id per sample, or ids that are all alike often.

The log is in time order: the first half is counted, the second is trained on, each rank taking its
own samples of a global batch. Labels follow a hidden taste of some rows, as in
:mod:`torchrec_picasso.app.zoo.data.fields`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray
from torchrec.datasets.utils import Batch

from benchmarks.fields.model import FieldsModel, build_model, model_tables
from benchmarks.fields.question import UNIFORM, Question
from benchmarks.fields.workload import ModelTable
from torchrec_picasso.app.zoo.data.criteo_files import ID_COLUMNS
from torchrec_picasso.app.zoo.data.field_specs import FieldSpec
from torchrec_picasso.app.zoo.data.fields import NUM_DENSE
from torchrec_picasso.app.zoo.data.source import make_batch
from torchrec_picasso.errors import InputError

CLICK_COLUMNS = (
    *("article", "user", "session", "environment"),
    *("device", "os", "country", "region", "referrer"),
)
"""Columns of Globo's clicks."""
_UNIFORM_STEPS = 40


class ColumnsWorkload:
    """One table per column.

    Args:
        question: File, columns of a table, cap on rows.

    Raises:
        InputError: If the file is missing or has other columns.
    """

    def __init__(self, question: Question) -> None:
        self._question = question
        columns = _uniform(question) if question.data == UNIFORM else _read(question)
        self._fields = tuple(
            FieldSpec(
                feature=name,
                num_embeddings=min(question.max_rows, int(ids.max()) + 1),
                dim=question.dim,
                exponent=0.0,
                pooling_factor=1,
                mean=False,
            )
            for name, ids in columns.items()
        )
        rows_F = np.array([field.num_embeddings for field in self._fields])
        self._rows_NF = np.mod(np.stack(list(columns.values()), axis=1), rows_F)
        rng = np.random.default_rng(question.seed)
        tastes = [rng.normal(size=rows) for rows in rows_F]
        logit_N = sum(taste_R[rows] for taste_R, rows in zip(tastes, self._rows_NF.T))
        logit_N = logit_N / np.sqrt(len(tastes))
        self._dense_NI = rng.normal(size=(len(logit_N), NUM_DENSE)).astype(np.float32)
        chance_N = 1 / (1 + np.exp(-2 * logit_N - self._dense_NI[:, 0]))
        self._labels_N = (rng.random(len(logit_N)) < chance_N).astype(np.float32)

    @property
    def tables(self) -> Sequence[ModelTable]:
        """All tables, in the model's order."""
        return model_tables(self._fields)

    def model(self) -> FieldsModel:
        """The model before sharding."""
        return build_model(self._fields, self._question.seed)

    def training(self, rank: int, num_batches: int) -> list[Batch]:
        """One rank's batches, of the second half, in order and again."""
        size, half = self._question.batch_size, len(self._labels_N) // 2
        global_size = size * self._question.hosts
        num_steps = half // global_size
        return [
            self._batch(half + step % num_steps * global_size + rank * size)
            for step in range(num_batches)
        ]

    def heldout(self, world_size: int, num_steps: int) -> Iterator[Batch]:
        """All ranks' batches, the last ones of the first half."""
        size, half = self._question.batch_size, len(self._labels_N) // 2
        starts = range(half - size, -1, -size)[: world_size * num_steps]
        return (self._batch(start) for start in reversed(starts))

    def in_words(self) -> str:
        """Description of the workload, for the head of a report."""
        return f"{self._question.data}, {self._question.dim} columns"

    def _batch(self, start: int) -> Batch:
        samples = slice(start, start + self._question.batch_size)
        features = [field.feature for field in self._fields]
        columns = (self._labels_N[samples], self._dense_NI[samples], self._rows_NF[samples])
        return make_batch(*columns, features)


def _read(question: Question) -> Mapping[str, NDArray[np.int64]]:
    try:
        there = set(pq.read_schema(question.data).names)
    except (OSError, TypeError) as error:
        raise InputError(
            f"--data: got {question.data}, expected a Parquet file ({error})"
        ) from error
    for names in (ID_COLUMNS, CLICK_COLUMNS):
        if there.issuperset(names):
            table = pq.read_table(question.data, columns=list(names))
            missing_is_last = {name: table.column(name).fill_null(-1) for name in names}
            return {name: np.asarray(ids, dtype=np.int64) for name, ids in missing_is_last.items()}
    raise InputError(
        f"--data: {question.data} has neither Criteo's columns nor those of clicks "
        f"({', '.join(CLICK_COLUMNS)}); it has {', '.join(sorted(there))}"
    )


def _uniform(question: Question) -> Mapping[str, NDArray[np.int64]]:
    rng = np.random.default_rng([question.seed, len(ID_COLUMNS)])
    num_samples = _UNIFORM_STEPS * question.hosts * question.batch_size
    ids_FN = rng.integers(question.max_rows, size=(len(ID_COLUMNS), num_samples))
    return dict(zip(ID_COLUMNS, ids_FN))
