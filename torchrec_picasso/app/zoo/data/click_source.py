"""Clicks as endless batches: read from a Parquet file, or generated.

Samples in time order are trained on from the middle of the log on, where users have histories, and
held out from those before. Of samples without an order a tenth is held out, by lot; the others are
drawn anew for every batch, with replacement. A large file is in memory a window at a time: each
serves as many steps as it has samples for, then the next one does, and after the last the first; of
a log only windows of its second half are trained on, and of the first half held out.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torchrec.datasets.utils import Batch

from torchrec_picasso.app.config import DataConfig
from torchrec_picasso.app.zoo.data.click_files import MOST_SAMPLES, ClickFile
from torchrec_picasso.app.zoo.data.click_log import generate_log, samples_of_log
from torchrec_picasso.app.zoo.data.clicks import Clicks, history_of, negatives_of
from torchrec_picasso.app.zoo.data.co_action_teacher import with_co_action_labels
from torchrec_picasso.app.zoo.data.history import Ids
from torchrec_picasso.app.zoo.data.shares import HELDOUT, TRAIN, Shares
from torchrec_picasso.errors import InputError

__all__ = ["ClickSource"]

_GENERATED_CLICKS = 40_000
_HELDOUT_SHARE = 0.1
_NUM_DENSE = 1  # of zeros: clicks have no dense features
_LOT = 7  # the random stream that decides what is held out


class _ClickWindows(Protocol):
    """Clicks in parts, of which one is in memory."""

    @property
    def num_windows(self) -> int:
        """Parts there are."""

    def num_samples(self, number: int) -> int:
        """Samples of a part, known without reading it; of a log at most."""

    def window(self, number: int) -> Clicks:
        """A part, read anew."""

    def num_rows(self, column: str) -> int:
        """Rows that a column's ids need in all parts, with those of its history."""


@dataclass(frozen=True)
class _Window:
    """What is trained on and what is not; of a log both are all of it."""

    number: int
    trained: Clicks
    heldout: Clicks
    num_rows: Mapping[str, int]
    """Of each target and profile."""


