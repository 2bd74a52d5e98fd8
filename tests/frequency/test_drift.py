"""How fast hot sets go stale: known answers of made streams, and a real one's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from torchrec_picasso.errors import InputError
from torchrec_picasso.frequency import ModelTable
from torchrec_picasso.frequency.drift import DriftReport, drift_of_windows, measure_drift
from torchrec_picasso.frequency.windows import read_windows

Chunks = Iterator[tuple[float, dict[str, Tensor]]]


def fading(halves_every: float, num_windows: int, num_new: int = 5, window: float = 1.0) -> Chunks:
    """Each window brings new rows, looked up most; rows of age a are looked up 2 ** -a / t as much.

    The rows of ages 0 to 24 make a window, so all windows have the same number of lookups.
    """
    for number in range(num_windows):
        ids = [
            torch.arange(num_new).repeat(round(4096 * 0.5 ** (age / halves_every)))
            + (number - age + 24) * num_new
            for age in range(25)
        ]
        yield number * window, {"news": torch.cat(ids)}


def test_a_hot_set_that_halves_every_three_windows_is_half_gone_three_after_its_first() -> None:
    """It serves first at age 1, which is fresh; half of that is left at age 4."""
    report = measure_drift(fading(3.0, 20), 1.0, num_hot=5)
    kept = [of / report.coverage[0] for of in report.coverage]
    for age, share in enumerate(kept[:12], start=1):
        assert share == pytest.approx(0.5 ** ((age - 1) / 3), rel=0.01)
    assert report.half_life == pytest.approx(3, rel=0.01)
    assert report.coverage_fresh == pytest.approx([report.coverage[0]] * len(report.coverage))


@pytest.mark.parametrize("halves_every", [1.0, 2.5, 6.0])
def test_the_half_life_is_found_between_windows_too(halves_every: float) -> None:
    report = measure_drift(fading(halves_every, 20, window=0.5), 0.5, num_hot=5)
    assert report.half_life == pytest.approx(0.5 * halves_every, rel=0.03)


def test_a_stream_that_stays_the_same_has_no_half_life() -> None:
    ids = torch.arange(20).repeat_interleave(torch.arange(20))
    report = measure_drift(((t, {"a": ids}) for t in range(10)), 1.0, num_hot=5)
    assert report.half_life is None
    expected = sum(range(15, 20)) / sum(range(20))
    assert report.coverage == pytest.approx([expected] * 9)


def test_coverage_by_hand() -> None:
    """Row 1 is hot in window 0, row 2 in window 1, nothing lasts."""
    stream = [(0.0, [1, 1, 2]), (1.0, [2, 2, 1, 3]), (2.0, [1, 2, 2, 2, 3, 3, 3, 3])]
    report = measure_drift(((t, {"a": torch.tensor(ids)}) for t, ids in stream), 1.0, num_hot=1)
    # age 1: row 1 in window 1, row 2 in window 2; age 2: row 1 in window 2
    assert report.coverage == pytest.approx((4 / 12, 1 / 8))
    assert report.coverage_fresh == pytest.approx((4 / 12, 3 / 8))
    assert report.half_life == pytest.approx(0.5 / (1 - 1 / 3))
    frame = report.to_frame()
    assert list(frame.columns) == ["age", "coverage", "coverage_fresh"]
    assert frame["age"].tolist() == [1.0, 2.0]


def test_hot_rows_are_chosen_over_all_tables() -> None:
    """Rows of the same number in two tables are two rows."""
    chunk = {"a": torch.tensor([7, 7, 7]), "b": torch.tensor([7, 8])}
    report = measure_drift([(0.0, chunk), (1.0, chunk)], 1.0, num_hot=1)
    assert report.coverage == pytest.approx([3 / 5])


def test_a_longer_history_chooses_from_several_windows() -> None:
    """Row 0 is frequent in every window, but second to a row of that window alone."""
    chunks = [(float(t), {"a": torch.tensor([0] * 3 + [t + 1] * 4)}) for t in range(8)]
    short, long = (
        measure_drift(iter(chunks), 1.0, num_hot=1, num_history=history) for history in (1, 2)
    )
    assert short.coverage == pytest.approx([0.0] * 7)
    # the first hot set had one window to choose from
    assert long.coverage[0] == pytest.approx(6 / 7 * 3 / 7)


def test_no_hot_set_is_followed_longer_than_asked() -> None:
    report = measure_drift(fading(3.0, 12), 1.0, num_hot=5, max_age=4)
    assert len(report.coverage) == 4


def test_windows_without_lookups_are_passed_over() -> None:
    ids = {"a": torch.tensor([1, 1, 2])}
    none = {"a": torch.tensor([], dtype=torch.int64)}
    chunks = [(0.0, ids), (1.0, ids), (2.0, none), (6.0, ids), (7.0, ids)]
    report = measure_drift(chunks, 1.0, num_hot=1)
    assert len(report.coverage) == 7
    assert report.coverage == pytest.approx([2 / 3] * 7)


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        ([], "no two windows in a row have lookups"),
        ([(0.0, [1]), (0.5, [1])], "no two windows in a row have lookups"),
        ([(0.0, [1]), (2.0, [1])], "no two windows in a row have lookups.* longer window"),
        ([(3.0, [1]), (2.0, [1])], "time goes back by 1 windows"),
        ([(0.0, [-1])], "table 'a' has an id outside"),
        ([(0.0, [1 << 40])], "table 'a' has an id outside"),
    ],
)
def test_streams_that_say_nothing_are_refused(chunks: list[Any], message: str) -> None:
    stream = [(time, {"a": torch.tensor(ids)}) for time, ids in chunks]
    with pytest.raises(InputError, match=message):
        measure_drift(stream, 1.0, num_hot=1)


@pytest.mark.parametrize("name", ["num_hot", "num_history", "max_age"])
def test_numbers_are_at_least_one(name: str) -> None:
    numbers: dict[str, Any] = {"num_hot": 1, name: 0}
    with pytest.raises(InputError, match=f"{name} is 0, expected at least 1"):
        measure_drift([], 1.0, **numbers)


@pytest.mark.parametrize("window", [0.0, -1.0])
def test_a_window_has_a_length(window: float) -> None:
    with pytest.raises(InputError, match="expected a length of time above 0"):
        measure_drift([], window, num_hot=1)


def test_nothing_fresh_to_lose_has_no_half_life() -> None:
    report = DriftReport(window=1.0, num_hot=1, coverage=(0.0, 0.0), coverage_fresh=(0.0, 0.0))
    assert report.half_life is None


@pytest.mark.data
def test_hot_sets_of_real_news_are_half_gone_within_hours(globo_path: Path) -> None:
    table = ModelTable(name="article", num_embeddings=None, feature_names=("article",))
    pieces = read_windows(globo_path, [table], "ts_ms", 3600.0)
    report = drift_of_windows(pieces, 1.0, num_hot=25)  # about 1 % of its articles
    assert report.half_life is not None
    assert 1 < report.half_life < 24
    assert report.coverage[0] > 2 * report.coverage[-1]
