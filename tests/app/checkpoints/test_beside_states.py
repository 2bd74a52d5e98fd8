"""Files beside a checkpoint's states: hot rows, their uses and the setting; damage by name. Old
checkpoints go, newer ones stay; a crash while deleting leaves none that only looks whole."""

import contextlib
import io
import itertools
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.app.runs.tiny import checkpoints, tiny_run
from torchrec_picasso.app.checkpoints.folder import newest_checkpoint
from torchrec_picasso.app.checkpoints.hot_rows import read_hot_rows, read_uses, write_uses
from torchrec_picasso.app.checkpoints.retention import delete_old_checkpoints
from torchrec_picasso.app.checkpoints.setting import read_setting, write_setting
from torchrec_picasso.app.config import PipelineConfig, ShardingConfig, TrainConfig
from torchrec_picasso.app.launch.run_ranks import run_ranks
from torchrec_picasso.app.runs.train import train_on_rank
from torchrec_picasso.errors import PicassoError
from torchrec_picasso.rows.hot_rows import SavedUses
from torchrec_picasso.rows.refresh_policy import Refresh
from torchrec_picasso.schedule.schedule import Setting

NUM_HOT = 20
OFTEN = Refresh(every_steps=4, half_life_steps=50, deviations=0.0)


def _config(folder: Path, steps: int, num_hot: int = NUM_HOT) -> TrainConfig:
    return tiny_run(
        steps=steps,
        sharding=ShardingConfig(hot_rows=num_hot),
        pipeline=PipelineConfig(num_micro_batches=2, lookahead=True, refresh=OFTEN),
        checkpoint=checkpoints(folder, 4, async_save=True),
    )


