"""Lookups that come in bursts, as a history does, have the distinct rows of whole batches."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

from tests.frequency.samples import META
from torchrec_picasso.frequency import FrequencyStats

ROWS, SAMPLES, HISTORY, TASTES = 20_000, 256, 20, 3
LOOKUPS = SAMPLES * HISTORY


def _model() -> nn.Module:
    config = EmbeddingBagConfig(name="t", num_embeddings=ROWS, embedding_dim=4, feature_names=["f"])
    return EmbeddingBagCollection(tables=[config], device=META)


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


def _distinct(part: float, num_hot_of: FrequencyStats | None = None, num_hot: int = 0) -> float:
    """Mean distinct rows outside a hot set, of the first part of new batches."""
    hot = np.empty(0)
    if num_hot_of is not None:
        hot = num_hot_of.tables["t"].most_frequent_first()[0][:num_hot].numpy()
    ids = [batch.values()[: int(part * LOOKUPS)].numpy() for batch in _batches(2, 24, TASTES)]
    return float(np.mean([np.setdiff1d(of, hot).size for of in ids]))


@pytest.fixture(scope="module", name="bursts")
def _bursts() -> FrequencyStats:
    return FrequencyStats.collect(_batches(1, 24, TASTES), _model())


def test_distinct_rows_of_a_batch_are_those_of_other_batches(bursts: FrequencyStats) -> None:
    measured = _distinct(1.0)
    assert bursts.expected_unique("t", LOOKUPS) == pytest.approx(measured, rel=0.03)
    spectrum = bursts.spectrum("t")
    alone = FrequencyStats.collect([next(_batches(1, 1, TASTES))], _model())
    assert alone.tables["t"].dependence.effective_share == 1
    independent = FrequencyStats.collect(_batches(1, 24, None), _model())
    assert independent.expected_unique("t", LOOKUPS) > 1.5 * measured
    assert spectrum.dependence.effective_share < 0.5


@pytest.mark.parametrize("part", [0.5, 0.125])
def test_so_are_those_of_parts_of_a_batch(bursts: FrequencyStats, part: float) -> None:
    found = bursts.expected_unique("t", int(part * LOOKUPS))
    assert found == pytest.approx(_distinct(part), rel=0.08)


def test_all_lookups_have_all_rows(bursts: FrequencyStats) -> None:
    counts = bursts.tables["t"]
    found = bursts.expected_unique("t", int(counts.num_lookups))
    assert found == pytest.approx(counts.num_rows_seen, rel=1e-6)


@pytest.mark.parametrize("num_hot", [50, 500])
def test_cold_rows_too(bursts: FrequencyStats, num_hot: int) -> None:
    found = bursts.expected_unique_cold("t", LOOKUPS, num_hot)
    assert found == pytest.approx(_distinct(1.0, bursts, num_hot), rel=0.05)


def test_independent_lookups_pass_for_independent() -> None:
    stats = FrequencyStats.collect(_batches(1, 24, None), _model())
    assert stats.tables["t"].dependence.effective_share == 1


def test_rows_that_a_bag_never_repeats_are_more() -> None:
    rng = np.random.default_rng(0)
    config = EmbeddingBagConfig(name="t", num_embeddings=64, embedding_dim=4, feature_names=["f"])
    model = EmbeddingBagCollection(tables=[config], device=META)

    def batches(num: int) -> Iterator[KeyedJaggedTensor]:
        for _ in range(num):
            ids = torch.from_numpy(rng.permutation(64)[:40].copy())
            yield KeyedJaggedTensor(["f"], ids, lengths=torch.tensor([40]))

    stats = FrequencyStats.collect(batches(40), model)
    assert stats.expected_unique("t", 40) == pytest.approx(40, rel=0.03)


def test_files_merges_and_decay_keep_it(bursts: FrequencyStats, tmp_path: Path) -> None:
    share = bursts.tables["t"].dependence.effective_share
    bursts.to_parquet(tmp_path / "stats.parquet")
    read = FrequencyStats.from_parquet(tmp_path / "stats.parquet")
    assert read.tables["t"] == bursts.tables["t"]
    assert bursts.decayed(0.5).tables["t"].dependence.effective_share == share
    assert bursts.decayed(0.5).expected_unique("t", LOOKUPS // 2) > 0
    independent = FrequencyStats.collect(_batches(3, 24, None), _model())
    merged = bursts.merge(independent).tables["t"]
    assert merged.dependence.effective_share == pytest.approx((share + 1) / 2)


def test_histories_of_real_samples() -> None:
    path = Path("../shared/data/alimama_10k.parquet")
    if not path.exists():
        pytest.skip(f"{path} is not there")
    from benchmarks.sequences.workload import SequencesWorkload

    workload = SequencesWorkload(str(path), 1024, 0, 2_000_000, 2)
    stats = FrequencyStats.collect(workload.heldout(2, 8), workload.model())
    for table in ("t_cate_id", "t_brand"):
        features = [table[2:], f"{table[2:]}_history"]
        ids = [
            torch.cat([batch.sparse_features[feature].values() for feature in features])
            for batch in workload.training(0, 8)
        ]
        num_lookups = round(np.mean([of.numel() for of in ids]))
        measured = np.mean([of.unique().numel() for of in ids])
        assert stats.expected_unique(table, num_lookups) == pytest.approx(measured, rel=0.03)
