"""Lookups that come in bursts, as histories do, have the distinct rows of whole batches."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

from tests.frequency.samples import META
from torchrec_picasso.frequency import FrequencyStats

ROWS, SAMPLES, HISTORY, TASTES = 20_000, 256, 20, 3
LOOKUPS = SAMPLES * HISTORY


def _batches(seed: int, num_batches: int, tastes: int | None) -> Iterator[KeyedJaggedTensor]:
    """Histories of few rows each, all of one skew; ``None`` = every lookup on its own."""
    rng = np.random.default_rng(seed)
    share = 1 / np.arange(1, ROWS + 1) ** 0.8
    share /= share.sum()
    for _ in range(num_batches):
        if tastes is None:
            ids = rng.choice(ROWS, LOOKUPS, p=share)
        else:
            liked = rng.choice(ROWS, (SAMPLES, tastes), p=share)
            picked = rng.integers(0, tastes, (SAMPLES, HISTORY))
            ids = np.take_along_axis(liked, picked, axis=1).ravel()
        lengths = torch.full((SAMPLES,), HISTORY)
        yield KeyedJaggedTensor(["f"], torch.from_numpy(ids), lengths=lengths)


def _collected(seed: int, num_batches: int, tastes: int | None) -> FrequencyStats:
    config = EmbeddingBagConfig(name="t", num_embeddings=ROWS, embedding_dim=4, feature_names=["f"])
    model = EmbeddingBagCollection(tables=[config], device=META)
    return FrequencyStats.collect(_batches(seed, num_batches, tastes), model)


@pytest.fixture(scope="module", name="bursts")
def _bursts() -> FrequencyStats:
    return _collected(1, 24, TASTES)


@pytest.mark.parametrize(("part", "error"), [(1.0, 0.03), (0.5, 0.08), (0.125, 0.08)])
def test_distinct_rows_are_those_of_other_batches_and_of_their_parts(
    bursts: FrequencyStats, part: float, error: float
) -> None:
    num_lookups = int(part * LOOKUPS)
    distinct = [batch.values()[:num_lookups].unique().numel() for batch in _batches(2, 24, TASTES)]
    found = bursts.expected_unique("t", num_lookups)
    assert found == pytest.approx(np.mean(distinct), rel=error)
    assert bursts.tables["t"].effective_share < 0.5


def test_all_lookups_have_all_rows(bursts: FrequencyStats) -> None:
    counts = bursts.tables["t"]
    found = bursts.expected_unique("t", counts.num_lookups)
    assert found == pytest.approx(counts.num_rows_seen, rel=1e-6)


def test_independent_lookups_and_a_single_batch_count_as_independent() -> None:
    assert _collected(1, 24, None).tables["t"].effective_share == 1
    assert _collected(1, 1, TASTES).tables["t"].effective_share == 1


def test_files_and_merges_keep_it(bursts: FrequencyStats, tmp_path: Path) -> None:
    bursts.to_parquet(tmp_path / "stats.parquet")
    assert FrequencyStats.from_parquet(tmp_path / "stats.parquet").tables == bursts.tables
    merged = bursts.merge(_collected(3, 24, None)).tables["t"]
    expected = (bursts.tables["t"].effective_share + 1) / 2
    assert merged.effective_share == pytest.approx(expected)
