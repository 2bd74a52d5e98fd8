"""Old checkpoints go, newer ones stay; a crash while deleting leaves none that only looks whole."""

import itertools
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from torchrec_picasso.app.checkpoints.folder import newest_checkpoint
from torchrec_picasso.app.checkpoints.retention import delete_old_checkpoints

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


def test_what_cannot_be_deleted_ends_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
