"""Criteo files: both formats give equal batches, and each kind of bad file is named."""

import itertools
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch

from tests.app.zoo.criteo_data import samples, text_lines, write_parquet, write_text
from torchrec_picasso.app.config import DataConfig
from torchrec_picasso.app.zoo.data import criteo_files
from torchrec_picasso.app.zoo.data.criteo import CriteoSource, hash_ids, log_dense
from torchrec_picasso.app.zoo.data.criteo_files import MISSING_ID, read_criteo
from torchrec_picasso.app.zoo.registry import check_source, make_source
from torchrec_picasso.errors import ConfigError, PicassoError


def source(path: Path, **data: object) -> CriteoSource:
    settings = {"batch_size": 8, "heldout_steps": 1, "max_rows": 50} | data
    return CriteoSource(DataConfig(path=str(path), **settings))  # type: ignore[arg-type]


def refused(path: Path) -> str:
    with pytest.raises(PicassoError) as caught:
        for _ in read_criteo(path):
            pass
    message = str(caught.value)
    assert message.startswith(str(path))
    assert "\n" not in message
    return message.removeprefix(str(path))


def test_parquet_and_text_give_equal_batches(tmp_path: Path) -> None:
    columns = samples(100)
    files = [write_parquet(tmp_path / "a", columns), write_text(tmp_path / "b", columns)]
    streams = [source(path).batches(1, 2) for path in files]
    for ours, theirs in itertools.islice(zip(*streams), 12):  # wraps around twice
        assert torch.equal(ours.dense_features, theirs.dense_features)
        assert torch.equal(ours.labels, theirs.labels)
        assert torch.equal(ours.sparse_features.values(), theirs.sparse_features.values())
        assert ours.sparse_features.keys() == [f"c{index}" for index in range(1, 27)]


def test_text_is_read_alike_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_text(tmp_path / "a", samples(100))
    (whole,) = read_criteo(path)
    monkeypatch.setattr(criteo_files, "_TEXT_BLOCK_BYTES", 2000)
    pieces = list(read_criteo(path))
    assert len(pieces) > 5
    np.testing.assert_array_equal(np.concatenate([p.ids_NF for p in pieces]), whole.ids_NF)


def test_values_arrive_unchanged(tmp_path: Path) -> None:
    columns = samples(10)
    (chunk,) = read_criteo(write_text(tmp_path / "a", columns))
    expected = [MISSING_ID if value is None else value for value in columns["c26"]]
    assert chunk.ids_NF[:, 25].tolist() == expected
    assert chunk.labels_N.tolist() == columns["label"]
    dense = [np.nan if value is None else value for value in columns["i1"]]
    np.testing.assert_array_equal(chunk.dense_NI[:, 0], np.array(dense, dtype=np.float32))


def test_ranks_read_their_own_samples_of_the_same_global_batch(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a", samples(60))
    both = [next(source(path).batches(rank, 2)).labels for rank in range(2)]
    # 16 held-out samples come first, then the first global batch of 16.
    everything = np.concatenate([c.labels_N for c in read_criteo(path)])
    assert torch.cat(both).tolist() == everything[16:32].tolist()
    heldout = [next(source(path).heldout(rank, 2)).labels for rank in range(2)]
    assert torch.cat(heldout).tolist() == everything[:16].tolist()


@pytest.mark.parametrize("block_bytes", [None, 2000])
@pytest.mark.parametrize("fold", [0, 1, 2])
def test_folds_are_held_out_in_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fold: int, block_bytes: int | None
) -> None:
    path = write_text(tmp_path / "a", samples(60))  # three folds of 16, and 12 in none
    everything = np.concatenate([chunk.labels_N for chunk in read_criteo(path)])
    if block_bytes is not None:
        monkeypatch.setattr(criteo_files, "_TEXT_BLOCK_BYTES", block_bytes)
    fold_source = source(path, heldout_steps=2, heldout_fold=fold)
    kept_out = torch.cat([batch.labels for batch in fold_source.heldout(0, 1)])
    first, behind = 16 * fold, 16 * fold + 16
    assert kept_out.tolist() == everything[first:behind].tolist()
    trained = np.delete(everything, np.arange(first, behind))
    labels = torch.cat([batch.labels for batch in itertools.islice(fold_source.batches(0, 1), 11)])
    assert labels.tolist() == np.tile(trained, 2)[:88].tolist()
    assert everything[:16].tolist() != everything[16:32].tolist()


