"""What is written is read back; a file that is not such statistics is refused, saying why."""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.frequency.samples import ROWS, TwoCollections, kjt, make_stats, stats_of
from tests.frequency.streams import HUGE, chunks_of, counted
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


@given(
    chunks_of(40),
    chunks_of(40),
    st.integers(1, 50),
    st.sampled_from([1, 0.5, 1e-3]),
    st.booleans(),
)
def test_heads_tails_and_decayed_counts_make_the_round_trip(
    counted_here: list[list[int]],
    merged_in: list[list[int]],
    max_rows: int,
    factor: float,
    later: bool,
) -> None:
    """Exact tables beside sampled ones, whole counts beside faded ones."""
    budget = {"max_rows_counted": max_rows, "max_rows_sampled": 8}
    one, two = (
        FrequencyStats(
            tables={"sampled": counted(chunks, HUGE, **budget), "dense": counted(chunks, 40)},
            num_batches=3,
            num_samples=9,
        )
        for chunks in (counted_here, merged_in)
    )
    stats = one.decayed(factor).merge(two if later else make_stats({"other": 3}, {"other": {1: 1}}))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "stats.parquet"
        stats.to_parquet(path)
        read = FrequencyStats.from_parquet(path)
        version = format_version(path)
    assert read == stats
    assert list(read.tables) == list(stats.tables)
    for name, counts in stats.tables.items():
        assert read.tables[name].counts_U.dtype == counts.counts_U.dtype
        assert read.tables[name].rows_U.dtype == counts.rows_U.dtype
        assert read.tables[name].is_exact == counts.is_exact
    is_plain = factor == 1 and all(counts.is_exact for counts in stats.tables.values())
    assert version == (1 if is_plain else 2)


def format_version(path: Path) -> int:
    version: int = json.loads(pq.read_schema(path).metadata[METADATA_KEY])["format_version"]
    return version


def test_samples_by_feature_make_the_round_trip(tmp_path: Path) -> None:
    batch = kjt(f0=[[0, 3], []], shared=[[9], [3]], f1=[[], []])
    stats = FrequencyStats.collect([batch], TwoCollections())
    stats.to_parquet(tmp_path / "stats.parquet")
    read = FrequencyStats.from_parquet(tmp_path / "stats.parquet")
    assert read == stats
    assert [read.pooling_factor(name) for name in ("f0", "shared", "f1")] == [1.0, 1.0, 0.0]


def test_a_tail_is_marked_for_any_tool(tmp_path: Path) -> None:
    counts = counted([[1, 1, 1, 2, 3]], HUGE, max_rows_counted=1)
    assert counts.tail is not None
    FrequencyStats(tables={"t": counts}).to_parquet(tmp_path / "stats.parquet")
    frame = pq.read_table(tmp_path / "stats.parquet").to_pandas()
    lines = frame[["row", "count", "in_tail"]].to_numpy().tolist()
    assert lines == [[1, 2, False], [1, 3, True], [2, 1, True], [3, 1, True]]


def test_statistics_of_the_first_release_are_read(tmp_path: Path) -> None:
    """Its metadata knows nothing of bounds, tails or samples by feature."""
    path = tmp_path / "stats.parquet"
    facts = {
        "format_version": 1,
        "num_batches": 2,
        "num_samples": 7,
        "tables": {
            name: {"num_embeddings": rows, "feature_names": ["f"]} for name, rows in ROWS.items()
        },
    }
    lines = pa.table({"table": ["large", "large", "small"], "row": [4, 30, 0], "count": [4, 1, 2]})
    pq.write_table(lines.replace_schema_metadata({METADATA_KEY: json.dumps(facts)}), path)
    assert FrequencyStats.from_parquet(path) == SOME


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
        ({"count": [4.0, math.inf, 2.0]}, "table 'large' .* has counts of inf together"),
        ({"count": [4.0, math.nan, 2.0]}, "table 'large' .* has count nan, expected more than 0"),
        ({"count": [4.5, 1.0, 2.0]}, "table 'large' .* has counts that are no whole numbers"),
        ({"table": [1, 1, 2]}, "column 'table' .* is int64 with 0 nulls, expected text"),
        ({"in_tail": [0, 0, 0]}, "column 'in_tail' .* is int64 .*, expected true or false"),
    ],
)
def test_wrong_lines_are_named(
    tmp_path: Path, columns: dict[str, list[object]], message: str
) -> None:
    path = rewrite(tmp_path / "stats.parquet", **columns)
    with pytest.raises(PicassoError, match=message):
        FrequencyStats.from_parquet(path)


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        (b"{", r"is no JSON \(JSONDecodeError\)"),
        (b"\xff", r"is no JSON \(UnicodeDecodeError\)"),
        (b"[" * 100_000, r"is no JSON \(RecursionError\)"),
        (b"[]", "is no mapping"),
        ({"tables": []}, r"stats\.parquet: tables is list \[\], expected a mapping of tables"),
        ({"num_samples": 10**400}, "num_samples is int, expected a number of at least 0"),
        ({"num_batches": math.nan}, "num_batches is float nan, expected a number of at least 0"),
        ({"tables": {"large": 1}}, "table 'large': expected a mapping of facts"),
        ({"tables": {"large": {"num_embeddings": 3}}}, "'large': feature_names is missing"),
        (("feature_names", "f"), "feature_names is str 'f', expected a list of names"),
        (("num_embeddings", -1), "num_embeddings is int -1, expected a whole number above 0"),
        (("tail_level", 64), "tail_level is int 64, expected a whole number up to 63"),
        (("feature_lookups", [1, 2, 3]), "feature_lookups has 3 numbers for 1 features"),
        (("feature_bags", [1]), "feature_lookups is missing, which feature_bags needs"),
        (("feature_bags", [1e-320]), "feature_bags is list .*, expected a list of numbers"),
        (("persistence", [1]), "persistence is list .*, expected a list of 4 numbers"),
    ],
)
def test_wrong_facts_are_named(tmp_path: Path, facts: object, message: str) -> None:
    path = tmp_path / "stats.parquet"
    SOME.to_parquet(path)
    table = pq.read_table(path)
    document = json.loads(table.schema.metadata[METADATA_KEY])
    if isinstance(facts, tuple):
        document["tables"]["large"].pop("feature_lookups", None)
        document["tables"]["large"].pop("feature_bags", None)
        document["tables"]["large"] |= {"feature_names": ["f"], facts[0]: facts[1]}
    elif isinstance(facts, dict):
        document |= facts
    written = facts if isinstance(facts, bytes) else json.dumps(document)
    pq.write_table(table.replace_schema_metadata({METADATA_KEY: written}), path)
    with pytest.raises(PicassoError, match=message):
        FrequencyStats.from_parquet(path)


def test_columns_and_facts_must_be_there(tmp_path: Path) -> None:
    path = tmp_path / "stats.parquet"
    pq.write_table(pa.table({"table": ["a"], "id": [1]}), path)
    assert "lacks columns ['row', 'count']; it has ['table', 'id']" in refused(path)
    SOME.to_frame().to_parquet(path)
    assert "does not say how many rows" in refused(path)
    newer = pa.table({"table": ["a"], "row": [1], "count": [1]}).replace_schema_metadata(
        {METADATA_KEY: '{"format_version": 3}'}
    )
    pq.write_table(newer, path)
    with pytest.raises(PicassoError, match="has format version 3, expected 1 or 2"):
        FrequencyStats.from_parquet(path)
