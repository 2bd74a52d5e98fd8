"""Every source of samples: a batch depends on (seed, rank, step) alone; held-out samples differ."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest
import torch
from torchrec.datasets.utils import Batch

from tests.app.zoo.criteo_data import samples, write_parquet
from torchrec_picasso.app.config import DataConfig
from torchrec_picasso.app.zoo.data.source import BatchSource
from torchrec_picasso.app.zoo.registry import make_source

SOURCES = {
    "generated": {"row_scale": 0.001, "num_tables": 5},
    "file": {"max_rows": 1000},
    "fields": {"kind": "fields", "num_tables": 3, "max_rows": 3_000},
    "clicks": {"kind": "clicks"},
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
    assert third.labels.shape == (16,)
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
