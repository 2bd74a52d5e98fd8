"""Generated fields: what a seed draws, and what a configuration makes of them."""

from __future__ import annotations

import pytest

from torchrec_picasso.app.config import DataConfig
from torchrec_picasso.app.zoo.data.field_specs import draw_fields
from torchrec_picasso.app.zoo.data.fields import FieldsSource
from torchrec_picasso.app.zoo.registry import make_source
from torchrec_picasso.errors import ConfigError


def source(num_fields: int, max_rows: int, seed: int = 1) -> FieldsSource:
    return FieldsSource(draw_fields(num_fields, max_rows, seed), 20, 3, seed)


def test_fields_keep_to_their_bounds_and_differ() -> None:
    fields = draw_fields(60, 100_000, seed=0)
    assert fields == draw_fields(60, 100_000, seed=0) != draw_fields(60, 100_000, seed=1)
    assert len({of.table for of in fields}) == 60
    assert {of.dim for of in fields} == {8, 16, 32, 64}
    assert {of.mean for of in fields} == {True, False}
    assert {of.pooling_factor for of in fields} == set(range(1, 9))
    assert all(1_000 <= of.num_embeddings <= 100_000 for of in fields)
    assert all(0.4 <= of.exponent <= 1.3 for of in fields)
    assert sum(of.num_embeddings < 10_000 for of in fields) == pytest.approx(30, abs=12)


def test_every_sample_has_its_fields_ids_inside_their_tables() -> None:
    fields = draw_fields(9, 3_000, seed=1)
    batch = next(source(9, 3_000).batches(0, 1))
    bags = batch.sparse_features
    for of in fields:
        bag = bags[of.feature]
        assert bag.lengths().tolist() == [of.pooling_factor] * 20
        assert 0 <= int(bag.values().min()) <= int(bag.values().max()) < of.num_embeddings


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
