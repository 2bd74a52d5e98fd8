"""Clicks with their histories, as columns, and their batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from typing_extensions import Self

from torchrec_picasso.app.zoo.data.history import History, Ids


def history_of(target: str) -> str:
    """The feature of a target's history; both read one table."""
    return f"{target}_history"


def negatives_of(target: str) -> str:
    """The feature of a target's negatives: an item not clicked, per click of the history."""
    return f"{target}_negatives"


@dataclass(frozen=True, eq=False)
class Clicks:
    """Samples as columns.

    Args:
        targets: By column, one id per sample, or of C candidates ``(n, C)``; the history reads the
            same table.
        histories: History of each target column.
        profiles: By column, one id per sample, without history.
        clicked: Labels, 0 or 1, shape ``(n,)``, or of candidates ``(n, C, tasks)``.
        in_time_order: Whether samples are sorted by time.
        negatives: By target column, as many ids as the history has; may be empty.
    """

    targets: Mapping[str, Ids]
    histories: Mapping[str, History]
    profiles: Mapping[str, Ids]
    clicked: NDArray[np.float32]
    in_time_order: bool = False
    negatives: Mapping[str, History] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.clicked)

    def num_rows(self, column: str) -> int:
        """Rows that the ids of a column and of its history need."""
        if column in self.profiles:
            return int(self.profiles[column].max(initial=0)) + 1
        return max(self.histories[column].largest, int(self.targets[column].max(initial=0))) + 1

    def hashed(self, max_rows: int) -> Self:
        """The same samples, with ids modulo ``max_rows``."""
        return self._mapped(lambda ids: ids % max_rows, lambda lists: lists.hashed(max_rows))

    def latest(self, most: int) -> Self:
        """The same samples, with the latest ``most`` ids of histories and negatives."""
        return self._mapped(lambda ids: ids, lambda lists: lists.latest(most))

    def with_negatives(self, seed: int) -> Self:
        """The same samples with negatives: per click of a history, the target of a random sample.

        All columns of a negative are those of one sample. Items are drawn as often as they are
        targets, so popularity alone predicts nothing.
        """
        negatives = {}
        for target, history in self.histories.items():
            rng = np.random.default_rng(seed)  # draws the same samples for each column
            drawn = rng.integers(len(self), size=len(history.values))
            negatives[target] = replace(history, values=self.targets[target][drawn])
        return replace(self, negatives=negatives)

    def take(self, samples_m: Ids) -> Self:
        """The samples of given numbers, in that order."""
        taken = self._mapped(lambda ids: ids[samples_m], lambda lists: lists.take(samples_m))
        return replace(taken, clicked=self.clicked[samples_m])

    def _mapped(
        self, map_ids: Callable[[Ids], Ids], map_lists: Callable[[History], History]
    ) -> Self:
        return replace(
            self,
            targets={column: map_ids(ids) for column, ids in self.targets.items()},
            histories={column: map_lists(lists) for column, lists in self.histories.items()},
            negatives={column: map_lists(lists) for column, lists in self.negatives.items()},
            profiles={column: map_ids(ids) for column, ids in self.profiles.items()},
        )

    def batch(self, samples_B: Ids) -> Batch:
        """Builds a batch of samples with the given numbers, shape ``(B,)``."""
        chosen = self.take(samples_B)
        columns = chosen.columns()
        values, lengths = zip(*columns.values())
        return Batch(
            dense_features=torch.from_numpy(chosen.dense()),
            sparse_features=KeyedJaggedTensor(
                keys=list(columns),
                values=torch.from_numpy(np.concatenate(values)),
                lengths=torch.from_numpy(np.concatenate(lengths).astype(np.int32)),
            ),
            labels=torch.from_numpy(chosen.clicked),
        )

    def columns(self) -> dict[str, tuple[Ids, Ids]]:
        """Ids and lengths of each feature, in order."""
        found = {}
        for column, ids in {**self.profiles, **self.targets}.items():
            num_each = ids.shape[1] if ids.ndim > 1 else 1
            found[column] = ids.reshape(-1), np.full(len(self), num_each, dtype=np.int64)
        lists = {history_of(target): self.histories[target] for target in self.targets}
        lists |= {negatives_of(target): drawn for target, drawn in self.negatives.items()}
        return found | {name: (ids.joined(), ids.lengths_n) for name, ids in lists.items()}

    def dense(self) -> NDArray[np.float32]:
        """Dense features, shape ``(n, I)``: one zero."""
        return np.zeros((len(self), 1), dtype=np.float32)
