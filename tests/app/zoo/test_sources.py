"""Every source of samples: a batch depends on (seed, rank, step) alone; held-out samples differ.

Generated samples are skewed as asked, with something to learn; generated fields keep to bounds."""

from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from torchrec.datasets.utils import Batch

from tests.app.zoo.criteo_data import samples, write_parquet
from torchrec_picasso.app.config import DataConfig
from torchrec_picasso.app.zoo.data.field_specs import draw_fields
from torchrec_picasso.app.zoo.data.fields import FieldsSource
from torchrec_picasso.app.zoo.data.generated import GeneratedSource, zipf_cdf
from torchrec_picasso.app.zoo.data.source import BatchSource
from torchrec_picasso.app.zoo.registry import make_source
from torchrec_picasso.errors import ConfigError

SOURCES = {
    "generated": {"row_scale": 0.001, "num_tables": 5},
    "file": {"max_rows": 1000},
    "fields": {"kind": "fields", "num_tables": 3, "max_rows": 3_000},
    "clicks": {"kind": "clicks"},
    "stream": {"kind": "stream", "num_candidates": 3},
}


@pytest.fixture(params=list(SOURCES))
def data(request: pytest.FixtureRequest, tmp_path: Path) -> DataConfig:
    settings = dict(SOURCES[request.param])
    if request.param == "file":
        settings["path"] = str(write_parquet(tmp_path / "a", samples(300)))
    return DataConfig(batch_size=16, heldout_steps=2, **settings)  # type: ignore[arg-type]


def content(batch: Batch) -> list[torch.Tensor]:
    features = batch.sparse_features
    return [features.values(), features.lengths(), batch.dense_features, batch.labels]


def is_same(one: Batch, other: Batch) -> bool:
    return all(a.shape == b.shape and a.equal(b) for a, b in zip(content(one), content(other)))


def batch_of(source: BatchSource, rank: int, step: int) -> Batch:
    return next(source.batches(rank, 2, start_step=step))


def test_a_batch_depends_on_seed_rank_and_step_alone(data: DataConfig) -> None:
    source, again, other = (make_source(data, seed) for seed in (3, 3, 4))
    third = next(islice(source.batches(1, 2), 2, None))
    assert third.labels.shape == ((16, 3, 1) if data.kind == "stream" else (16,))
    assert is_same(third, batch_of(again, 1, 2))
    assert not is_same(third, batch_of(source, 0, 2))
    assert not is_same(third, batch_of(source, 1, 3))
    assert is_same(third, batch_of(other, 1, 2)) == (data.path is not None)  # a file has no seed


def test_held_out_batches_are_none_of_those_trained_on(data: DataConfig) -> None:
    source = make_source(data, 3)
    heldout = [batch for rank in range(2) for batch in source.heldout(rank, 2)]
    trained = [batch for rank in range(2) for batch in islice(source.batches(rank, 2), 3)]
    assert len(heldout) == 4
    batches = heldout + trained
    assert not any(is_same(a, b) for i, a in enumerate(batches) for b in batches[:i])


def make(**data: object) -> GeneratedSource:
    settings = {"batch_size": 256, "row_scale": 0.001, "num_tables": 5} | data
    return GeneratedSource(DataConfig(**settings), seed=7)  # type: ignore[arg-type]


def ids_of(source: GeneratedSource, rank: int, step: int) -> torch.Tensor:
    return next(source.batches(rank, 2, start_step=step)).sparse_features.values()


def test_ids_lie_inside_their_tables() -> None:
    source = make(row_scale=0.0001, num_tables=30)
    assert min(table.num_embeddings for table in source.tables) == 1
    values_FB = ids_of(source, 0, 0).view(30, -1)
    for table, values_B in zip(source.tables, values_FB):
        assert int(values_B.min()) >= 0
        assert int(values_B.max()) < table.num_embeddings


