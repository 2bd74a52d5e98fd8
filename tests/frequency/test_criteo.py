"""The figure the design rests on, from real ids: few rows serve most lookups."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

from torchrec_picasso.frequency import FrequencyStats, select_hot_rows

# Criteo Terabyte as published, large tables cut to 40 million rows (MLPerf DLRM v1)
ROWS = """39884406 39043 17289 7420 20263 3 7120 1543 63 38532951 2953546 403346 10 2208 11938 155 4
976 14 39979771 25641295 39664984 585935 12972 108 36"""


@pytest.mark.data
def test_twenty_thousand_rows_serve_most_lookups(criteo_path: Path) -> None:
    rows = [int(number) for number in ROWS.split()]
    features = [f"c{i + 1}" for i in range(len(rows))]
    model = EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=f"t_{name}", num_embeddings=size, embedding_dim=8, feature_names=[name]
            )
            for name, size in zip(features, rows)
        ],
        device=torch.device("meta"),
    )
    data = pq.read_table(criteo_path, columns=features)
    ids = [
        torch.from_numpy(column.combine_chunks().fill_null(0).to_numpy().copy()) % size
        for column, size in zip(data.columns, rows)
    ]
    lengths = torch.ones(len(features) * data.num_rows, dtype=torch.int64)
    batch = KeyedJaggedTensor.from_lengths_sync(features, torch.cat(ids), lengths)

    stats = FrequencyStats.collect([batch], model)
    hot = select_hot_rows({f"t_{f}": n for f, n in zip(features, rows)}, 20_000, stats)

    hot_lookups = sum(
        int(counts.counts_U[torch.isin(counts.rows_U, hot[name])].sum())
        for name, counts in stats.tables.items()
    )
    assert sum(rows.numel() for rows in hot.values()) == 20_000
    # 87 % is the published figure of the design, rounded to a percent
    assert hot_lookups / (data.num_rows * len(features)) == pytest.approx(0.87, abs=0.01)
