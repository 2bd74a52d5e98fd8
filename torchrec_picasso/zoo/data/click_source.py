"""Clicks as endless batches: read from a Parquet file, or generated.

Samples in time order are trained on from the middle of the log on, where users have histories, and
held out from those before. Of samples without an order a tenth is held out, by lot; the others are
drawn anew for every batch, with replacement.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

import numpy as np
from torchrec.datasets.utils import Batch

from torchrec_picasso.config import DataConfig
from torchrec_picasso.errors import InputError
from torchrec_picasso.zoo.data.click_files import read_clicks
from torchrec_picasso.zoo.data.click_log import generate_log, samples_of_log
from torchrec_picasso.zoo.data.clicks import Clicks, history_of, negatives_of
from torchrec_picasso.zoo.data.history import Ids
from torchrec_picasso.zoo.data.shares import HELDOUT, TRAIN, Shares

__all__ = ["ClickSource"]

_GENERATED_CLICKS = 40_000
_HELDOUT_SHARE = 0.1
_NUM_DENSE = 1  # of zeros: clicks have no dense features
_LOT = 7  # the random stream that decides what is held out


class ClickSource:
    """Endless batches of clicks.

    Args:
        data: Path, batch size, rows and the longest history.
        seed: Draws generated clicks, negatives and samples without an order.

    Raises:
        InputError: If the file cannot be used.
    """

    def __init__(self, data: DataConfig, seed: int) -> None:
        self._data, self._seed = data, seed
        if data.path is None:
            log = generate_log(_GENERATED_CLICKS, seed=seed)
            clicks = samples_of_log(
                log, user="user", targets=("item", "category"), profiles=("user", "device")
            )
        else:
            clicks = read_clicks(data.path)
        clicks = clicks.hashed(data.max_rows).latest(data.max_history).with_negatives(seed)
        self._clicks = clicks
        self._trained, self._heldout = clicks, clicks
        if not clicks.in_time_order:
            is_heldout = np.random.default_rng([seed, _LOT]).random(len(clicks)) < _HELDOUT_SHARE
            self._trained = clicks.of(np.flatnonzero(~is_heldout))
            self._heldout = clicks.of(np.flatnonzero(is_heldout))

    @property
    def columns(self) -> Mapping[str, tuple[str, ...]]:
        """Columns of ids by role."""
        targets, profiles = tuple(self._clicks.targets), tuple(self._clicks.profiles)
        return {
            "fields": (*profiles, *targets),
            "target": targets,
            "profile": profiles,
            "history": tuple(map(history_of, targets)),
            "negatives": tuple(map(negatives_of, targets)),
        }

    @property
    def num_rows(self) -> Mapping[str, int]:
        """Rows that the ids of each column need."""
        rows = {column: self._clicks.num_rows(column) for column in self.columns["fields"]}
        for role in ("history", "negatives"):
            of_targets = (rows[target] for target in self._clicks.targets)
            rows |= dict(zip(self.columns[role], of_targets))
        return rows

    @property
    def num_dense(self) -> int:
        """Dense features of a sample."""
        return _NUM_DENSE

    @property
    def num_tasks(self) -> int:
        """Labels of a sample."""
        return 1

    def batches(self, rank: int, world_size: int, start_step: int = 0) -> Iterator[Batch]:
        """This rank's batches from ``start_step`` on, without end."""
        shares = self._shares(self._trained, world_size)
        for step in itertools.count(start_step):
            yield self._trained.batch(shares.samples(TRAIN, rank, step))

    def heldout(self, rank: int, world_size: int) -> Iterator[Batch]:
        """This rank's share of the samples that training never sees.

        Raises:
            InputError: If there are fewer than ``heldout_steps`` global batches.
        """
        needed = self._data.heldout_steps * world_size * self._data.batch_size
        there = len(self._heldout) // (2 if self._clicks.in_time_order else 1)
        if there < needed:
            raise InputError(
                f"{self._data.path or 'the generated clicks'}: {there:,} samples can be held out, "
                f"but {needed:,} are needed (heldout_steps x ranks x batch_size); lower batch_size "
                "or heldout_steps, or give a larger file"
            )
        for step in range(self._data.heldout_steps):
            yield self._heldout.batch(self._heldout_samples(rank, step, world_size))

    def _heldout_samples(self, rank: int, step: int, world_size: int) -> Ids:
        if self._clicks.in_time_order:
            return self._shares(self._heldout, world_size).samples(HELDOUT, rank, step)
        first = (step * world_size + rank) * self._data.batch_size
        return np.arange(first, first + self._data.batch_size)

    def _shares(self, clicks: Clicks, world_size: int) -> Shares:
        return Shares(
            num_samples=len(clicks),
            in_time_order=clicks.in_time_order,
            batch_size=self._data.batch_size,
            world_size=world_size,
            seed=self._seed,
        )