@pytest.mark.parametrize("exponent", [0.0, 0.8, 1.05, 1.5])
def test_skew_is_the_one_asked_for(exponent: float) -> None:
    source = make(num_tables=1, row_scale=1.0, zipf_exponent=exponent, batch_size=100_000)
    num_rows = source.tables[0].num_embeddings
    counts = np.sort(np.bincount(ids_of(source, 0, 0).numpy(), minlength=num_rows))[::-1]
    expected = zipf_cdf(num_rows, float(source.exponents[0]))
    seen = np.cumsum(counts) / counts.sum()
    # 100,000 draws: the share of the k hottest rows has a deviation of at most 0.0016.
    # Sorting by count favours rows that were lucky, the more the flatter the distribution.
    slack = 0.02 if exponent else 0.12
    for k in (1, 10, 100, num_rows // 2):
        assert abs(seen[k - 1] - expected[k - 1]) < slack, k


def test_zipf_cdf_is_the_bounded_zipf_distribution() -> None:
    np.testing.assert_allclose(zipf_cdf(3, 1.0), np.cumsum([6, 3, 2]) / 11)
    np.testing.assert_allclose(zipf_cdf(4, 0.0), [0.25, 0.5, 0.75, 1.0])


def test_labels_depend_on_the_ids() -> None:
    source = make(num_tables=1, row_scale=1.0, zipf_exponent=1.5, batch_size=50_000)
    batch = next(source.batches(0, 1))
    ids = batch.sparse_features.values().numpy()
    labels = batch.labels.numpy()
    rates = [labels[ids == row].mean() for row in np.bincount(ids).argsort()[-20:]]
    assert 0.05 < labels.mean() < 0.95
    assert max(rates) - min(rates) > 0.3  # rows of one table differ by far more than chance (0.03)


def test_sines_change_the_labels_and_nothing_else() -> None:
    own, sines = (
        next(make(row_scale=0.0005, num_tasks=2, labels=each, batch_size=4000).batches(0, 1))
        for each in ("own", "sines")
    )
    assert torch.equal(own.sparse_features.values(), sines.sparse_features.values())
    assert torch.equal(own.dense_features, sines.dense_features)
    assert 0.05 < float((own.labels != sines.labels).float().mean()) < 0.5
    assert 0.1 < float(sines.labels.mean()) < 0.9


def source(num_fields: int, max_rows: int, seed: int = 1) -> FieldsSource:
    return FieldsSource(draw_fields(num_fields, max_rows, seed), 20, 3, seed)


def test_fields_keep_to_their_bounds_and_differ() -> None:
    fields = draw_fields(60, 100_000, seed=0)
    assert fields == draw_fields(60, 100_000, seed=0) != draw_fields(60, 100_000, seed=1)
    assert len({each.table for each in fields}) == 60
    assert {each.dim for each in fields} == {8, 16, 32, 64}
    assert {each.mean for each in fields} == {True, False}
    assert {each.pooling_factor for each in fields} == set(range(1, 9))
    assert all(1_000 <= each.num_embeddings <= 100_000 for each in fields)
    assert all(0.4 <= each.exponent <= 1.3 for each in fields)
    assert sum(each.num_embeddings < 10_000 for each in fields) == pytest.approx(30, abs=12)


def test_a_configuration_names_their_number_and_largest_table() -> None:
    data = DataConfig(kind="fields", num_tables=5, max_rows=2_000, batch_size=7, heldout_steps=1)
    drawn = make_source(data, seed=0)
    assert len(drawn.columns["fields"]) == 5
    assert all(1_000 <= rows <= 2_000 for rows in drawn.num_rows.values())
    (batch,) = drawn.heldout(0, 2)
    assert batch.dense_features.shape == (7, drawn.num_dense)


def test_fields_need_some_rows() -> None:
    with pytest.raises(ConfigError, match="1,000 rows or more, got 10"):
        make_source(DataConfig(kind="fields", max_rows=10), seed=0)
