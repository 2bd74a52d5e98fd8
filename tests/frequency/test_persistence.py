"""A hot set chosen from some batches serves those after them less, where interest moves on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

from tests.frequency.samples import META
from torchrec_picasso.cost.table_work import TableLoad, TableWork
from torchrec_picasso.frequency import FrequencyStats
from torchrec_picasso.frequency.dependence import INDEPENDENT

ROWS, BATCH = 50_000, 2048
STEPS, MOVED = 16, 40
"""Batches of the sample; rows by which interest moves from one batch to the next."""


def _model() -> nn.Module:
    config = EmbeddingBagConfig(name="t", num_embeddings=ROWS, embedding_dim=4, feature_names=["f"])
    return EmbeddingBagCollection(tables=[config], device=META)


def _batches(first: int, num: int, moved: int) -> Iterator[KeyedJaggedTensor]:
    """Popular rows lie in a window that moves; half of the lookups go anywhere."""
    shares = 1 / np.arange(1, 2001)
    shares /= shares.sum()
    for step in range(first, first + num):
        rng = np.random.default_rng([5, step])
        popular = (rng.choice(2000, BATCH // 2, p=shares) * 7 + step * moved * 7) % ROWS
        ids = np.concatenate([popular, rng.integers(0, ROWS, BATCH // 2)])
        yield KeyedJaggedTensor(
            ["f"], torch.from_numpy(ids), lengths=torch.ones(BATCH, dtype=torch.int64)
        )


def _cold(stats: FrequencyStats, num_hot: int, moved: int) -> float:
    """Mean distinct rows outside the hot set, of the batches right after the sample."""
    hot = stats.tables["t"].most_frequent_first()[0][:num_hot].numpy()
    later = _batches(STEPS, STEPS // 2, moved)
    return float(np.mean([np.setdiff1d(batch.values().numpy(), hot).size for batch in later]))


@pytest.mark.parametrize("num_hot", [100, 500, 2000])
def test_cold_rows_of_later_batches_where_interest_moves(num_hot: int) -> None:
    stats = FrequencyStats.collect(_batches(0, STEPS, MOVED), _model())
    dependence = stats.tables["t"].dependence
    assert list(dependence.persistence) == sorted(dependence.persistence)  # the top moves most
    assert dependence.persistence[1] < 0.5
    measured, unique = _cold(stats, num_hot, MOVED), stats.expected_unique("t", BATCH)
    found, spectrum = stats.expected_unique_cold("t", BATCH, num_hot), stats.spectrum("t")
    assert found == pytest.approx(measured, rel=0.06)
    # what the hot set takes off is nearer to the truth than if interest stayed
    lasting = unique - (unique - found) / spectrum.persistence_of(num_hot)
    assert abs(found - measured) < abs(lasting - measured)
    work = TableWork(_load(spectrum), world_size=2)
    assert work.split(num_hot).cold_used == pytest.approx(found, rel=0.01)


def _load(spectrum: object) -> TableLoad:
    return TableLoad(
        name="t",
        num_embeddings=ROWS,
        dim=4,
        lookups=BATCH,
        bags=BATCH,
        spectrum=spectrum,  # type: ignore[arg-type]
    )


def test_interest_that_stays_is_lasting() -> None:
    stats = FrequencyStats.collect(_batches(0, STEPS, 0), _model())
    assert stats.tables["t"].dependence.persistence == INDEPENDENT.persistence
    for num_hot in (100, 1000):
        found = stats.expected_unique_cold("t", BATCH, num_hot)
        assert found == pytest.approx(_cold(stats, num_hot, 0), rel=0.03)


def test_few_batches_say_nothing_of_it() -> None:
    stats = FrequencyStats.collect(_batches(0, 3, MOVED), _model())
    assert stats.tables["t"].dependence.persistence == INDEPENDENT.persistence


def test_all_rows_stay_hot_where_all_are() -> None:
    stats = FrequencyStats.collect(_batches(0, STEPS, MOVED), _model())
    assert stats.expected_unique_cold("t", BATCH, ROWS) == 0


def test_files_merges_and_decay_keep_it(tmp_path: Path) -> None:
    moving = FrequencyStats.collect(_batches(0, STEPS, MOVED), _model())
    persistence = moving.tables["t"].dependence.persistence
    moving.to_parquet(tmp_path / "stats.parquet")
    read = FrequencyStats.from_parquet(tmp_path / "stats.parquet")
    assert read.tables["t"] == moving.tables["t"]
    assert moving.decayed(0.5).tables["t"].dependence.persistence == persistence
    lasting = FrequencyStats.collect(_batches(0, STEPS, 0), _model())
    merged = moving.merge(lasting).tables["t"].dependence
    assert merged.persistence == pytest.approx([(share + 1) / 2 for share in persistence])


def test_articles_and_sessions_of_real_clicks() -> None:
    path = Path("../shared/data/globo_clicks_8days.parquet")
    if not path.exists():
        pytest.skip(f"{path} is not there")
    from benchmarks.fields.columns import ColumnsWorkload
    from benchmarks.fields.question import Question

    workload = ColumnsWorkload(
        Question(model="columns", data=str(path), batch_size=2048, rounds=1, block_steps=4)
    )
    stats = FrequencyStats.collect(workload.heldout(2, 8), workload.model())
    later = [batch for rank in range(2) for batch in workload.training(rank, 6)]
    for table, most, error in (
        ("t_article", 1.0, 0.15),
        ("t_user", 0.5, 0.06),
        ("t_session", 0.3, 0.06),
    ):
        counts = stats.tables[table]
        assert min(counts.dependence.persistence) <= most
        hot = counts.most_frequent_first()[0][:1000].numpy()
        feature = counts.feature_names[0]
        ids = [batch.sparse_features[feature].values().numpy() for batch in later]
        measured = np.mean([np.setdiff1d(of, hot).size for of in ids])
        found = stats.expected_unique_cold(table, 2048, 1000)
        assert found == pytest.approx(measured, abs=error * stats.expected_unique(table, 2048))
