"""A short run of the faults benchmark: it survives what it should, and tells what it does not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.reliability import faults
from benchmarks.reliability.fault_cases import EVERY_STEPS, KINDS, LAUNCHERS, STEPS, all_cases
from torchrec_picasso.app.cli.train import _resumes
from torchrec_picasso.app.config import CheckpointConfig, TrainConfig


def test_a_run_that_was_struck_goes_on(tmp_path: Path) -> None:
    """A rank killed at a step while a checkpoint may be being written, and a flipped bit."""
    cases = [case for case in all_cases(["run_ranks"], ["kill_step", "flip"], 2) if case.seed == 1]
    outcomes = {outcome.name: outcome for outcome in faults.inject(tmp_path, cases)}
    killed, flipped = outcomes["kill_step-run_ranks-1"], outcomes["flip-run_ranks-1"]
    assert [outcome.verdict for outcome in (killed, flipped)] == ["survived"] * 2, outcomes
    assert killed.resumed_from is not None
    assert killed.resumed_from % EVERY_STEPS == 0
    assert "is not what was written; it is step_" in flipped.detail
    again = list(faults.inject(tmp_path, cases))  # nothing is run twice
    assert {outcome.name: outcome for outcome in again} == outcomes
    _losses_that_differ_are_told(json.loads((tmp_path / "unbroken.json").read_text()))


def _losses_that_differ_are_told(unbroken: dict[str, Any]) -> None:
    assert len(unbroken["losses"]) == STEPS
    late = {**unbroken, "first_step": 8, "losses": unbroken["losses"][8:]}
    assert faults._losses_apart(late, unbroken) == 0
    wrong = {**late, "losses": [late["losses"][0] * 1.001, *late["losses"][1:]]}
    with pytest.raises(faults._FaultError, match=r"losses differ by 1\.0e-03"):
        faults._losses_apart(wrong, unbroken)
    with pytest.raises(faults._FaultError, match="15 losses instead of 16"):
        faults._losses_apart({**late, "losses": late["losses"][1:]}, unbroken)


def test_cases_are_many_and_always_the_same() -> None:
    cases = all_cases(list(LAUNCHERS), list(KINDS), 10)
    assert len(cases) == 10 * sum(map(len, LAUNCHERS.values())) == len({c.name for c in cases})
    drawn = [(case.rank, case.step, case.room) for case in cases]
    assert drawn == [(case.rank, case.step, case.room) for case in cases]
    assert {rank for rank, _, _ in drawn} == {0, 1}
    damaged = [case.step for case in cases if case.kind in ("flip", "truncate")]
    assert min(damaged) > 2 * EVERY_STEPS  # there is one before the newest


def test_when_a_run_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def resumes(asked: str | None, restarts: int | None, folder: Path | None) -> bool:
        monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
        if restarts is not None:
            monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(restarts))
        checkpoint = CheckpointConfig(folder=None if folder is None else str(folder))
        return _resumes(TrainConfig(checkpoint=checkpoint), asked)

    empty, used = tmp_path / "empty", tmp_path / "used"
    (empty / "step_00000004.tmp").mkdir(parents=True)
    (used / "step_00000004").mkdir(parents=True)
    for folder, is_used in ((empty, False), (used, True)):
        assert resumes("auto", None, folder) is is_used
        assert resumes("newest", None, folder)  # and is refused where there is none
        assert not resumes(None, None, folder)
        assert not resumes(None, 0, folder)
        assert resumes(None, 1, folder) is is_used  # torchrun started it again
    assert not resumes(None, 2, None)
    assert resumes("auto", None, None)  # refused: no folder is named
