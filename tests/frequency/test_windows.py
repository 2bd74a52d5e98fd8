"""Streams are cut into windows of time, from memory and from files of every kind of time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchrec_picasso.errors import InputError
from torchrec_picasso.frequency import ModelTable
from torchrec_picasso.frequency.files import Reading
from torchrec_picasso.frequency.windows import TimedIds, cut_windows, read_windows

USER = ModelTable(name="users", num_embeddings=100, feature_names=("user",))


def write(path: Path, **columns: Any) -> Path:
    pq.write_table(pa.table(columns), path)
    return path


def by_window(pieces: Iterable[TimedIds], key: tuple[str, str]) -> dict[int, list[int]]:
    """Ids of one table and feature; a window may come in several pieces."""
    found: dict[int, list[int]] = defaultdict(list)
    for piece in pieces:
        assert all(number <= piece.window for number in found)
        found[piece.window] += piece.ids[key].tolist()
    return dict(found)


TIMES = st.lists(st.integers(0, 100), min_size=1, max_size=30).map(sorted)


@given(TIMES, st.sampled_from([1.0, 2.5, 7.0, 1000.0]), st.integers(1, 7))
def test_every_sample_is_in_the_window_of_its_time(
    tmp_path_factory: pytest.TempPathFactory, times: list[int], window: float, chunk_rows: int
) -> None:
    expected = defaultdict(list)
    for user, time in enumerate(times):
        expected[int(time // window)].append(user)
    chunks = [(time, {"users": torch.tensor([user])}) for user, time in enumerate(times)]
    assert by_window(cut_windows(chunks, window), ("users", "users")) == expected

    path = tmp_path_factory.mktemp("windows") / "a.parquet"
    write(path, at_s=times, user=list(range(len(times))))
    pieces = list(
        read_windows(path, [USER], "at_s", window, reading=Reading(chunk_rows=chunk_rows))
    )
    assert by_window(pieces, ("users", "user")) == expected
    assert sum(piece.num_samples for piece in pieces) == len(times)


SECOND_30 = {"s": 30, "ms": 30_000, "us": 30_000_000, "ns": 30_000_000_000}


@pytest.mark.parametrize("unit", SECOND_30)
@pytest.mark.parametrize("form", ["name", "argument", "timestamp", "float"])
def test_times_of_every_unit(tmp_path: Path, unit: str, form: str) -> None:
    values: Any = [0, SECOND_30[unit], 3 * SECOND_30[unit]]
    column, time_unit = "t", None
    if form == "timestamp":
        values = pa.array(values, pa.timestamp(unit))
    elif form == "float":
        values, time_unit = [float(value) for value in values], unit
    elif form == "argument":
        time_unit = unit
    else:
        column = f"ts_{unit}"
    path = write(tmp_path / "a.parquet", **{column: values}, user=[1, 2, 3])
    pieces = read_windows(path, [USER], column, 60.0, time_unit=time_unit)
    assert by_window(pieces, ("users", "user")) == {0: [1, 2], 1: [3]}


def test_files_follow_each_other_in_time(tmp_path: Path) -> None:
    paths = [
        write(tmp_path / "a.parquet", t_s=[0, 9], user=[1, 2]),
        write(tmp_path / "b.parquet", t_s=[9, 10], user=pa.array([[3], [4, 4]])),
    ]
    told: list[int] = []
    pieces = read_windows(paths, [USER], "t_s", 10.0, progress=told.append)
    assert by_window(pieces, ("users", "user")) == {0: [1, 2, 3], 1: [4, 4]}
    assert told == [2, 2]


def test_a_table_of_several_features_and_a_shared_feature(tmp_path: Path) -> None:
    tables = [
        ModelTable(name="a", num_embeddings=9, feature_names=("f", "g")),
        ModelTable(name="b", num_embeddings=9, feature_names=("g",)),
    ]
    path = write(tmp_path / "a.parquet", t_s=[5], f=[1], g=[2])
    (piece,) = read_windows(path, tables, "t_s", 1.0)
    found = {key: ids.tolist() for key, ids in piece.ids.items()}
    assert found == {("a", "f"): [1], ("a", "g"): [2], ("b", "g"): [2]}


def test_disorder_inside_a_window_is_no_matter(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", t_s=[9, 2, 5, 11, 10], user=[1, 2, 3, 4, 5])
    pieces = read_windows(path, [USER], "t_s", 10.0)
    assert by_window(pieces, ("users", "user")) == {0: [1, 2, 3], 1: [4, 5]}


def test_time_that_goes_back_is_refused(tmp_path: Path) -> None:
    ids = {"users": torch.tensor([1])}
    with pytest.raises(InputError, match="the chunks: time goes back by 2 windows; sort"):
        list(cut_windows([(35.0, ids), (19.0, ids)], 10.0))
    path = write(tmp_path / "a.parquet", t_s=[35, 19], user=[1, 2])
    with pytest.raises(InputError, match=r"a\.parquet, column t_s: time goes back by 2 windows"):
        list(read_windows(path, [USER], "t_s", 10.0))
    late = write(tmp_path / "b.parquet", t_s=[100], user=[1])
    early = write(tmp_path / "c.parquet", t_s=[5], user=[2])
    with pytest.raises(InputError, match=r"c\.parquet, .* by 10 windows.*files in order of time"):
        list(read_windows([late, early], [USER], "t_s", 10.0))


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        ("when", [1], "column when holds numbers of an unknown unit of time; say .* s, ms, us, ns"),
        ("t_s", pa.array([None], pa.int64()), "column t_s has nulls; every sample needs its time"),
        ("t_s", ["noon"], "column t_s holds string, expected numbers or times"),
        ("other", [1], "missing column t_s; the file has other, user"),
    ],
)
def test_columns_that_hold_no_time_are_refused(
    tmp_path: Path, column: str, values: Any, message: str
) -> None:
    path = write(tmp_path / "a.parquet", **{column: values}, user=[1])
    asked = "t_s" if column == "other" else column
    with pytest.raises(InputError, match=message):
        list(read_windows(path, [USER], asked, 10.0))


@pytest.mark.parametrize("window_s", [0.0, -1.0, float("nan")])
def test_a_window_has_a_length(tmp_path: Path, window_s: float) -> None:
    path = write(tmp_path / "a.parquet", t_s=[1], user=[1])
    with pytest.raises(InputError, match="expected a length of time above 0"):
        list(read_windows(path, [USER], "t_s", window_s))


def test_ids_are_checked_and_mapped_like_counted_ones(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", t_s=[1, 2], user=[100, None])
    with pytest.raises(InputError, match=r"column user holds id 100, .* table 'users' are 0\.\.99"):
        list(read_windows(path, [USER], "t_s", 10.0))
    reading = Reading(hash_ids=True, missing_id=-1)
    pieces = read_windows(path, [USER], "t_s", 10.0, reading=reading)
    assert by_window(pieces, ("users", "user")) == {0: [0, 99]}
