"""What is written is read back; a file that is not such statistics is refused, saying why."""

import json
import math
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.frequency.samples import HUGE, ROWS, chunks_of, counted, make_stats, stats_of
from tests.support.refusals import refusal
from torchrec_picasso.errors import InputError
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


@given(chunks_of(40), st.integers(1, 50))
def test_heavy_hitters_make_the_round_trip_beside_exact_counts(
    chunks: list[list[int]], max_rows: int
) -> None:
    tables = {
        "heavy": counted(chunks, HUGE, max_rows_counted=max_rows),
        "exact": counted(chunks, 40),
    }
    stats = FrequencyStats(tables=tables, num_batches=3, num_samples=9)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "stats.parquet"
        stats.to_parquet(path)
        assert FrequencyStats.from_parquet(path) == stats


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
    with pytest.raises(InputError, match="its folder does not exist"):
        SOME.to_parquet(tmp_path / "none" / "stats.parquet")


def refused(path: Path) -> str:
    message = refusal(InputError, FrequencyStats.from_parquet, path)
    assert message.startswith(f"{path} does not contain frequency statistics (")
    assert message.endswith("write it with FrequencyStats.to_parquet")
    return message


def test_files_that_are_no_parquet(tmp_path: Path) -> None:
    path = tmp_path / "stats.parquet"
    for missing in (path, tmp_path):
        with pytest.raises(InputError, match=f"there is no statistics file {missing}"):
            FrequencyStats.from_parquet(missing)
    path.touch()
    refused(path)
    path.write_text("table,row,count\n" * 9)
    refused(path)
    SOME.to_parquet(path)
    path.write_bytes(path.read_bytes()[:-20])
    refused(path)


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
    ("columns", "reason"),
    [
        ({"row": [4, 40, 0]}, "a row is outside its table"),
        ({"row": [4, -1, 0]}, "a row is outside its table"),
        ({"row": [4, 4, 0]}, "a row has two lines"),
        ({"row": [4.5, 30.0, 0.0]}, "truncated"),
        ({"row": [4, None, 0]}, ""),
        ({"count": [4, 1, 0]}, "a count is not above 0"),
        ({"count": [4, None, 2]}, ""),
        ({"count": [4.0, math.nan, 2.0]}, ""),
        ({"count": [1 << 62, 1 << 62, 2]}, "the sum of counts is 2**53 or more"),
        ({"table": ["large", "large", "new"]}, "a line names a table that the metadata lacks"),
        ({"table": ["large", "large", None]}, "a line names a table that the metadata lacks"),
        ({"table": [[1], [1], [2]]}, ""),
    ],
)
def test_wrong_lines_are_refused(
    tmp_path: Path, columns: dict[str, list[object]], reason: str
) -> None:
    assert reason in refused(rewrite(tmp_path / "stats.parquet", **columns))


@pytest.mark.parametrize(
    "facts",
    [
        *(b"{", b"\xff", b"[" * 100_000, b"[]", {"tables": []}),
        *({"num_samples": math.inf}, {"num_batches": -1}, {"tables": {"large": 1}}),
        *(("feature_names", None), ("num_embeddings", -1), ("num_embeddings", 10**400)),
        *(("num_embeddings", math.nan), ("max_undercount", math.nan)),
        *(("effective_share", 0), ("effective_share", 1.5), ("effective_share", None)),
        *(("max_undercount", -1), ("max_undercount", "x"), ("max_undercount", 1)),
    ],
    ids=lambda facts: str(facts)[:30],
)
def test_wrong_facts_are_refused(tmp_path: Path, facts: object) -> None:
    path = tmp_path / "stats.parquet"
    SOME.to_parquet(path)
    table = pq.read_table(path)
    document = json.loads(table.schema.metadata[METADATA_KEY])
    if isinstance(facts, tuple):
        document["tables"]["large"][facts[0]] = facts[1]
    elif isinstance(facts, dict):
        document |= facts
    written = facts if isinstance(facts, bytes) else json.dumps(document)
    pq.write_table(table.replace_schema_metadata({METADATA_KEY: written}), path)
    refused(path)


def test_columns_and_facts_must_be_there(tmp_path: Path) -> None:
    path = tmp_path / "stats.parquet"
    pq.write_table(pq.read_table(rewrite(path)).drop_columns(["row"]), path)
    assert "row" in refused(path)
    SOME.to_frame().to_parquet(path)
    assert "torchrec_picasso.frequency_stats" in refused(path)
