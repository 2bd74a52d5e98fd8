"""Faults, drift and moved checkpoints: a short run of each benchmark, and what each must notice.

A struck run survives what it should; hot rows follow ids that move on every hour; checkpoints move
between plans and world sizes. The sample of moves has every plan as source and as target, and 1 to
4 ranks on both sides; ``python -m benchmarks.reliability.checkpoint_moves`` makes all moves.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.reliability import checkpoint_moves, faults
from benchmarks.reliability.checkpoint_moves import run_moves
from benchmarks.reliability.drift import Stream, measure, moved_shares, summary_of
from benchmarks.reliability.fault_cases import EVERY_STEPS, KINDS, LAUNCHERS, STEPS, all_cases
from benchmarks.reliability.moves import Move, Side, all_moves
from benchmarks.reliability.small_trainer import PLANS
from torchrec_picasso import Refresh
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


HOURS, ROWS, FEATURES, BATCH, STEPS_PER_HOUR = 5, 600, 4, 16, 18


def _stream(step_of_hour: int, refresh: Refresh) -> Stream:
    """Ids of which nearly all are among six, which are others every hour."""
    rng = np.random.default_rng(0)
    samples = 2 * BATCH * STEPS_PER_HOUR
    ids = [
        step_of_hour * hour + np.minimum(rng.geometric(0.3, (samples, FEATURES)), 40)
        for hour in range(HOURS)
    ]
    ids[-1][-1] = ROWS - 1
    return Stream(
        ids_NF=np.concatenate(ids).astype(np.int64),
        hour_N=np.repeat(np.arange(HOURS), samples),
        batch_size=BATCH,
        counted=samples,
        refresh=refresh,
    )


def test_hot_rows_follow_and_nothing_else_changes() -> None:
    found = measure(_stream(50, Refresh(every_steps=2, half_life_steps=2, deviations=1.0)))
    of = summary_of(found, skipped_hours=1)
    assert of["frozen"] < 0.05
    assert of["refreshed"] > 0.6 * of["oracle"]
    assert of["oracle"] > 0.8
    assert found["loss_difference"] < 1e-6
    assert len(found["looks"]) == HOURS * STEPS_PER_HOUR // 2


def test_a_look_comes_early_where_coverage_falls() -> None:
    found = measure(
        _stream(50, Refresh(every_steps=40, half_life_steps=2, check_steps=3, deviations=1.0))
    )
    of = summary_of(found, skipped_hours=1)
    assert of["refreshed"] > 0.25 * of["oracle"]
    steps = [look["step"] for look in found["looks"]]
    assert steps
    assert all(step % 3 == 0 for step in steps)
    # the first comes soon after the first hour's end
    assert STEPS_PER_HOUR < steps[0] <= STEPS_PER_HOUR + 6


def test_without_drift_rows_stay() -> None:
    found = measure(_stream(0, Refresh(every_steps=12)))
    assert sum(moved_shares(found)) == 0
    assert summary_of(found)["refreshed"] == pytest.approx(summary_of(found)["frozen"])


SAMPLE = {
    "rowwise_adagrad": (
        "rows@1 bags@2",
        "bags@2 uneven@3",
        "uneven@3 row_wise@4",
        "row_wise@4 all_hot@1",
        "all_hot@1 table_wise@2",
        "table_wise@2 rows@3",
        "column_wise@3 column_wise@4",
        "column_wise@4 rows@3",  # one value per row against one per row of a column shard
        "table_wise@2 column_wise@4",
    ),
    "adagrad": ("rows@2 column_wise@3", "column_wise@3 rows@1", "uneven@3 rows@2"),
    "sgd": ("table_wise@2 bags@2",),  # nothing is kept of a table, and rank 1 has one of its own
}
REFUSED = {
    "rowwise_adagrad, column_wise@4 to rows@3": "240 in the checkpoint and 60 in this plan",
    "rowwise_adagrad, table_wise@2 to column_wise@4": "60 in the checkpoint and 240 in this plan",
}


def side(name: str) -> Side:
    plan, _, world_size = name.partition("@")
    return Side(plan, int(world_size))


def sample() -> list[Move]:
    pairs = [(o, *pair.split()) for o, of_optimizer in SAMPLE.items() for pair in of_optimizer]
    return [Move(optimizer, side(source), side(target)) for optimizer, source, target in pairs]


def test_the_sample_has_every_plan_and_world_size_on_both_sides() -> None:
    for sides in ({move.source for move in sample()}, {move.target for move in sample()}):
        assert {one.plan for one in sides} == set(PLANS)
        assert {one.world_size for one in sides} == {1, 2, 3, 4}
    assert [move.name for move in sample() if not move.fits] == sorted(REFUSED)


def test_all_moves_are_all_pairs_in_both_directions() -> None:
    sides = [Side(plan, ranks) for plan in PLANS for ranks in (1, 2, 3, 4)]
    moves = all_moves(["adagrad", "sgd"], sides)
    assert len({move.name for move in moves}) == 2 * len(sides) ** 2
    assert all(move.fits for move in moves)


def test_training_goes_on_after_any_move(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = {outcome.name: outcome for outcome in run_moves(tmp_path, sample())}
    assert outcomes.keys() == {move.name for move in sample()}
    for name, outcome in outcomes.items():
        if name in REFUSED:
            assert outcome.verdict == "refused", outcome
            assert REFUSED[name] in outcome.detail
            assert "into as many column shards as when it was written" in outcome.detail
        else:
            assert outcome.verdict == "same", outcome
    # a rerun makes what is missing: here a move whose line was cut off, of state that has changed
    whole = tmp_path / "checkpoints" / "adagrad" / "uneven@3" / "whole.pt"
    state = torch.load(whole)
    state["optim/state/ec.embeddings.shop.weight/shop.momentum1"][11, 15] += 1e-6
    torch.save(state, whole)
    lines = (tmp_path / "moves.jsonl").read_text().splitlines(keepends=True)
    kept = [line for line in lines if "uneven@3 to rows@2" not in line]
    assert len(kept) == len(lines) - 1
    (tmp_path / "moves.jsonl").write_text("".join(kept) + '{"name": "adagrad, uneven@3 to ro\n')
    again = {outcome.name: outcome for outcome in run_moves(tmp_path, sample())}
    changed = again.pop("adagrad, uneven@3 to rows@2")
    assert changed.verdict == "failed"
    assert changed.detail == (
        "other values after the load: optim/state/ec.embeddings.shop.weight/shop.momentum1"
    )
    assert all(outcomes[name] == outcome for name, outcome in again.items())
    monkeypatch.setattr(checkpoint_moves, "run_ranks", None)  # nothing is left to do
    assert len(list(run_moves(tmp_path, sample()))) == len(sample())


def test_a_move_that_ends_its_ranks_is_a_failure_and_others_go_on(tmp_path: Path) -> None:
    moves = [Move("sgd", Side(plan, 1), Side("rows", 1)) for plan in ("nonsense", "table_wise")]
    good, bad = moves[1], moves[0]
    assert [outcome.verdict for outcome in run_moves(tmp_path, [good])] == ["same"]
    path = tmp_path / "checkpoints" / "sgd" / bad.source.name / "step_00000005"
    path.mkdir(parents=True)
    (path / ".metadata").touch()  # looks whole, and breaks whoever reads it
    (tmp_path / "moves.jsonl").unlink()
    outcomes = {outcome.name: outcome for outcome in run_moves(tmp_path, moves)}
    assert outcomes[good.name].verdict == "same"
    assert outcomes[bad.name].verdict == "failed"
