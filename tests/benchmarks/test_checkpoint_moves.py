"""Checkpoints move between plans and world sizes, and the benchmark of it notices what is wrong.

The sample has every plan as source and as target, and 1 to 4 ranks on both sides;
``python -m benchmarks.reliability.checkpoint_moves`` makes all moves.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.reliability import checkpoint_moves
from benchmarks.reliability.checkpoint_moves import run_moves
from benchmarks.reliability.moves import Move, Side, all_moves
from benchmarks.reliability.small_trainer import PLANS

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