def _run(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    path, said = Path(folder), io.StringIO()
    whole = train_on_rank(rank, world_size, _config(path / "whole", 8), False)
    with contextlib.redirect_stdout(said):
        first = train_on_rank(rank, world_size, _config(path / "cut", 4), False)
        second = train_on_rank(rank, world_size, _config(path / "cut", 8), True)
        fewer = _config(path / "cut", 12, NUM_HOT - 5)
        third = train_on_rank(rank, world_size, fewer, True)
    return {
        "whole": whole["losses"],
        "cut": first["losses"] + second["losses"],
        "steps": third["first_step"] + len(third["losses"]),
        "said": said.getvalue(),
    }


def test_a_resumed_run_goes_on_with_its_hot_rows(tmp_path: Path) -> None:
    ranks = run_ranks(_run, 2, str(tmp_path), timeout_s=120)
    for found in ranks:
        assert found["cut"] == pytest.approx(found["whole"], rel=1e-5)
        assert found["steps"] == 12
    said = ranks[0]["said"]
    assert f"{NUM_HOT} hot rows are those of {tmp_path / 'cut' / 'step_00000004'}" in said
    fresh = (
        f"hot rows were chosen again: those of {tmp_path / 'cut' / 'step_00000008'} are of another"
    )
    assert fresh in said
    before, after = (read_hot_rows(tmp_path / "cut" / f"step_{step:08d}") for step in (4, 8))
    assert sum(map(len, before.values())) == sum(map(len, after.values())) == NUM_HOT
    assert any(not torch.equal(rows, after[name]) for name, rows in before.items() if name in after)
    # what was counted before counts on, so later looks choose as in the run that was not cut
    whole, cut = (read_hot_rows(tmp_path / run / "step_00000008") for run in ("whole", "cut"))
    torch.testing.assert_close(cut, whole)


ROWS, USES = torch.tensor([1, 4]), torch.tensor([0.5, 3.0])


def test_uses_come_back(tmp_path: Path) -> None:
    assert read_uses(tmp_path) is None
    assert read_hot_rows(tmp_path) is None
    write_uses(tmp_path, SavedUses(num_batches=7.5, uses_by_table={"t": (ROWS, USES)}))
    saved = read_uses(tmp_path)
    assert saved.num_batches == 7.5
    torch.testing.assert_close(saved.uses_by_table, {"t": (ROWS, USES)})


def test_a_setting_comes_back_to_the_same_ranks_and_batches(tmp_path: Path) -> None:
    assert read_setting(tmp_path, 2, 512) is None
    for setting in (Setting(4, lookahead=True), Setting(1, lookahead=False)):
        write_setting(tmp_path, setting, 2, 512)
        assert read_setting(tmp_path, 2, 512) == setting
        assert read_setting(tmp_path, 4, 512) is None
        assert read_setting(tmp_path, 2, 1024) is None


DAMAGED: dict[str, list[Any]] = {
    "hot_rows.pt: cannot be read as hot rows": [
        b"",
        b"no pickle",
        torch.zeros(3),
        {"t": torch.zeros(3)},
        [1, 2],
        {"t": torch.tensor([-1, 2])},
        {"t": torch.tensor([2, 2])},
        {1: torch.tensor([2])},
        {"t": torch.tensor([1]).to_sparse()},
        {"t": torch.zeros(1, dtype=torch.int64).expand(10**10)},  # 80 GB if it were copied
    ],
    "uses.pt: cannot be read as hot rows": [
        {"batches": 1.0},
        {"batches": float("nan"), "tables": {}},
        {"batches": 1, "tables": {}},
        {"batches": 1.0, "tables": {1: [ROWS, USES]}},
        {"batches": 1.0, "tables": {"t": [ROWS]}},
        {"batches": 1.0, "tables": {"t": [ROWS.flip(0), USES]}},
        {"batches": 1.0, "tables": {"t": [ROWS, USES.double()]}},
        {"batches": 1.0, "tables": {"t": [ROWS, USES[:1]]}},
        {"batches": 1.0, "tables": {"t": [ROWS, -USES]}},
    ],
    "setting.json: cannot be read as a setting": [
        b"",
        b"[]",
        b"{}",
        b"\xff",
        b'{"num_micro_batches": "4", "lookahead": true, "ranks": 2, "batch_size": 512}',
        b'{"num_micro_batches": 4, "lookahead": 1, "ranks": 2, "batch_size": 512}',
        b'{"num_micro_batches": [4], "lookahead": true, "ranks": 2, "batch_size": 512}',
    ],
}


@pytest.mark.parametrize(
    ("message", "content"),
    [(message, content) for message in DAMAGED for content in DAMAGED[message]],
)
def test_a_damaged_file_is_named(tmp_path: Path, message: str, content: Any) -> None:
    name = message.partition(":")[0]
    if isinstance(content, bytes):
        (tmp_path / name).write_bytes(content)
    else:
        torch.save(content, tmp_path / name)
    read = {
        "hot_rows.pt": read_hot_rows,
        "uses.pt": read_uses,
        "setting.json": lambda folder: read_setting(folder, 2, 512),
    }[name]
    with pytest.raises(PicassoError, match=rf"{re.escape(message)}; delete"):
        read(tmp_path)


PARTS = (".metadata", "__0_0.distcp", "__1_0.distcp")


class CrashError(BaseException):
    """The end of the process: nothing in between may catch it."""


def make(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).mkdir(parents=True)
        for part in PARTS:
            (folder / name / part).write_text(name)


def steps(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(("keep_last", "num_left"), [(1, 1), (3, 3), (4, 4), (9, 4), (None, 4)])
def test_the_newest_stay(tmp_path: Path, keep_last: int | None, num_left: int) -> None:
    names = [f"step_000000{step}" for step in (10, 20, 30, 40)]
    make(tmp_path, names[2], names[0], names[3], names[1])
    assert delete_old_checkpoints(tmp_path / names[3], keep_last) == []
    assert steps(tmp_path) == names[-num_left:]


def test_steps_are_numbers_not_names(tmp_path: Path) -> None:
    make(tmp_path, "step_99999999", "step_100000000", "step_100000001")
    delete_old_checkpoints(tmp_path / "step_100000001", 2)
    assert steps(tmp_path) == ["step_100000000", "step_100000001"]


def test_what_a_crash_left_goes_and_what_is_not_ours_stays(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    make(elsewhere, "step_00000001")
    folder = tmp_path / "run"
    make(folder, "step_00000010", "step_00000020", "step_00000030")
    make(folder, "step_00000005.deleted", "step_00000015.tmp", "step_00000030.tmp")
    kept = ["notes", "notes.tmp", "step_7", "step_00000099.tmp", "step_00000099", "x.deleted"]
    make(folder, *kept)
    (folder / "step_00000008").mkdir()  # no .metadata in it: not a checkpoint of ours
    (folder / "step_00000009").symlink_to(elsewhere / "step_00000001")
    (folder / "step_00000003.tmp").touch()
    kept += ["step_00000008", "step_00000009", "step_00000003.tmp"]
    assert delete_old_checkpoints(folder / "step_00000030", 2) == []
    assert steps(folder) == sorted([*kept, "step_00000020", "step_00000030"])
    assert steps(elsewhere / "step_00000001") == sorted(PARTS)


@pytest.mark.parametrize("newest", ["step_00000030", "step_00000020.tmp", "none"])
def test_nothing_goes_before_the_newest_is_whole(tmp_path: Path, newest: str) -> None:
    make(tmp_path, "step_00000010", "step_00000020")
    (tmp_path / "step_00000030").mkdir()  # without what is written last
    (problem,) = delete_old_checkpoints(tmp_path / newest, 1)
    assert problem.endswith(f"{newest} is not a whole checkpoint; nothing is deleted before it is")
    assert steps(tmp_path) == ["step_00000010", "step_00000020", "step_00000030"]


def crash_at(call: int, patch: pytest.MonkeyPatch) -> None:
    """Ends the process at the n-th change of the disk, counted from 0."""
    calls = itertools.count()

    def patched(name: str) -> Any:
        real = getattr(os, name)

        def change(*args: Any, **kwargs: Any) -> Any:
            if next(calls) == call:
                raise CrashError
            return real(*args, **kwargs)

        return change

    for name in ("replace", "unlink", "rmdir", "fsync"):
        patch.setattr(os, name, patched(name))


def test_a_crash_at_any_moment_leaves_no_half_that_looks_whole(tmp_path: Path) -> None:
    names = [f"step_000000{step}" for step in (10, 20, 30, 40)]
    crashes = 0
    for call in itertools.count():
        folder = tmp_path / str(call)
        make(folder, *names, "step_00000025.tmp")
        try:
            with pytest.MonkeyPatch.context() as patch:
                crash_at(call, patch)
                delete_old_checkpoints(folder / names[-1], 2)
            break
        except CrashError:
            crashes += 1
        for path in folder.iterdir():
            if path.suffix not in (".tmp", ".deleted"):
                assert sorted(part.name for part in path.iterdir()) == sorted(PARTS), path
        newest, _ = newest_checkpoint(folder)
        assert newest.name == names[-1]
        assert delete_old_checkpoints(newest, 2) == []  # the run goes on
        assert steps(folder) == names[2:]
    # a name, its sync, three files and the folder, twice, and the unfinished one
    assert crashes == 2 * (1 + 1 + len(PARTS) + 1) + len(PARTS) + 1


def test_a_failed_deletion_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, "step_00000010", "step_00000020", "step_00000030")
    real = shutil.rmtree

    def stale(path: Path) -> None:
        if "00010" in path.name:
            raise OSError(16, "Device or resource busy")
        real(path)

    monkeypatch.setattr(shutil, "rmtree", stale)
    (problem,) = delete_old_checkpoints(tmp_path / "step_00000030", 1)
    assert problem.startswith(f"could not delete {tmp_path / 'step_00000010'}: Device or resource ")
    assert steps(tmp_path) == ["step_00000010.deleted", "step_00000030"]
    monkeypatch.undo()
    make(tmp_path, "step_00000040")
    assert delete_old_checkpoints(tmp_path / "step_00000040", 1) == []
    assert steps(tmp_path) == ["step_00000040"]
