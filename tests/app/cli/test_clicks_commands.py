"""Statistics and plans of a configuration whose model reads sequences have all of its tables."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchrec_picasso.app.cli.main import main
from torchrec_picasso.frequency import FrequencyStats

DIN = """\
data: {kind: clicks, batch_size: 64, max_history: 5}
model: {kind: din, embedding_dim: 8}
"""
TABLES = {"t_item", "t_category", "t_user", "t_device"}


def test_stats_and_plan_know_sequence_tables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, stats = tmp_path / "din.yaml", tmp_path / "stats.parquet"
    config.write_text(DIN)
    argv = ["--config", str(config)]
    assert main(["stats", *argv, "--batches", "8", "-o", str(stats)]) == 0
    counted = FrequencyStats.from_parquet(stats)
    assert set(counted.tables) == TABLES
    assert counted.tables["t_item"].feature_names == ("item", "item_history")
    capsys.readouterr()
    assert main(["plan", *argv, "--stats", str(stats)]) == 0
    printed = capsys.readouterr().out
    assert all(f"\n{table} " in printed for table in TABLES)