class ClickSource:
    """Endless batches of clicks.

    Args:
        data: Path, batch size, rows and the longest history.
        seed: Draws generated clicks, negatives and samples without an order.
        most_samples: Of a large file in memory, unless one of its row groups has more.

    Raises:
        InputError: If the file cannot be used.
    """

    def __init__(self, data: DataConfig, seed: int, *, most_samples: int = MOST_SAMPLES) -> None:
        self._data, self._seed = data, seed
        self._file: _ClickWindows = _Generated(seed)
        if data.path is not None:
            self._file = ClickFile(data.path, most_samples)
        self._held = self._prepare(0)
        first = self._held.trained
        self._in_time_order = first.in_time_order
        self._targets, self._profiles = tuple(first.targets), tuple(first.profiles)
        self._num_rows = self._held.num_rows
        if self._file.num_windows > 1:
            most = data.max_rows
            self._num_rows = {of: min(most, self._file.num_rows(of)) for of in self._num_rows}

    @property
    def columns(self) -> Mapping[str, tuple[str, ...]]:
        """Columns of ids by role."""
        return {
            "fields": (*self._profiles, *self._targets),
            "target": self._targets,
            "profile": self._profiles,
            "history": tuple(map(history_of, self._targets)),
            "negatives": tuple(map(negatives_of, self._targets)),
        }

    @property
    def num_rows(self) -> Mapping[str, int]:
        """Rows that the ids of each column need."""
        rows = dict(self._num_rows)
        for role in ("history", "negatives"):
            rows |= dict(zip(self.columns[role], (rows[target] for target in self._targets)))
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
        global_size = world_size * self._data.batch_size
        steps = [
            max(1, self._file.num_samples(number) // global_size)
            for number in range(self._first_trained, self._file.num_windows)
        ]
        starts = [0, *itertools.accumulate(steps)]
        for step in itertools.count(start_step):
            place = bisect_right(starts, step % starts[-1]) - 1
            trained = self._window(self._first_trained + place).trained
            if self._in_time_order and len(steps) > 1:
                step = step % starts[-1] - starts[place]
            yield trained.batch(self._shares(trained, world_size).samples(TRAIN, rank, step))

    def heldout(self, rank: int, world_size: int) -> Iterator[Batch]:
        """This rank's share of the samples that training never sees.

        Raises:
            InputError: If there are fewer than ``heldout_steps`` global batches.
        """
        global_size = world_size * self._data.batch_size
        needed, numbers = self._data.heldout_steps, self._heldout_windows
        steps = [self._num_heldout(number) // global_size for number in numbers]
        if sum(steps) < needed:
            there = sum(self._num_heldout(number) for number in numbers)
            raise InputError(
                f"{self._data.path or 'the generated clicks'}: {there:,} samples can be held out, "
                f"but {needed * global_size:,} are needed (heldout_steps x ranks x batch_size); "
                "lower batch_size or heldout_steps, or give a larger file"
            )
        places = ((number, step) for number, of in zip(numbers, steps) for step in range(of))
        for number, step in itertools.islice(places, needed):
            heldout = self._window(number).heldout
            yield heldout.batch(self._heldout_samples(heldout, rank, step, world_size))

    @property
    def _first_trained(self) -> int:
        """The first window that is trained on."""
        return self._file.num_windows // 2 if self._in_time_order else 0

    @property
    def _heldout_windows(self) -> Sequence[int]:
        """Windows that samples are held out of, the nearest to those trained on first."""
        if self._in_time_order and self._file.num_windows > 1:
            return range(self._first_trained)[::-1]
        return range(self._file.num_windows)

    def _window(self, number: int) -> _Window:
        """One part, the only one in memory."""
        if self._held.number != number:
            self._held = self._prepare(number)
        return self._held

    def _prepare(self, number: int) -> _Window:
        clicks = self._file.window(number).hashed(self._data.max_rows)
        clicks = clicks.latest(self._data.max_history).with_negatives(self._seed)
        if self._data.labels == "co_action":
            clicks = with_co_action_labels(clicks, self._seed, number)
        num_rows = {of: clicks.num_rows(of) for of in (*clicks.profiles, *clicks.targets)}
        if clicks.in_time_order:
            return _Window(number, clicks, clicks, num_rows)
        is_heldout = self._lots(number)
        trained, heldout = np.flatnonzero(~is_heldout), np.flatnonzero(is_heldout)
        return _Window(number, clicks.of(trained), clicks.of(heldout), num_rows)

    def _lots(self, number: int) -> NDArray[np.bool_]:
        """Which samples of a part without an order are held out."""
        rng = np.random.default_rng([self._seed, _LOT, *([number] if number else [])])
        drawn: NDArray[np.bool_] = rng.random(self._file.num_samples(number)) < _HELDOUT_SHARE
        return drawn

    def _num_heldout(self, number: int) -> int:
        if self._in_time_order and self._file.num_windows > 1:
            return self._file.num_samples(number) // 2  # a click has a sample of its own, at least
        if self._in_time_order:
            return len(self._window(number).heldout) // 2
        return int(self._lots(number).sum())

    def _heldout_samples(self, heldout: Clicks, rank: int, step: int, world_size: int) -> Ids:
        if self._in_time_order:
            return self._shares(heldout, world_size).samples(HELDOUT, rank, step)
        first = (step * world_size + rank) * self._data.batch_size
        return np.arange(first, first + self._data.batch_size)

    def _shares(self, clicks: Clicks, world_size: int) -> Shares:
        return Shares(
            num_samples=len(clicks),
            in_time_order=self._in_time_order,
            batch_size=self._data.batch_size,
            world_size=world_size,
            seed=self._seed,
            start=len(clicks) // 2 if self._file.num_windows == 1 else 0,
        )


class _Generated:
    """A generated log, in one part."""

    num_windows = 1

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def num_samples(self, number: int) -> int:
        return _GENERATED_CLICKS

    def window(self, number: int) -> Clicks:
        log = generate_log(_GENERATED_CLICKS, seed=self._seed)
        return samples_of_log(
            log, user="user", targets=("item", "category"), profiles=("user", "device")
        )

    def num_rows(self, column: str) -> int:
        return self.window(0).num_rows(column)
