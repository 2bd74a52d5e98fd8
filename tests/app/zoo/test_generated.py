"""Generated samples: repeatable, skewed as asked, and with something to learn."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from torchrec_picasso.app.config import DataConfig
from torchrec_picasso.app.zoo.data.generated import GeneratedSource, zipf_cdf


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
        next(make(row_scale=0.0005, num_tasks=2, labels=of, batch_size=4000).batches(0, 1))
        for of in ("own", "sines")
    )
    assert torch.equal(own.sparse_features.values(), sines.sparse_features.values())
    assert torch.equal(own.dense_features, sines.dense_features)
    assert 0.05 < float((own.labels != sines.labels).float().mean()) < 0.5
    assert 0.1 < float(sines.labels.mean()) < 0.9
