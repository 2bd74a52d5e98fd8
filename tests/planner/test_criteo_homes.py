"""On Criteo, homes cut by the first half of the samples are asked for evenly by the second half."""

from pathlib import Path

import numpy as np
import pytest

from tests.frequency.test_criteo import FEATURES, ROWS
from torchrec_picasso.app.zoo.data.criteo import hash_ids
from torchrec_picasso.app.zoo.data.criteo_files import read_criteo
from torchrec_picasso.cost import CommCurves
from torchrec_picasso.cost.table_work import TableLoad
from torchrec_picasso.frequency import FrequencyStats, ModelTable
from torchrec_picasso.frequency.counts import LookupCounter
from torchrec_picasso.planner.choice import TableInfo
from torchrec_picasso.planner.decision import Decision, decide

BATCH_SIZE = 4096
SIZES = np.array(ROWS.split(), dtype=np.int64)


@pytest.fixture(scope="module")
def halves(criteo_path: Path) -> tuple[np.ndarray, np.ndarray]:
    ids_NF = np.concatenate([chunk.ids_NF for chunk in read_criteo(criteo_path)])
    rows_NF = hash_ids(ids_NF, SIZES)
    return rows_NF[: len(rows_NF) // 2], rows_NF[len(rows_NF) // 2 :]


@pytest.fixture(scope="module")
def stats(halves: tuple[np.ndarray, np.ndarray]) -> FrequencyStats:
    tables = {}
    for column, (name, rows) in enumerate(zip(FEATURES, SIZES.tolist())):
        counter = LookupCounter(ModelTable(name=name, num_embeddings=rows, feature_names=(name,)))
        counter.add(halves[0][:, column])
        tables[name] = counter.result()
    return FrequencyStats(tables=tables, num_samples=len(halves[0]))


def _decided(stats: FrequencyStats, world_size: int, num_hot: int) -> Decision:
    facts = [
        TableInfo(
            load=TableLoad(
                name=name,
                num_embeddings=counts.num_embeddings,
                dim=16,
                lookups=BATCH_SIZE,
                bags=BATCH_SIZE,
                spectrum=counts.spectrum,
            )
        )
        for name, counts in stats.tables.items()
    ]
    curves = CommCurves.assumed(world_size, gbytes_per_s=0.1)
    return decide(
        facts, stats, curves, world_size=world_size, batch_size=BATCH_SIZE, hot_rows=num_hot
    )


@pytest.mark.data
@pytest.mark.parametrize("num_hot", [0, 5_000])
@pytest.mark.parametrize("world_size", [2, 4, 8, 16, 32, 64])
def test_homes_are_asked_for_evenly(
    world_size: int, num_hot: int, halves: tuple[np.ndarray, np.ndarray], stats: FrequencyStats
) -> None:
    decision = _decided(stats, world_size, num_hot)
    assert decision.homes is not None
    assert decision.homes.max_over_mean <= 1.1
    incoming_W = np.zeros(world_size)
    num_batches = len(halves[1]) // BATCH_SIZE
    for column, placement in enumerate(decision.placements):
        assert placement is not None
        ends_W = np.cumsum(decision.block_rows[column])
        hot = placement.hot_rows.numpy()
        for batch in np.split(halves[1][: num_batches * BATCH_SIZE, column], num_batches):
            cold = np.setdiff1d(batch, hot)
            homes = np.searchsorted(ends_W, cold, side="right")
            incoming_W += np.bincount(homes, minlength=world_size)
    assert incoming_W.max() / incoming_W.mean() <= 1.1
