"""Ids are read from Parquet files of every kind; what cannot be used is refused by name. What
statistics are written is read back; a file that is not such statistics is refused, saying why."""

import json
import math
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.frequency import samples
from tests.support.refusals import refusal
from tests.support.tables import Table, bags_of
from torchrec_picasso.errors import InputError, PicassoError
from torchrec_picasso.frequency import FrequencyStats, ModelTable, collect

USER = ModelTable(name="users", num_embeddings=100, feature_names=("user",))
ITEM = ModelTable(name="goods", num_embeddings=50, feature_names=("item", "liked"))


def write(path: Path, row_group_size: int | None = None, **columns: Any) -> Path:
    pq.write_table(pa.table(columns), path, row_group_size=row_group_size)
    return path


def counts_of(path: Path | list[Path], table: ModelTable, **how: Any) -> dict[int, int]:
    return samples.as_dict(FrequencyStats.from_files(path, [table], **how).tables[table.name])


def refused(path: Path | list[Path], table: ModelTable = USER, **how: Any) -> str:
    return refusal(InputError, FrequencyStats.from_files, path, [table], **how)


INTEGERS = [pa.int8(), pa.uint8(), pa.int16(), pa.int32(), pa.uint32(), pa.int64(), pa.uint64()]


@pytest.mark.parametrize("kind", INTEGERS, ids=str)
@pytest.mark.parametrize("num_embeddings", [100, None])
def test_integers_of_every_width(tmp_path: Path, kind: Any, num_embeddings: int | None) -> None:
    path = write(tmp_path / "a.parquet", user=pa.array([3, 99, 3], kind))
    table = ModelTable(name="t", num_embeddings=num_embeddings, feature_names=("user",))
    assert counts_of(path, table) == {3: 2, 99: 1}
    assert counts_of(path, table, hash_ids=True) == {3: 2, 99: 1}


@pytest.mark.parametrize(
    "kind", [pa.list_(pa.int32()), pa.large_list(pa.int64()), pa.list_(pa.int64(), 2)], ids=str
)
def test_lists_of_every_kind(tmp_path: Path, kind: Any) -> None:
    path = write(tmp_path / "a.parquet", user=pa.array([[3, 4], None, [4, 9]], kind))
    stats = FrequencyStats.from_files(path, [USER])
    assert samples.as_dict(stats.tables["users"]) == {3: 1, 4: 2, 9: 1}
    assert stats.num_samples == 3


def test_lists_may_be_empty_and_hold_nulls(tmp_path: Path) -> None:
    user = pa.array([[], [None, 7], [7]], pa.list_(pa.int64()))
    path = write(tmp_path / "a.parquet", user=user)
    assert counts_of(path, USER) == {7: 2}
    assert counts_of(path, USER, missing_id=0) == {0: 1, 7: 2}


@pytest.mark.parametrize("kind", [pa.int8(), pa.int32(), pa.int64(), pa.uint64()], ids=str)
def test_a_null_is_no_lookup_or_the_missing_id(tmp_path: Path, kind: Any) -> None:
    path = write(tmp_path / "a.parquet", user=pa.array([None, 5, None, None], kind))
    assert counts_of(path, USER) == {5: 1}
    assert counts_of(path, USER, missing_id=8) == {5: 1, 8: 3}
    # as training maps a missing id: to the last row
    assert counts_of(path, USER, missing_id=-1, hash_ids=True) == {5: 1, 99: 3}


def test_hashed_ids_are_taken_modulo_the_rows(tmp_path: Path) -> None:
    ids = [-1, 100, 250, (1 << 62) + 5]  # rows 99, 0, 50 and 9
    path = write(tmp_path / "a.parquet", user=ids)
    assert counts_of(path, USER, hash_ids=True) == {0: 1, 9: 1, 50: 1, 99: 1}


def test_other_columns_are_not_even_decoded(tmp_path: Path) -> None:
    """A file may hold strings, structs and broken pages beside the ids."""
    path = write(
        tmp_path / "a.parquet",
        text=["x" * 1000] * 3,
        point=pa.array([{"x": 1.0}] * 3, pa.struct([("x", pa.float64())])),
        score=[0.5, None, 1.0],
        user=[1, 2, 1],
    )
    content = path.read_bytes()
    place = content.index(b"x" * 1000)
    path.write_bytes(content[:place] + b"\0" * 1000 + content[place + 1000 :])
    assert counts_of(path, USER) == {1: 2, 2: 1}


