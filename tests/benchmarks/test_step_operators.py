"""The count of operators per step: drivers named, nested operators within all, messages seen."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.step_operators import PLAIN, STOCK, main

NUM_ALL_TO_ALLS, NUM_SUMS = 4, 3  # flags, hot rows, dense gradients
"""Of a step in one piece: header, ids, rows, gradients; hot and dense gradients."""


def test_counts_of_a_small_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "counts.json"
    question = ["--tables", "3", "--rows", "40", "--hot-rows", "5", "--batch-size", "32"]
    main([*question, "--micro-batches", "1", "-o", str(file)])
    written = json.loads(file.read_text())
    assert {"date_utc", "cpu", "torch"} <= written["environment"].keys()
    found = {of["driver"]: of for of in written["found"]}
    ours = "hot/cold, interleaved K=1"
    assert list(found) == [STOCK, PLAIN, ours, f"{ours} lookahead"]
    printed = capsys.readouterr().out
    for driver, of in found.items():
        assert of["operators"] > of["top_level"] > 50
        assert sum(of["by_namespace"].values()) == pytest.approx(of["operators"], abs=1)
        assert driver in printed
    # with two ranks an all-to-all is a message each way
    for driver in (PLAIN, ours):
        assert found[driver]["collectives"] == 2 * NUM_ALL_TO_ALLS + NUM_SUMS
    assert found[f"{ours} lookahead"]["collectives"] > found[ours]["collectives"]
