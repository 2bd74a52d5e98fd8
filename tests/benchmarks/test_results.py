"""Results that are kept say what they were measured on."""

from __future__ import annotations

import json
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "benchmarks" / "results"
FACTS = {"date_utc", "cpu", "num_cpus", "python", "torch", "torchrec", "torchrec-picasso"}


def test_every_result_names_its_environment() -> None:
    files = sorted(FOLDER.glob("**/*.json"))
    assert files
    for file in files:
        if file.name != "summary.json":  # it sums up files beside it
            assert json.loads(file.read_text())["environment"].keys() >= FACTS, file.name