def test_tables_without_a_size_get_the_fewest_rows_that_do(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", user=[4, 1 << 33], none=pa.array([None, None], pa.int64()))
    tables = [
        ModelTable(name=name, num_embeddings=None, feature_names=(name,))
        for name in ("user", "none")
    ]
    stats = FrequencyStats.from_files(path, tables)
    sizes = {name: counts.num_embeddings for name, counts in stats.tables.items()}
    assert sizes == {"user": (1 << 33) + 1, "none": 0}


BAGS = st.lists(st.lists(st.integers(0, 49), max_size=3), min_size=1, max_size=9)


@given(BAGS, BAGS, st.integers(1, 10))
def test_files_count_as_the_same_batches_do(
    tmp_path_factory: pytest.TempPathFactory,
    item: list[list[int]],
    liked: list[list[int]],
    chunk_rows: int,
) -> None:
    num_samples = min(len(item), len(liked))
    bags = {"item": item[:num_samples], "liked": liked[:num_samples]}
    path = tmp_path_factory.mktemp("files") / "a.parquet"
    kind = pa.list_(pa.int64())
    write(path, 4, **{name: pa.array(lists, kind) for name, lists in bags.items()})
    model = bags_of([Table("goods", 4, 50, ("item", "liked"))], "meta")
    collected = FrequencyStats.collect([samples.kjt(**bags)], model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collect, "CHUNK_ROWS", chunk_rows)
        read = FrequencyStats.from_files(path, [ITEM])
    assert read.tables == collected.tables
    assert read.num_samples == collected.num_samples == num_samples


def test_several_files_count_like_one(tmp_path: Path) -> None:
    user = np.random.default_rng(0).integers(0, 100, 50)
    whole = write(tmp_path / "whole.parquet", user=user)
    parts = [
        write(tmp_path / f"{start}.parquet", user=pa.array(user[start : start + 20], kind))
        for start, kind in ((0, pa.int64()), (20, pa.int16()), (40, pa.uint64()), (50, pa.int8()))
    ]
    assert FrequencyStats.from_files(parts, [USER]) == FrequencyStats.from_files(str(whole), [USER])


def test_progress_is_told_every_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collect, "CHUNK_ROWS", 4)
    path = write(tmp_path / "a.parquet", user=list(range(10)))
    counts: list[int] = []
    FrequencyStats.from_files(path, [USER], progress=counts.append)
    assert counts == [4, 4, 2]


@pytest.mark.parametrize("wrong", [100, -3])
def test_an_id_outside_its_table_is_refused(tmp_path: Path, wrong: int) -> None:
    path = write(tmp_path / "a.parquet", user=[0, wrong])
    message = refused(path)
    assert message.startswith(f"{path}: column user holds id {wrong}, but the rows of table")
    assert message.endswith(
        "'users' are 0..99; give the table more rows, or take ids modulo the rows"
    )


