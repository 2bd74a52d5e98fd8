"""Real ids: few rows serve most lookups, and half of the samples tell the cold rows of the other.

How the figure is counted moves it by two points: 87.1 % where the hot rows are chosen from one half
of the samples and measured on the other, 88.3 % where both are the whole file; a missing value
counted as an id like any other adds one point (88.1 % and 89.2 %). A hot set serves
batches that it was not chosen from, so the halves are what this test holds; missing values are
empty bags here.
"""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torchrec import KeyedJaggedTensor

from tests.support.tables import Table, bags_of
from torchrec_picasso.app.zoo.data.criteo import hash_ids
from torchrec_picasso.app.zoo.data.criteo_files import read_criteo
from torchrec_picasso.frequency import FrequencyStats, ModelTable, select_hot_rows
from torchrec_picasso.frequency.counts import LookupCounter

FEATURES = [f"c{i + 1}" for i in range(26)]
# Criteo Terabyte as published, large tables cut to 40 million rows (MLPerf DLRM v1)
ROWS = """39884406 39043 17289 7420 20263 3 7120 1543 63 38532951 2953546 403346 10 2208 11938 155 4
976 14 39979771 25641295 39664984 585935 12972 108 36"""
BATCH_SIZE = 4096
TABLES = {f"t_{name}": int(rows) for name, rows in zip(FEATURES, ROWS.split())}


def hashed_batch(data: pa.Table) -> KeyedJaggedTensor:
    """All samples as one batch, ``id % rows``; a missing value is an empty bag."""
    columns = [data.column(name).combine_chunks() for name in FEATURES]
    ids = [
        torch.from_numpy(column.drop_null().to_numpy().copy()) % rows
        for column, rows in zip(columns, TABLES.values())
    ]
    lengths = [torch.from_numpy(c.is_valid().to_numpy(zero_copy_only=False)) for c in columns]
    return KeyedJaggedTensor.from_lengths_sync(FEATURES, torch.cat(ids), torch.cat(lengths).long())


@pytest.mark.data
def test_twenty_thousand_rows_serve_most_lookups_of_other_samples(criteo_path: Path) -> None:
    looked_up = zip(TABLES.items(), FEATURES)
    model = bags_of(
        [Table(name, 8, rows, (feature,)) for (name, rows), feature in looked_up], "meta"
    )
    data = pq.read_table(criteo_path, columns=FEATURES)
    half = data.num_rows // 2
    seen, later = (
        FrequencyStats.collect([hashed_batch(part)], model)
        for part in (data.slice(0, half), data.slice(half))
    )

    hot = select_hot_rows(TABLES, 20_000, seen)
    served = sum(
        int(counts.counts_U[torch.isin(counts.rows_U, hot[table])].sum())
        for table, counts in later.tables.items()
    )
    total = sum(counts.num_lookups for counts in later.tables.values())

    assert sum(rows.numel() for rows in hot.values()) == 20_000
    # a fixed file and an exact count: the tolerance is the rounding of the figure above
    assert served / total == pytest.approx(0.871, abs=0.0005)


@pytest.mark.data
@pytest.mark.parametrize("num_hot", [0, 5_000, 20_000])
def test_cold_rows_of_the_other_half_are_foretold(num_hot: int, criteo_path: Path) -> None:
    """The sample that chose the hot rows judges them: many of them leave too few cold rows."""
    ids_NF = np.concatenate([chunk.ids_NF for chunk in read_criteo(criteo_path)])
    rows_NF = hash_ids(ids_NF, np.array(list(TABLES.values())))
    seen_NF, later_NF = np.array_split(rows_NF, 2)
    counts = {}
    for column, (name, rows) in enumerate(TABLES.items()):
        table = ModelTable(name=name, num_embeddings=rows, feature_names=(name,))
        counter = LookupCounter(table)
        counter.add(seen_NF[:, column])
        counts[name] = counter.result()
    hot = select_hot_rows(TABLES, num_hot, FrequencyStats(tables=counts))
    foretold = sum(
        counts[name].spectrum.expected_cold(BATCH_SIZE, rows.numel()) for name, rows in hot.items()
    )
    starts = range(0, len(later_NF) - BATCH_SIZE + 1, BATCH_SIZE)
    found = np.mean(
        [
            sum(
                np.setdiff1d(batch_NF[:, column], hot[name].numpy()).size
                for column, name in enumerate(TABLES)
            )
            for batch_NF in (later_NF[start : start + BATCH_SIZE] for start in starts)
        ]
    )
    assert found > 1000
    assert foretold == pytest.approx(found, rel=0.03 if num_hot == 0 else 0.09)
