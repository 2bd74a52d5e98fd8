"""Clicks with the history before them, as columns, and the batches made of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_picasso.app.zoo.data.history import History, Ids

__all__ = ["Clicks", "history_of", "negatives_of"]


def history_of(target: str) -> str:
    """The feature that holds a target's history; both look up one table."""
    return f"{target}_history"


def negatives_of(target: str) -> str:
    """The feature that holds, for each click of a target's history, what was not clicked."""
    return f"{target}_negatives"


@dataclass(frozen=True, eq=False)
class Clicks:
    """Samples in columns.

    Args:
        targets: One id per sample, by column, with a history of the same table.
        histories: The history of each target.
        profiles: One id per sample, by column, without a history.
        clicked: Labels, 0 or 1, shape ``(n,)``.
        in_time_order: Whether samples follow each other as they happened.
        negatives: Of each target as many ids as its history has; empty = there are none.
    """

    targets: Mapping[str, Ids]
    histories: Mapping[str, History]
    profiles: Mapping[str, Ids]
    clicked: NDArray[np.float32]
    in_time_order: bool = False
    negatives: Mapping[str, History] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.clicked)

    @property
    def features(self) -> list[str]:
        """Features of a batch, in its order."""
        return [
            *(*self.profiles, *self.targets),
            *map(history_of, self.targets),
            *map(negatives_of, self.negatives),
        ]

    def num_rows(self, column: str) -> int:
        """Rows of the table that a column looks up, with its history."""
        if column in self.profiles:
            return int(self.profiles[column].max(initial=0)) + 1
        return max(self.histories[column].largest, int(self.targets[column].max(initial=0))) + 1

    def hashed(self, max_rows: int) -> Clicks:
        """The same samples, with ids modulo a number of rows."""
        return replace(
            self,
            targets={column: ids % max_rows for column, ids in self.targets.items()},
            histories={column: of.hashed(max_rows) for column, of in self.histories.items()},
            negatives={column: of.hashed(max_rows) for column, of in self.negatives.items()},
            profiles={column: ids % max_rows for column, ids in self.profiles.items()},
        )

    def latest(self, most: int) -> Clicks:
        """The same samples, of histories and negatives the latest ``most`` ids."""
        return replace(
            self,
            histories={column: of.latest(most) for column, of in self.histories.items()},
            negatives={column: of.latest(most) for column, of in self.negatives.items()},
        )

    def with_negatives(self, seed: int) -> Clicks:
        """The same samples with negatives: for each click of a history the target of any sample.

        The columns of one click get those of one sample. What was clicked once is as likely to be
        drawn as it is to be a target, so popularity alone tells nothing.

        Args:
            seed: Draws them.
        """
        negatives = {}
        for target, history in self.histories.items():
            rng = np.random.default_rng(seed)  # the same samples for each column
            drawn = rng.integers(len(self), size=len(history.values))
            negatives[target] = replace(history, values=self.targets[target][drawn])
        return replace(self, negatives=negatives)

    def of(self, samples_m: Ids) -> Clicks:
        """Some of the samples, in their order."""
        return replace(
            self,
            targets={column: ids[samples_m] for column, ids in self.targets.items()},
            histories={column: of.of(samples_m) for column, of in self.histories.items()},
            negatives={column: of.of(samples_m) for column, of in self.negatives.items()},
            profiles={column: ids[samples_m] for column, ids in self.profiles.items()},
            clicked=self.clicked[samples_m],
        )

    def batch(self, samples_B: Ids) -> Batch:
        """Makes a batch.

        Args:
            samples_B: Which samples, shape ``(B,)``.
        """
        chosen = self.of(samples_B)
        one_each = [*chosen.profiles.values(), *chosen.targets.values()]
        lists = [chosen.histories[target] for target in chosen.targets]
        lists += chosen.negatives.values()
        ones_B = np.ones(len(samples_B), dtype=np.int64)
        values = [*one_each, *(of.joined() for of in lists)]
        lengths = [*(ones_B for _ in one_each), *(of.lengths_n for of in lists)]
        return Batch(
            dense_features=torch.zeros(len(samples_B), 1),
            sparse_features=KeyedJaggedTensor(
                keys=self.features,
                values=torch.from_numpy(np.concatenate(values)),
                lengths=torch.from_numpy(np.concatenate(lengths).astype(np.int32)),
            ),
            labels=torch.from_numpy(chosen.clicked),
        )
