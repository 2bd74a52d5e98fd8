"""Statistics of one half of Criteo foretell how many cold rows batches of the other half have.

Cold rows are what the exchange carries, so what a plan costs depends on this number. Hot rows are
chosen from the first half alone, ids are mapped to rows as training maps them, and batches are cut
from the second half in order.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.frequency.test_criteo import FEATURES, ROWS
from torchrec_picasso.app.zoo.data.criteo import hash_ids
from torchrec_picasso.app.zoo.data.criteo_files import read_criteo
from torchrec_picasso.frequency import FrequencyStats, ModelTable, select_hot_rows
from torchrec_picasso.frequency.accumulate import CountAccumulator

BATCH_SIZE = 4096
TABLES = [
    ModelTable(name=f"t_{name}", num_embeddings=int(rows), feature_names=(name,))
    for name, rows in zip(FEATURES, ROWS.split())
]
SIZES = {table.name: table.num_embeddings or 0 for table in TABLES}


@pytest.fixture(scope="module")
def halves(criteo_path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Row ids of both halves of the samples, ``(40_000, 26)`` each; missing ids are ids."""
    ids_NF = np.concatenate([chunk.ids_NF for chunk in read_criteo(criteo_path)])
    rows_NF = hash_ids(ids_NF, np.array(list(SIZES.values()), dtype=np.int64))
    return rows_NF[: len(rows_NF) // 2], rows_NF[len(rows_NF) // 2 :]


@pytest.fixture(scope="module")
def seen(halves: tuple[np.ndarray, np.ndarray]) -> FrequencyStats:
    tables = {}
    for column, table in enumerate(TABLES):
        counter = CountAccumulator(table)
        ids_N = torch.from_numpy(halves[0][:, column].copy())
        counter.add(table.feature_names[0], ids_N, ids_N.numel())
        tables[table.name] = counter.result()
    return FrequencyStats(tables=tables, num_samples=len(halves[0]))


def cold_rows_per_batch(rows_NF: np.ndarray, hot: dict[str, torch.Tensor]) -> float:
    """Mean over the full batches, in order."""
    total, num_batches = 0, len(rows_NF) // BATCH_SIZE
    for batch in np.split(rows_NF[: num_batches * BATCH_SIZE], num_batches):
        for column, name in enumerate(SIZES):
            total += np.setdiff1d(batch[:, column], hot[name].numpy()).size
    return total / num_batches


@pytest.mark.data
@pytest.mark.parametrize("num_hot", [0, 5_000, 20_000])
def test_cold_rows_of_the_other_half_are_foretold_within_three_percent(
    num_hot: int, halves: tuple[np.ndarray, np.ndarray], seen: FrequencyStats
) -> None:
    hot = select_hot_rows(SIZES, num_hot, seen)
    assert sum(rows.numel() for rows in hot.values()) == num_hot
    foretold = sum(
        seen.expected_unique_cold(name, BATCH_SIZE, rows.numel()) for name, rows in hot.items()
    )
    found = cold_rows_per_batch(halves[1], hot)
    assert found > 1000
    assert foretold == pytest.approx(found, rel=0.03)
