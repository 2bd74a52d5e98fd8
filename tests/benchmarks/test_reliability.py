"""Faults, drift and moved checkpoints: a short run of each benchmark, and what each must notice.

A struck run survives what it should; hot rows follow ids that move on every hour; checkpoints move
between plans and world sizes. The sample of moves has every plan as source and as target, and 1 to
6 ranks on both sides; ``python -m benchmarks.reliability.checkpoint_moves`` makes all moves. A
short soak is as it should be, and each thing that could be wrong is found;
``python -m benchmarks.reliability.soak`` takes 2,000 steps."""

import copy
import json
import os
import threading
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from benchmarks.reliability import checkpoint_moves, faults, memory, soak
from benchmarks.reliability.checkpoint_moves import run_moves
from benchmarks.reliability.drift import Stream, measure, moved_shares, summary_of
from benchmarks.reliability.fault_cases import EVERY_STEPS, KINDS, LAUNCHERS, STEPS, all_cases
from benchmarks.reliability.moves import Move, Side, all_moves
from benchmarks.reliability.process_figures import figures, open_files, slope
from benchmarks.reliability.small_trainer import PLANS, RANKS_OF, SmallTrainer
from benchmarks.reliability.soak_batches import Stretch, soak_batch
from benchmarks.reliability.soak_side import Found
from benchmarks.reliability.soak_verdict import judge
from torchrec_picasso import Refresh
from torchrec_picasso.app.cli.checks import resumes
from torchrec_picasso.app.launch.run_ranks import RankError
from torchrec_picasso.sharding.sharded_module import HotColdModule


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
    def continues(asked: str | None, restarts: int | None, folder: str | None) -> bool:
        monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
        if restarts is not None:
            monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(restarts))
        return resumes(folder, asked)

    empty, used = tmp_path / "empty", tmp_path / "used"
    (empty / "step_00000004.tmp").mkdir(parents=True)
    (used / "step_00000004").mkdir(parents=True)
    for folder, is_used in ((str(empty), False), (str(used), True)):
        assert continues("auto", None, folder) is is_used
        assert continues("newest", None, folder)  # and is refused where there is none
        assert not continues(None, None, folder)
        assert not continues(None, 0, folder)
        assert continues(None, 1, folder) is is_used  # torchrun started it again
    assert not continues(None, 2, None)
    assert continues("auto", None, None)  # refused: no folder is named


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
    summary = summary_of(found, skipped_hours=1)
    assert summary["frozen"] < 0.05
    assert summary["refreshed"] > 0.6 * summary["oracle"]
    assert summary["oracle"] > 0.8
    assert found["loss_difference"] < 1e-6
    assert len(found["looks"]) == HOURS * STEPS_PER_HOUR // 2


def test_a_look_comes_early_where_coverage_falls() -> None:
    found = measure(
        _stream(50, Refresh(every_steps=40, half_life_steps=2, check_steps=3, deviations=1.0))
    )
    summary = summary_of(found, skipped_hours=1)
    assert summary["refreshed"] > 0.25 * summary["oracle"]
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
        "table_wise@2 node_rows@4",
        "node_rows@4 node_rows@6",
        "node_rows@6 rows@3",
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
    pairs = [(o, *pair.split()) for o, moves in SAMPLE.items() for pair in moves]
    return [Move(optimizer, side(source), side(target)) for optimizer, source, target in pairs]


def test_the_sample_has_every_plan_and_world_size_on_both_sides() -> None:
    for sides in ({move.source for move in sample()}, {move.target for move in sample()}):
        assert {one.plan for one in sides} == set(PLANS)
        assert {one.world_size for one in sides} == {1, 2, 3, 4, 6}
    assert [move.name for move in sample() if not move.fits] == sorted(REFUSED)


def test_all_moves_are_all_pairs_in_both_directions() -> None:
    sides = [Side(plan, ranks) for plan, numbers in RANKS_OF.items() for ranks in numbers]
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


