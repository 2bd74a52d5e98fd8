"""What is written is read back; a file that is not such statistics is refused, saying why."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given

from tests.frequency.samples import ROWS, make_stats, stats_of
from torchrec_picasso.errors import PicassoError
from torchrec_picasso.frequency import FrequencyStats

SOME = make_stats(ROWS, {"large": {4: 4, 30: 1}, "small": {0: 2}})
METADATA_KEY = b"torchrec_picasso.frequency_stats"


@given(stats_of(ROWS))
def test_round_trip(stats: FrequencyStats) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "stats.parquet"
        stats.to_parquet(path)
        read = FrequencyStats.from_parquet(str(path))
    assert read == stats
    assert list(read.tables) == list(stats.tables)


def test_no_tables_at_all(tmp_path: Path) -> None:
    nothing = FrequencyStats(tables={})
    nothing.to_parquet(tmp_path / "nothing.parquet")
    assert FrequencyStats.from_parquet(tmp_path / "nothing.parquet") == nothing


def test_any_tool_reads_the_columns(tmp_path: Path) -> None:
    SOME.to_parquet(tmp_path / "some.parquet")
    frame = pq.read_table(tmp_path / "some.parquet").to_pandas()
    assert list(frame.columns) == ["table", "row", "count"]
    assert frame["count"].sum() == 7


def test_writing_replaces_whole_files_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "stats.parquet"
    SOME.to_parquet(path)
    before = path.read_bytes()

    def fail(_: pa.Table, where: Path) -> None:
        where.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(pq, "write_table", fail)
    with pytest.raises(OSError, match="disk full"):
        make_stats(ROWS, {}).to_parquet(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_writing_into_no_folder(tmp_path: Path) -> None:
    with pytest.raises(PicassoError, match="its folder does not exist"):
        SOME.to_parquet(tmp_path / "none" / "stats.parquet")


def refused(path: Path) -> str:
    with pytest.raises(PicassoError) as caught:
        FrequencyStats.from_parquet(path)
    message = str(caught.value)
    assert str(path) in message
    assert "write it with FrequencyStats.to_parquet" in message
    return message


def test_files_that_are_no_parquet(tmp_path: Path) -> None:
    path = tmp_path / "stats.parquet"
    assert "there is no statistics file" in refused(path)
    assert "there is no statistics file" in refused(tmp_path)
    path.touch()
    assert "is empty (0 bytes)" in refused(path)
    path.write_text("table,row,count\n" * 9)
    assert "cannot be read as Parquet" in refused(path)
    SOME.to_parquet(path)
    path.write_bytes(path.read_bytes()[:-20])
    assert "cannot be read as Parquet" in refused(path)


def rewrite(path: Path, **columns: list[object]) -> Path:
    """Statistics whose columns are replaced and whose metadata is kept."""
    SOME.to_parquet(path)
    metadata = pq.read_schema(path).metadata
    facts = {METADATA_KEY: metadata[METADATA_KEY]}
    whole = {"table": ["large", "large", "small"], "row": [4, 30, 0], "count": [4, 1, 2]}
    pq.write_table(pa.table({**whole, **columns}).replace_schema_metadata(facts), path)
    return path


def test_a_foreign_writer_may_choose_its_types_and_order(tmp_path: Path) -> None:
    path = rewrite(
        tmp_path / "s.parquet",
        table=["large", "small", "large"],
        row=pa.array([30, 0, 4], pa.int32()),
        count=pa.array([1, 2, 4], pa.uint32()),
    )
    assert FrequencyStats.from_parquet(path) == SOME


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"row": [4, 40, 0]}, "table 'large' .* has row 40, expected 0..39"),
        ({"row": [4, -1, 0]}, "table 'large' .* has row -1, expected 0..39"),
        ({"row": [4, 4, 0]}, "table 'large' .* has row 4 twice"),
        ({"count": [4, 1, 0]}, "table 'small' .* has count 0, expected more than 0"),
        ({"table": ["large", "large", "new"]}, "counts rows of table 'new', .*not describe"),
        ({"row": [4.0, 30.0, 0.0]}, "column 'row' .* is double with 0 nulls"),
        ({"count": [4, None, 2]}, "column 'count' .* is int64 with 1 nulls"),
    ],
)
def test_wrong_lines_are_named(
    tmp_path: Path, columns: dict[str, list[object]], message: str
) -> None:
    path = rewrite(tmp_path / "stats.parquet", **columns)
    with pytest.raises(PicassoError, match=message):
        FrequencyStats.from_parquet(path)


def test_columns_and_facts_must_be_there(tmp_path: Path) -> None:
    path = tmp_path / "stats.parquet"
    pq.write_table(pa.table({"table": ["a"], "id": [1]}), path)
    assert "lacks columns ['row', 'count']; it has ['table', 'id']" in refused(path)
    SOME.to_frame().to_parquet(path)
    assert "does not say how many rows" in refused(path)
    newer = pa.table({"table": ["a"], "row": [1], "count": [1]}).replace_schema_metadata(
        {METADATA_KEY: '{"format_version": 2}'}
    )
    pq.write_table(newer, path)
    with pytest.raises(PicassoError, match="has format version 2, expected 1"):
        FrequencyStats.from_parquet(path)