def test_a_negative_id_is_refused_of_a_table_without_a_size(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", user=[1, -1])
    table = ModelTable(name="users", num_embeddings=None, feature_names=("user",))
    assert "holds id -1, but the rows of table 'users' are 0 and up" in refused(path, table)


def test_an_unsigned_id_that_no_int64_holds_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", user=pa.array([1, 1 << 63], pa.uint64()))
    for hash_ids in (False, True):
        message = refused(path, hash_ids=hash_ids)
        assert message.startswith(f"{path}: column user holds an id of 2**63 or more")
        assert message.endswith("convert its ids to int64 first")


@pytest.mark.parametrize(
    "values",
    [
        pa.array([0.5]),
        pa.array(["a"]),
        pa.array([True]),
        pa.array([[0.5]]),
        pa.array([[[1]]]),
        pa.array(["a"]).dictionary_encode(),
    ],
    ids=lambda values: str(values.type).replace(" ", ""),
)
def test_a_column_of_something_else_is_refused(tmp_path: Path, values: pa.Array) -> None:
    path = write(tmp_path / "a.parquet", user=values)
    message = refused(path)
    assert message.startswith(f"{path}: column user holds ")
    assert "expected integers or lists of integers" in message


def test_a_missing_column_is_named_before_anything_is_counted(tmp_path: Path) -> None:
    good = write(tmp_path / "a.parquet", user=[1], item=[2])
    bad = write(tmp_path / "b.parquet", item=[2], price=[3])
    counts: list[int] = []
    message = refused([good, bad], progress=counts.append)
    assert message.startswith(f"{bad}: missing column user; the file has item, price")
    assert not counts


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    assert refused(path) == f"{path}: no such file; name Parquet files, not folders"
    assert refused(tmp_path) == f"{tmp_path}: no such file; name Parquet files, not folders"
    path.touch()
    assert refused(path) == f"{path}: the file is empty (0 bytes); expected Parquet"
    path.write_text("user\n1\n" * 10)
    assert refused(path).startswith(f"{path}: not readable as Parquet (")
    assert refused([]) == "no data files were given; name at least one Parquet file"


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", user=np.random.default_rng(0).integers(0, 99, 5000))
    content = bytearray(path.read_bytes())
    content[4:200] = b"\xff" * 196  # the first page's header
    path.write_bytes(content)
    assert refused(path).startswith(f"{path}: damaged Parquet file (")


@pytest.mark.parametrize("value", [0, -1, 1.5, True])
def test_a_memory_budget_is_a_positive_integer(tmp_path: Path, value: Any) -> None:
    path = write(tmp_path / "a.parquet", user=[1])
    with pytest.raises(PicassoError, match=f"max_rows_counted is {value}, expected an integer of"):
        FrequencyStats.from_files(path, [USER], max_rows_counted=value)


SOME = samples.make_stats(samples.ROWS, {"large": {4: 4, 30: 1}, "small": {0: 2}})
METADATA_KEY = b"torchrec_picasso.frequency_stats"


@given(samples.chunks_of(40), st.integers(1, 50))
def test_round_trip(chunks: list[list[int]], max_rows: int) -> None:
    tables = {
        "heavy": samples.counted(chunks, samples.HUGE, max_rows_counted=max_rows),
        "exact": samples.counted(chunks, 40),
    }
    stats = FrequencyStats(tables=tables, num_batches=3, num_samples=9)
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
        samples.make_stats(samples.ROWS, {}).to_parquet(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_writing_into_no_folder(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="its folder does not exist"):
        SOME.to_parquet(tmp_path / "none" / "stats.parquet")


def refused_statistics(path: Path) -> str:
    message = refusal(InputError, FrequencyStats.from_parquet, path)
    assert message.startswith(f"{path} does not contain frequency statistics (")
    assert message.endswith("write it with `torchrec-picasso stats` or FrequencyStats.to_parquet")
    return message


def test_files_that_are_no_parquet(tmp_path: Path) -> None:
    path = tmp_path / "stats.parquet"
    for missing in (path, tmp_path):
        with pytest.raises(InputError, match=f"there is no statistics file {missing}"):
            FrequencyStats.from_parquet(missing)
    path.touch()
    refused_statistics(path)
    path.write_text("table,row,count\n" * 9)
    refused_statistics(path)
    SOME.to_parquet(path)
    path.write_bytes(path.read_bytes()[:-20])
    refused_statistics(path)


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
def test_wrong_lines_are_refused(tmp_path: Path, columns: dict[str, list], reason: str) -> None:
    assert reason in refused_statistics(rewrite(tmp_path / "stats.parquet", **columns))


@pytest.mark.parametrize(
    "facts",
    [
        *(b"{", b"\xff", b"[" * 100_000, b"[]", {"tables": []}),
        *({"num_samples": math.inf}, {"num_batches": -1}, {"tables": {"large": 1}}),
        *(("feature_names", None), ("num_embeddings", -1), ("num_embeddings", 10**400)),
        *(("num_embeddings", math.nan), ("max_undercount", math.nan)),
        *(("effective_share", 0), ("effective_share", 1.5), ("effective_share", None)),
        *(("max_undercount", -1), ("max_undercount", "x"), ("max_undercount", 1)),
        *(("halves", [[1] * 64]), ("halves", [[1], [1]]), ("halves", [[-1] * 64] * 2)),
        *(("halves", [[], []]), ("halves", 1), ("halves", [["x"] * 64] * 2)),
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
    refused_statistics(path)


def test_columns_and_facts_must_be_there(tmp_path: Path) -> None:
    path = tmp_path / "stats.parquet"
    pq.write_table(pq.read_table(rewrite(path)).drop_columns(["row"]), path)
    assert "row" in refused_statistics(path)
    SOME.to_frame().to_parquet(path)
    assert "torchrec_picasso.frequency_stats" in refused_statistics(path)