SOAKED, RANKS = 80, 2
Sides = tuple[list[Found], list[Found]]
_KEPT: list[Any] = []


def _plant(step: int, trainer: SmallTrainer) -> None:
    """Keeps memory, descriptors and threads on rank 1; at the end, spoils a replica on rank 0."""
    if dist.get_rank() == 1:
        _KEPT.append([trainer.model, *(torch.ones(1 << 13) for _ in range(16))])
        if step % 20 == 0:
            _KEPT.append(open(os.devnull))  # noqa: SIM115
            threading.Thread(target=threading.Event().wait, daemon=True).start()
    elif step == SOAKED:
        module = next(each for each in trainer.model.modules() if isinstance(each, HotColdModule))
        sharding: Any = module.table_shardings()[0]
        sharding.group.storages[0].tables.weights.replicas.data[1, 0] += 1.0


@cache
def _side(name: str, plant: Any = None) -> list[Found]:
    with TemporaryDirectory() as folder:
        return soak.run_side(soak.plans(SOAKED)[name], RANKS, Path(folder, "checkpoints"), plant)


def _sides() -> Sides:
    return _side("ours"), _side("stock")


def test_a_short_soak_is_as_it_should_be() -> None:
    found = judge(*_sides())
    assert found["failed"] == []
    ours, stock = found["ours"], found["stock"]
    for name in ("steps", "samples", "evaluations", "checkpoints", "async_checkpoints", "reloads"):
        assert ours[name] == stock[name] > 0, name
    assert ours["steps"] == SOAKED
    assert found["losses"]["compared"] > 0.9 * SOAKED
    # micro-batches add up gradients in another order, and 80 steps amplify that rounding: 1.6e-5
    assert 0 < found["losses"]["largest_difference"] < 2e-5
    assert found["losses"]["last"] < found["losses"]["first"]
    assert ours["refreshes"] >= 2
    assert ours["moved_rows"] > 10
    assert ours["replicas"] == 15 + 3 + 2 + 10 + 3
    assert "trying" not in ours["setting"]
    assert "2 micro-batches" in ours["setting"]  # batches are cut, and that was tried
    assert json.loads(json.dumps(found))["lines"] == found["lines"]


def test_what_is_kept_and_a_wrong_replica_are_found() -> None:
    failed = judge(_side("ours", _plant), _side("stock"))["failed"]
    for start, words in (
        ("rank 1: rss_kib grows by ", "a step"),
        ("rank 1: heap_kib grows by ", "a step"),
        ("rank 1: objects grows by ", "a step"),
        ("rank 1: tensors grows by ", "a step"),
        ("rank 1: descriptors more than after the warm-up: ", "2 null"),
        ("rank 1: threads more than after the warm-up: ", "2 "),
        ("rank 1: descriptors left over that stock does not leave: ", "4 null"),
        ("rank 1: threads left over that stock does not leave: ", "4 "),
        ("rank 1: ", "tensors left, by stock 1"),
        ("rank 1: still alive after it was dropped: ", "model"),
        ("rank 0: table 'user', row ", "the replica on rank"),
    ):
        found = [failure for failure in failed if failure.startswith(start) and words in failure]
        assert len(found) == 1, (start, failed)
    assert not any(failure.startswith(("losses: ", "rank 0: rss")) for failure in failed)


