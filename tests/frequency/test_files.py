"""Ids are read from Parquet files of every kind; what cannot be used is refused by name."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

from tests.frequency.samples import META, as_dict
from tests.support.refusals import refusal
from torchrec_picasso.errors import InputError, PicassoError
from torchrec_picasso.frequency import FrequencyStats, ModelTable, collect

USER = ModelTable(name="users", num_embeddings=100, feature_names=("user",))
ITEM = ModelTable(name="goods", num_embeddings=50, feature_names=("item", "liked"))


def write(path: Path, row_group_size: int | None = None, **columns: Any) -> Path:
    pq.write_table(pa.table(columns), path, row_group_size=row_group_size)
    return path


def counts_of(path: Path | list[Path], table: ModelTable, **how: Any) -> dict[int, int]:
    return as_dict(FrequencyStats.from_files(path, [table], **how).tables[table.name])


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
    assert as_dict(stats.tables["users"]) == {3: 1, 4: 2, 9: 1}
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
    model = EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name="goods", num_embeddings=50, embedding_dim=4, feature_names=["item", "liked"]
            )
        ],
        device=META,
    )
    batch = KeyedJaggedTensor.from_lengths_sync(
        list(bags),
        torch.tensor([i for lists in bags.values() for bag in lists for i in bag]).long(),
        torch.tensor([len(bag) for lists in bags.values() for bag in lists]),
    )
    collected = FrequencyStats.collect([batch], model)
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
    told: list[int] = []
    FrequencyStats.from_files(path, [USER], progress=told.append)
    assert told == [4, 4, 2]


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
    told: list[int] = []
    message = refused([good, bad], progress=told.append)
    assert message.startswith(f"{bad}: missing column user; the file has item, price")
    assert not told


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
