"""Clicks as endless batches: read from a Parquet file, or generated.

Samples in time order are trained on from the middle on, where users have histories, and held out
from before the middle. Of samples without order a random tenth is held out; batches of the others
are drawn with replacement.

A large file is in memory one window at a time: each window serves as many steps as it has samples
for, then the next window, and after the last the first again. For a log, windows of the second half
are trained on, and windows of the first half held out.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from torchrec.datasets.utils import Batch

from torchrec_picasso.app.config import DataConfig
from torchrec_picasso.app.zoo.data.click_files import MOST_SAMPLES, ClickFile, is_log
from torchrec_picasso.app.zoo.data.click_log import generate_log, samples_of_log
from torchrec_picasso.app.zoo.data.clicks import Clicks, history_of, negatives_of
from torchrec_picasso.app.zoo.data.co_action_teacher import with_co_action_labels
from torchrec_picasso.app.zoo.data.history import Ids
from torchrec_picasso.app.zoo.data.shares import HELDOUT, TRAIN, Shares
from torchrec_picasso.app.zoo.data.stream import Stream
from torchrec_picasso.errors import InputError

_GENERATED_CLICKS, _GENERATED_ITEMS = 40_000, 5_000
"""In a log of histories of up to 50 clicks; longer ones need as many times more."""
_GENERATED_HISTORY = 50
_HELDOUT_SHARE = 0.1
_HELDOUT_STREAM = 7  # random stream
_CANDIDATES = 4


class _GeneratedFile:
    """A generated log with the interface of :class:`ClickFile`, in one window."""

    num_windows = 1

    def __init__(self, seed: int, num_candidates: int | None, max_history: int) -> None:
        self._seed, self._num_candidates = seed, num_candidates
        self._most = max(max_history, _GENERATED_HISTORY)
        self._times = self._most / _GENERATED_HISTORY

    def num_samples(self, number: int) -> int:
        return int(_GENERATED_CLICKS * self._times)

    def window(self, number: int) -> Clicks:
        is_stream = self._num_candidates is not None
        return samples_of_log(
            generate_log(
                self.num_samples(number),
                num_items=int(_GENERATED_ITEMS * self._times),
                seed=self._seed,
                in_visits=is_stream,
            ),
            most=self._most,
            user="user",
            targets=("item", "category"),
            profiles=("user", "device"),
            num_candidates=self._num_candidates,
            crosses={"category_user": ("category", "user"), "item_device": ("item", "device")},
        )

    def num_rows(self, column: str) -> int:
        return self.window(0).num_rows(column)


@dataclass(frozen=True)
class _Window:
    """Trained and held-out samples; for a log both are the whole window."""

    number: int
    trained: Clicks
    heldout: Clicks
    num_rows: Mapping[str, int]
    """Rows that the ids of each target and profile need."""


class ClickSource:
    """Endless batches of clicks.

    Args:
        data: Path, batch size, rows and the longest history.
        seed: Seed of generated clicks, negatives and samples without order.
        most_samples: Most samples of a window, unless one row group has more.

    Raises:
        InputError: If the file cannot be used.
    """

    def __init__(self, data: DataConfig, seed: int, *, most_samples: int = MOST_SAMPLES) -> None:
        self._data, self._seed = data, seed
        self.num_candidates = _num_candidates(data) if data.kind == "stream" else None
        self.num_tasks, self.num_dense = data.num_tasks, 1  # a zero
        if self.num_candidates is not None:
            self.num_dense = data.max_history
        self._file: ClickFile | _GeneratedFile = _GeneratedFile(
            seed, self.num_candidates, data.max_history
        )
        if data.path is not None:
            self._file = ClickFile(data.path, most_samples, self.num_candidates)
        self._is_windowed = self._file.num_windows > 1
        self._current = self._prepare(0)
        first = self._current.trained
        self._in_time_order = first.in_time_order
        targets, profiles = tuple(first.targets), tuple(first.profiles)
        histories, negatives = tuple(map(history_of, targets)), tuple(map(negatives_of, targets))
        self.columns: dict[str, tuple[str, ...]] = {
            "fields": (*profiles, *targets),
            "target": targets,
            "profile": profiles,
            "history": histories,
            **({"negatives": negatives} if first.negatives else {}),
        }
        rows = dict(self._current.num_rows)
        if self._is_windowed:
            rows = {column: min(data.max_rows, self._file.num_rows(column)) for column in rows}
        for columns in (histories, negatives):
            rows |= {column: rows[target] for column, target in zip(columns, targets)}
        if isinstance(first, Stream):
            crossed, crossed_histories = tuple(first.crosses), tuple(map(history_of, first.crosses))
            self.columns |= {"cross": crossed, "cross_history": crossed_histories}
            rows |= dict.fromkeys((*crossed, *crossed_histories), data.cross_rows)
        self.num_rows: Mapping[str, int] = rows

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
        """This rank's share of the samples that are never trained on.

        Raises:
            InputError: If there are fewer than ``heldout_steps`` global batches.
        """
        global_size = world_size * self._data.batch_size
        needed, numbers = self._data.heldout_steps, self._heldout_windows
        steps = [self._num_heldout(number) // global_size for number in numbers]
        if sum(steps) < needed:
            available = sum(self._num_heldout(number) for number in numbers)
            raise InputError(
                f"{self._data.path or 'the generated clicks'}: {available:,} samples can be held "
                f"out, but {needed * global_size:,} are needed (heldout_steps x ranks x "
                "batch_size); lower batch_size or heldout_steps, or give a larger file"
            )
        places = (
            (number, step) for number, num_steps in zip(numbers, steps) for step in range(num_steps)
        )
        for number, step in itertools.islice(places, needed):
            heldout = self._window(number).heldout
            yield heldout.batch(self._heldout_samples(heldout, rank, step, world_size))

    def steps_in_order(self, world_size: int) -> int:
        """Steps in time order, of samples that are none of the steps before; 0 without order."""
        if not self._in_time_order:
            return 0
        global_size = world_size * self._data.batch_size
        numbers = range(self._first_trained, self._file.num_windows)
        if self._is_windowed and (self.num_candidates or 1) > 1:  # a sample is a click
            return sum(self._file.num_samples(number) // global_size for number in numbers)
        num_first = len(self._window(self._first_trained).trained)
        return (num_first if self._is_windowed else num_first // 2) // global_size

    @property
    def _first_trained(self) -> int:
        """The first window that is trained on."""
        return self._file.num_windows // 2 if self._in_time_order else 0

    @property
    def _heldout_windows(self) -> Sequence[int]:
        """Windows of held-out samples; for a log those next to the trained ones first."""
        if self._in_time_order and self._is_windowed:
            return range(self._first_trained)[::-1]
        return range(self._file.num_windows)

    def _window(self, number: int) -> _Window:
        """Reads a window, unless it is the one in memory."""
        if self._current.number != number:
            self._current = self._prepare(number)
        return self._current

    def _prepare(self, number: int) -> _Window:
        clicks = self._file.window(number).hashed(self._data.max_rows)
        clicks = clicks.latest(self._data.max_history)
        if isinstance(clicks, Stream):
            labels = clicks.clicked[..., : self.num_tasks]
            clicks = replace(clicks, clicked=labels, cross_rows=self._data.cross_rows)
        else:
            clicks = clicks.with_negatives(self._seed)
        if self._data.labels == "co_action":
            clicks = with_co_action_labels(clicks, self._seed, number)
        columns = (*clicks.profiles, *clicks.targets)
        num_rows = {column: clicks.num_rows(column) for column in columns}
        if clicks.in_time_order:
            return _Window(number, clicks, clicks, num_rows)
        is_heldout = self._is_heldout(number)
        trained, heldout = np.flatnonzero(~is_heldout), np.flatnonzero(is_heldout)
        return _Window(number, clicks.take(trained), clicks.take(heldout), num_rows)

    def _is_heldout(self, number: int) -> NDArray[np.bool_]:
        """Held-out samples of a window without order."""
        rng = np.random.default_rng([self._seed, _HELDOUT_STREAM, *([number] if number else [])])
        is_heldout: NDArray[np.bool_] = rng.random(self._file.num_samples(number)) < _HELDOUT_SHARE
        return is_heldout

    def _num_heldout(self, number: int) -> int:
        if not self._in_time_order:
            return int(self._is_heldout(number).sum())
        if self._is_windowed:
            return self._file.num_samples(number) // 2  # at least one sample per click
        return len(self._window(number).heldout) // 2

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
            start=0 if self._is_windowed else len(clicks) // 2,
        )


def _num_candidates(data: DataConfig) -> int:
    default = _CANDIDATES if data.path is None or is_log(data.path) else 1
    return default if data.num_candidates is None else data.num_candidates
