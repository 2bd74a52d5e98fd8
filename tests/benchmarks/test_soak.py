"""A short soak is as it should be, and each thing that could be wrong is found.

``python -m benchmarks.reliability.soak`` takes 2,000 steps.
"""

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

from benchmarks.reliability import memory, soak
from benchmarks.reliability.process_figures import figures, open_files, slope
from benchmarks.reliability.small_trainer import SmallTrainer
from benchmarks.reliability.soak_batches import Stretch, soak_batch
from benchmarks.reliability.soak_side import Found
from benchmarks.reliability.soak_verdict import judge
from torchrec_picasso.app.launch.run_ranks import RankError
from torchrec_picasso.sharding.sharded_module import HotColdModule

STEPS, RANKS = 80, 2
Sides = tuple[list[Found], list[Found]]
_KEPT: list[Any] = []


def _plant(step: int, trainer: SmallTrainer) -> None:
    """Keeps memory, descriptors and threads on rank 1; at the end, spoils a replica on rank 0."""
    if dist.get_rank() == 1:
        _KEPT.append([trainer.model, *(torch.ones(1 << 13) for _ in range(16))])
        if step % 20 == 0:
            _KEPT.append(open(os.devnull))  # noqa: SIM115
            threading.Thread(target=threading.Event().wait, daemon=True).start()
    elif step == STEPS:
        module = next(of for of in trainer.model.modules() if isinstance(of, HotColdModule))
        sharding: Any = module.table_shardings()[0]
        sharding.group.storages[0].tables.weights.replicas.data[1, 0] += 1.0


@cache
def _side(name: str, plant: Any = None) -> list[Found]:
    with TemporaryDirectory() as folder:
        return soak.run_side(soak.plans(STEPS)[name], RANKS, Path(folder, "checkpoints"), plant)


def _sides() -> Sides:
    return _side("ours"), _side("stock")


def test_a_short_soak_is_as_it_should_be() -> None:
    found = judge(*_sides())
    assert found["failed"] == []
    ours, stock = found["ours"], found["stock"]
    for name in ("steps", "samples", "evaluations", "checkpoints", "async_checkpoints", "reloads"):
        assert ours[name] == stock[name] > 0, name
    assert ours["steps"] == STEPS
    assert found["losses"]["compared"] > 0.9 * STEPS
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
    options = ["-o", str(tmp_path), "--steps", str(STEPS)]
    assert soak.main(options) == 0
    assert "all as it should be" in capsys.readouterr().out
    monkeypatch.setattr(soak, "run_side", None)
    assert soak.main(options) == 0

    def broken(plan: Any, *rest: Any) -> list[Found]:
        if plan.placement == "rows":
            raise RankError(1, "raised PicassoError: table 'user', row 3: the replica")
        return canned(plan, *rest)

    monkeypatch.setattr(soak, "run_side", broken)
    options[-1] = str(STEPS + 1)  # other settings, so it runs
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
