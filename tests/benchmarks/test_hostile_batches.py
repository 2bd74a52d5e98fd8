"""A sample of hostile batches and plans; the benchmark of it notices what is wrong.

``python -m benchmarks.reliability.hostile_batches`` runs a thousand cases.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.reliability import hostile_batches, hostile_jobs
from benchmarks.reliability.hostile_batches import run_cases
from benchmarks.reliability.hostile_cases import BATCH_KINDS, FAULTS, draw_case
from benchmarks.reliability.hostile_jobs import Outcome

WORLD_SIZES = (1, 2, 3, 4)
NUM_CASES = 6


def test_the_long_run_has_every_kind_of_everything() -> None:
    cases = [draw_case(0, size, number) for size in WORLD_SIZES for number in range(250)]
    assert {kind for case in cases for of in case.kinds_SW for kind in of} == set(BATCH_KINDS)
    assert {case.fault.kind for case in cases if case.fault} == set(FAULTS)
    assert {case.driver for case in cases} == {"pipeline", "loop", "sparse_dist"}
    tables = [table for case in cases for table in case.tables]
    assert {table.form for table in tables} == {"rows", "bags", "stock"}
    hot = [len(table.hot_rows) / table.rows for table in tables if table.form == "rows"]
    assert min(hot) == 0
    assert max(hot) == 1
    assert all(sum(table.blocks_W) == table.rows for table in tables)
    for size in WORLD_SIZES:
        assert "million" in draw_case(0, size, 0).kinds_SW[1]


def test_hostile_batches_train_as_by_stock_or_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["-o", str(tmp_path), "--cases", str(NUM_CASES)]
    assert hostile_batches.main(options) == 0, (tmp_path / "hostile_batches.jsonl").read_text()
    summary = json.loads((tmp_path / "hostile_batches_summary.json").read_text())
    num_faults = sum(number % 3 == 2 for number in range(NUM_CASES))
    assert summary["refused"] == num_faults * len(WORLD_SIZES)
    assert summary["right"] == (NUM_CASES - num_faults) * len(WORLD_SIZES)
    assert 0 < summary["losses_apart_at_most"] <= 1e-5
    monkeypatch.setattr(hostile_batches, "run_ranks", None)  # a rerun has nothing left to do
    assert hostile_batches.main(options) == 0


def test_a_case_that_goes_wrong_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_here(
        run: object, world_size: int, results: str, *args: object, **kwargs: object
    ) -> None:
        Outcome("w1/0", "right").write(Path(results))
        raise hostile_batches.RankError(0, "died with exit code 3")

    monkeypatch.setattr(hostile_batches, "run_ranks", run_here)
    outcomes = {outcome.name: outcome for outcome in run_cases(tmp_path, 0, (1,), 3)}
    assert outcomes["w1/0"].verdict == "right"
    for name in ("w1/1", "w1/2"):
        assert outcomes[name].verdict == "failed"
        assert outcomes[name].detail.startswith("rank 0 died with exit code 3")
        assert "batches" in outcomes[name].case
    case = draw_case(0, 1, 0)
    with pytest.raises(hostile_jobs.WrongError, match="2 outputs of 3 steps"):
        hostile_jobs._losses_apart(case, 0, range(3), [None, None], [None] * 3)
    labels = [hostile_jobs.make_batch(case, step, 0).labels for step in range(3)]
    right = [torch.zeros_like(of_step) for of_step in labels]
    wrong = [*right[:2], right[2] + 1e-2]
    assert hostile_jobs._losses_apart(case, 0, range(3), right, right) == 0
    with pytest.raises(hostile_jobs.WrongError, match=r"step 2: loss .* from stock's"):
        hostile_jobs._losses_apart(case, 0, range(3), wrong, right)