SHOP = "model/ec.embeddings.shop.weight"
CHANGES: dict[str, Callable[[list[Found]], Any]] = {
    "losses: ": lambda ours: ours[1].errors[70, 0].mul_(1.01),
    "losses: inf from stock's": lambda ours: ours[0].errors[70, 0].fill_(torch.nan),
    "losses of evaluations: ": lambda ours: ours[0].evaluations.__setitem__(
        2, (ours[0].evaluations[2][0] * 1.01, ours[0].evaluations[2][1])
    ),
    f"{SHOP}: ": lambda ours: ours[0].state[SHOP][11, 15].add_(1e-3),
    f"{SHOP}: inf": lambda ours: ours[0].state.pop(SHOP),
    "rank 1: data ended after [20, 19, 20, 20]": lambda ours: ours[1].ends.__setitem__(1, 19),
    "ours: other state after a reload: x": lambda ours: ours[0].reloads_unlike.append("x"),
    "0 refreshes moved rows, expected 1 at least": lambda ours: ours[0].counts.pop("refreshes"),
    "rank 1: no replica was compared with its home": lambda ours: ours[1].counts.pop("replicas"),
}


@pytest.mark.parametrize("sentence", CHANGES)
def test_what_differs_is_found(sentence: str) -> None:
    ours, stock = copy.deepcopy(_sides())
    CHANGES[sentence](ours)
    (failure,) = judge(ours, stock)["failed"]
    assert failure.startswith(sentence)


def test_a_whole_soak_is_shown_and_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def canned(plan: Any, *_: Any) -> list[Found]:
        return _side("ours" if plan.placement == "rows" else "stock")

    monkeypatch.setattr(soak, "run_side", canned)
    options = ["-o", str(tmp_path), "--steps", str(SOAKED)]
    assert soak.main(options) == 0
    assert "all as it should be" in capsys.readouterr().out
    monkeypatch.setattr(soak, "run_side", None)
    assert soak.main(options) == 0

    def broken(plan: Any, *rest: Any) -> list[Found]:
        if plan.placement == "rows":
            raise RankError(1, "raised PicassoError: table 'user', row 3: the replica")
        return canned(plan, *rest)

    monkeypatch.setattr(soak, "run_side", broken)
    options[-1] = str(SOAKED + 1)  # other settings, so it runs
    assert soak.main(options) == 1
    assert "FAILED: rank 1 raised PicassoError: table 'user', row 3" in capsys.readouterr().out
    assert soak.main(["-o", str(tmp_path), "--steps", "3"]) == 2


def test_batches_are_uneven_and_drift() -> None:
    batches = [soak_batch(step, rank) for step in range(100) for rank in range(2)]
    sizes = [len(batch.labels) for batch in batches]
    assert min(sizes) == 0
    assert sizes[0] == max(sizes) == 288
    users = [set(batch.sparse_features["user"].values().tolist()) for batch in batches]
    assert len(users[0]) > 20
    assert not users[0] & set(soak_batch(200, 0).sparse_features["user"].values().tolist())
    lengths = [[Stretch(0, 20, at).num_batches(rank, 3) for rank in range(3)] for at in range(3)]
    assert lengths == [[20, 17, 14], [17, 14, 20], [14, 20, 17]]


def test_memory_is_looked_at_with_new_and_repeated_batches(tmp_path: Path) -> None:
    assert memory.main(["-o", str(tmp_path / "memory.json"), "--steps", "20"]) == 0
    found = json.loads((tmp_path / "memory.json").read_text())
    for batches in ("new", "repeated"):
        assert len(found[batches]["kib_a_step"]) == 2
        for looks in found[batches]["looks"]:
            assert [step for step, _ in looks] == list(range(2, 21, 2))
            assert min(kib for _, kib in looks) > 10_000  # torch alone has more


def test_figures_of_this_process() -> None:
    before, files = figures(), open_files()
    with open(os.devnull):
        kept = [torch.from_numpy(np.ones(1 << 26)), torch.ones(1)]
        after = figures()
        assert open_files() - files == Counter({"null": 1})
    assert after[0] - before[0] > 300_000  # of 512 MiB; others may have been given back
    assert after[1] - before[1] > 150_000
    assert after[3] - before[3] == len(kept)
    assert after[4:] == (before[4] + 1, before[5])
    assert slope([0, 50, 100, 150], [7.0, 17.0, 27.0, 37.0]) == pytest.approx(0.2)