def test_a_fold_behind_the_end_of_the_file(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a", samples(60))
    behind = source(path, heldout_steps=2, heldout_fold=3)
    for stream in (behind.batches(0, 1), behind.heldout(0, 1)):
        with pytest.raises(PicassoError, match=": 60 samples, but 64 are needed"):
            list(itertools.islice(stream, 9))


def test_a_missing_id_has_its_own_row_and_dense_values_are_logged() -> None:
    rows_F = np.array([10, 3], dtype=np.int64)
    ids_NF = np.array([[MISSING_ID, MISSING_ID], [12, 5]], dtype=np.int64)
    assert hash_ids(ids_NF, rows_F).tolist() == [[9, 2], [2, 2]]
    dense = log_dense(np.array([[np.nan, -2.0, 0.0, np.e - 1]], dtype=np.float32))
    np.testing.assert_allclose(dense, [[0, 0, 0, 1]], rtol=1e-6)


def test_files_without_samples(tmp_path: Path) -> None:
    path = tmp_path / "a"
    assert refused(path) == ": no such file; give a Criteo file, Parquet or tab-separated text"
    path.touch()
    assert refused(path) == ": the file is empty; expected Criteo samples"
    write_parquet(path, samples(0))
    assert refused(path) == ": the file holds no samples; expected at least one"


def test_missing_column_names_the_found_ones(tmp_path: Path) -> None:
    columns = samples(5)
    del columns["i3"], columns["c2"]
    message = refused(write_parquet(tmp_path / "a", columns))
    assert message.startswith(": missing column i3, c2; expected label, i1..i13, c1..c26; found ")
    assert "found label, i1, i2, i4" in message


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        ("c4", ": column c4 must hold integers (hashed ids), found string"),
        ("i4", ": column i4 must hold numbers, found string"),
    ],
)
def test_parquet_column_of_a_wrong_type(tmp_path: Path, column: str, expected: str) -> None:
    table = pa.table({name: pa.array(values) for name, values in samples(5).items()})
    index = table.schema.get_field_index(column)
    table = table.set_column(index, column, pa.array(["x"] * 5))
    pa.parquet.write_table(table, tmp_path / "a")
    assert refused(tmp_path / "a") == expected


def test_damaged_parquet(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a", samples(50))
    path.write_bytes(path.read_bytes()[:-20])
    assert refused(path).startswith(": damaged Parquet file (")


@pytest.mark.parametrize(
    ("line", "column", "text", "expected"),
    [
        (41, None, "1\t2\t3", ": line 42 has 3 fields, expected 40; expected Criteo's text: label"),
        (7, None, "", ": sample 8, column label: expected 0 or 1, got nan"),
        (4, 3, "many", ": line 5, column i3: 'many' is no integer; expected Criteo's text"),
        (20, 14, "0xg12345", ": line 21, column c1: '0xg12345' is no hexadecimal id of at most 8"),
        (20, 14, "123456789", ": line 21, column c1: '123456789' is no hexadecimal id of at most"),
    ],
)
def test_bad_lines_are_named(
    tmp_path: Path, line: int, column: int | None, text: str, expected: str
) -> None:
    lines = text_lines(samples(50))
    fields = lines[line].split("\t")
    if column is not None:
        fields[column] = text
    lines[line] = text if column is None else "\t".join(fields)
    (tmp_path / "a").write_text("\n".join(lines) + "\n")
    assert refused(tmp_path / "a").startswith(expected)


def test_label_that_is_not_a_click(tmp_path: Path) -> None:
    columns = samples(50)
    columns["label"][44] = 2
    for path in (write_parquet(tmp_path / "a", columns), write_text(tmp_path / "b", columns)):
        assert refused(path) == ": sample 45, column label: expected 0 or 1, got 2"


def test_too_few_samples_for_a_global_batch(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a", samples(31))
    with pytest.raises(PicassoError, match=r"31 samples, but 32 are needed .* lower batch_size"):
        check_source(source(path), world_size=2)
    check_source(source(write_parquet(tmp_path / "b", samples(32))), world_size=2)


def test_source_needs_a_path() -> None:
    with pytest.raises(ConfigError, match=r"data\.path: expected the path of a Criteo file"):
        CriteoSource(DataConfig())
    assert not isinstance(make_source(DataConfig(row_scale=0.001), 0), CriteoSource)
