"""A damaged checkpoint is found by name and passed over; a failed write leaves the one before.

What is written while training goes on is the state at the call: the writing thread is held back
until training has changed everything, so a state that was not copied would show."""

import errno
import hashlib
import itertools
import os
import pickle
import random
import shutil
import subprocess
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from benchmarks.reliability.broken_writes import broken_writes, disk_is_full
from benchmarks.reliability.small_trainer import SmallTrainer
from benchmarks.reliability.whole_state import differences, join_state
from tests.support.processes import wait_until
from torchrec_picasso.app.checkpoints.load import load_checkpoint, newest_undamaged
from torchrec_picasso.app.checkpoints.safe_reader import SafeReader, load_safely
from torchrec_picasso.app.checkpoints.sums import damages
from torchrec_picasso.app.checkpoints.write import begin_checkpoint, save_checkpoint
from torchrec_picasso.app.checkpoints.writer import CheckpointWriter
from torchrec_picasso.app.config import CheckpointConfig
from torchrec_picasso.app.launch.run_ranks import run_ranks
from torchrec_picasso.errors import PicassoError

FILES = (".metadata", "__0_0.distcp", "__1_0.distcp", "hot_rows.pt")
SUMS = "SHA256SUMS"


def write_hot_rows(folder: Path) -> None:
    torch.save({"user": torch.arange(3)}, folder / "hot_rows.pt")


def flip(path: Path, at: int, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1 << bit
    path.write_bytes(content)


def break_and_look(rank: int, world_size: int, top: str) -> Any:
    """Returns what is found after each of many damages, and what a load gives after one."""
    source, copy = Path(top, "source"), Path(top, "copy")
    trainer = SmallTrainer("rows", "rowwise_adagrad")
    trainer.train(range(1))
    save_checkpoint(source, 1, trainer.state(), write_hot_rows)
    expected = join_state(trainer.state())
    trainer.train(range(1, 2))
    save_checkpoint(source, 2, trainer.state(), write_hot_rows)
    chance = random.Random(0)
    found = []
    for name in (*FILES, SUMS):
        size = (source / "step_00000002" / name).stat().st_size
        at, bit, cut = chance.randrange(size), chance.randrange(8), chance.randrange(size)
        for how in ("flipped", "truncated", "missing"):
            if (name, how) in ((SUMS, "missing"), (".metadata", "missing")):
                continue  # without sums it is one of an older format; without metadata it is none
            if rank == 0:
                shutil.rmtree(copy, ignore_errors=True)
                shutil.copytree(source, copy)
                broken = copy / "step_00000002" / name
                if how == "flipped":
                    flip(broken, at, bit)
                elif how == "truncated":
                    os.truncate(broken, cut)
                else:
                    broken.unlink()
            dist.barrier()
            said: list[str] = []
            newest = newest_undamaged(copy, said.append)
            found.append((name, newest.name, said, sorted(path.name for path in copy.iterdir())))
            dist.barrier()
    fresh = SmallTrainer("rows", "rowwise_adagrad", seed=3)
    step = load_checkpoint(newest, fresh.state(), fresh.load_state)
    if rank == 0:
        flip(source / "step_00000002" / "__0_0.distcp", 5000, 3)
    dist.barrier()
    with pytest.raises(PicassoError, match=r"__0_0\.distcp is not what was written; load another"):
        load_checkpoint(source / "step_00000002", fresh.state(), fresh.load_state)
    return found, step, differences(join_state(fresh.state()), expected)


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(tmp_path: Path) -> None:
    results = run_ranks(break_and_look, 2, str(tmp_path), timeout_s=100)
    for found, step, differ in results:
        assert len(found) == 3 * 5 - 2
        for name, newest, said, left in found:
            assert newest == "step_00000001"
            assert len(said) == 1
            assert "step_00000002: " in said[0]
            if name != SUMS:  # of that a line may name what is not there
                assert f" {name} " in said[0]
            assert left == ["step_00000001", "step_00000002.damaged"]
        assert (step, differ) == (1, [])
    whole = tmp_path / "source" / "step_00000001"
    assert sorted(path.name for path in whole.iterdir()) == sorted((*FILES, SUMS))
    if shutil.which("sha256sum"):  # the format is coreutils' own
        subprocess.run(["sha256sum", "--check", "--quiet", SUMS], cwd=whole, check=True)


def test_each_share_looks_at_its_own_files(tmp_path: Path) -> None:
    for number in range(5):
        (tmp_path / f"{number}").write_text("changed")
    sums = [f"{'0' * 64}  {number}\n" for number in range(5)]
    (tmp_path / SUMS).write_text("".join(sums))
    shares = [damages(tmp_path, share, 3) for share in range(3)]
    assert [len(share) for share in shares] == [2, 2, 1]
    assert sorted(itertools.chain(*shares)) == damages(tmp_path)


def test_files_without_a_sum_are_damage(tmp_path: Path) -> None:
    """The list may have lost lines."""
    (tmp_path / ".metadata").touch()
    empty = hashlib.sha256().hexdigest()
    (tmp_path / SUMS).write_text(f"{empty}  .metadata\n")
    assert damages(tmp_path) == []
    (tmp_path / "__0_0.distcp").touch()
    assert damages(tmp_path) == ["__0_0.distcp has no sum"]


BREAKS = ((1, ".distcp", 0), (0, ".distcp", 700), (0, ".metadata", 5), (0, "SHA256SUMS", 80))
"""Which rank's disk is full, in which file, after how many bytes."""


def fill_the_disk(rank: int, world_size: int, top: str) -> tuple[list[str], list[str]]:
    """The errors where a disk is full at some byte of some file, and the names left."""
    folder = Path(top, "run")
    trainer = SmallTrainer("rows", "rowwise_adagrad")
    save_checkpoint(folder, 1, trainer.state())
    errors = []
    for whose, part, room in BREAKS:
        limits = broken_writes(part, room, disk_is_full) if rank == whose else nullcontext()
        with limits, pytest.raises(PicassoError) as caught:
            save_checkpoint(folder, 2, trainer.state())
        errors.append(str(caught.value))
    return errors, sorted(path.name for path in folder.iterdir())


def test_a_full_disk_is_told_on_all_ranks_and_leaves_the_one_before(tmp_path: Path) -> None:
    for errors, names in run_ranks(fill_the_disk, 2, str(tmp_path), timeout_s=100):
        assert len(errors) == len(BREAKS)
        for error in errors:
            assert error.startswith(f"{tmp_path}/run/step_00000002.tmp: could not be written (")
            assert "No space left on device" in error
        assert names == ["step_00000001", "step_00000002.tmp"]


def refuse_to_begin(rank: int, world_size: int, top: str) -> str:
    """A folder that cannot be made, on rank 0 alone."""

    def fail(folder: Path) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with pytest.raises(PicassoError) as caught:
        begin_checkpoint(top, 3, fail)
    return str(caught.value)


def test_a_folder_that_cannot_be_made_is_told_on_all_ranks(tmp_path: Path) -> None:
    first, second = run_ranks(refuse_to_begin, 2, str(tmp_path), timeout_s=60)
    assert first == second
    assert "Read-only file system" in first


class Malicious:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


def test_metadata_calls_nothing(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Malicious(tmp_path / "ran")))
    with pytest.raises(pickle.UnpicklingError, match=r"names posix\.system, which it must not"):
        SafeReader(tmp_path).read_metadata()
    assert not (tmp_path / "ran").exists()
    pickle.loads((tmp_path / ".metadata").read_bytes())  # it would have, read as it comes
    assert (tmp_path / "ran").exists()


def test_values_call_nothing(tmp_path: Path) -> None:
    bad = {"value": Malicious(tmp_path / "ran")}
    torch.distributed.checkpoint.save(bad, checkpoint_id=tmp_path / "saved", no_dist=True)
    with pytest.raises(BaseException, match="Weights only load failed"):
        load_safely(tmp_path / "saved", {"value": 0}, no_dist=True)
    assert not (tmp_path / "ran").exists()


PLANS = ("rows", "bags", "column_wise")


class HeldBack:
    """Lets no rank's files be written before ``go`` is set, and fails there if told so."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.go = threading.Event()
        self.fails = False
        write = dcp.FileSystemWriter.write_data

        def wait_and_write(*args: Any, **kwargs: Any) -> Any:
            assert self.go.wait(60)
            if self.fails:
                raise OSError(28, "No space left on device")
            return write(*args, **kwargs)

        patch.setattr(dcp.FileSystemWriter, "write_data", wait_and_write)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def save_and_train_on(rank: int, world_size: int, top: str) -> dict[str, Any]:
    """Per plan: names while two checkpoints are written and after, and what a load differs in."""
    found: dict[str, Any] = {}
    loaded = SmallTrainer("table_wise", "adagrad", seed=5)
    for plan in PLANS:
        folder, said = Path(top, plan), []
        with pytest.MonkeyPatch.context() as patch:
            held = HeldBack(patch)
            config = CheckpointConfig(folder=str(folder), keep_last=1, async_save=True)
            writer = CheckpointWriter(config, said.append)
            trainer = SmallTrainer(plan, "adagrad")
            trainer.train(range(2))
            writer.save(2, trainer.state)
            trainer.train(range(2, 4))
            during_first = names(folder)
            held.go.set()
            whole = folder / "step_00000002"  # nobody has to ask for it to be that
            wait_until(whole.exists, f"{whole} is there")
            writer.finish()
            held.go.clear()
            trainer.train(range(4, 6))  # replicas are ahead of their homes
            writer.save(6, trainer.state)
            expected = join_state(trainer.state())
            trainer.train(range(6, 8))
            during_second = names(folder)
            held.go.set()
            writer.finish()
            dist.barrier()  # rank 0 has deleted
            after = names(folder)
        load_checkpoint(folder / "step_00000006", loaded.state(), loaded.load_state)
        differ = differences(join_state(loaded.state()), expected)
        found[plan] = during_first, during_second, after, said, differ
    return found


def test_what_is_written_is_the_state_at_the_call(tmp_path: Path) -> None:
    first, second = run_ranks(save_and_train_on, 2, str(tmp_path), timeout_s=120)
    two, six = "step_00000002", "step_00000006"
    for plan, (during_first, during_second, after, said, differ) in first.items():
        assert during_first == [f"{two}.tmp"]
        assert during_second == [two, f"{six}.tmp"]  # the only whole one stays, whatever keep_last
        assert after == [six]
        folder = tmp_path / plan
        assert said == [f"step 2: wrote {folder / two}", f"step 6: wrote {folder / six}"]
        assert not differ, plan
        assert second[plan] == (during_first, during_second, after, [], [])


def fail_to_write(rank: int, world_size: int, top: str) -> tuple[str, list[str], list[str]]:
    """One rank's disk is full while the second checkpoint is written."""
    folder = Path(top, "run")
    with pytest.MonkeyPatch.context() as patch:
        held = HeldBack(patch)
        held.go.set()
        config = CheckpointConfig(folder=str(folder), keep_last=1, async_save=True)
        writer = CheckpointWriter(config, lambda line: None)
        trainer = SmallTrainer("rows", "sgd")
        writer.save(1, trainer.state)
        writer.finish()
        held.fails = rank == 1
        writer.save(2, trainer.state)
        with pytest.raises(PicassoError) as caught:
            writer.finish()
        left = names(folder)
        held.fails = False
        dist.barrier()
        writer.save(3, trainer.state)  # a failure is told once
        writer.finish()
        dist.barrier()  # rank 0 has deleted
    return str(caught.value), left, names(folder)


def test_a_failure_is_told_on_all_ranks_and_leaves_the_one_before(tmp_path: Path) -> None:
    for said, left, after in run_ranks(fail_to_write, 2, str(tmp_path), timeout_s=120):
        unfinished = tmp_path / "run" / "step_00000002.tmp"
        assert said.startswith(f"{unfinished}: could not be written (")
        assert "No space left on device" in said
        assert said.endswith("continue with --resume from the checkpoint before")
        assert left == ["step_00000001", "step_00000002.tmp"]
        assert after == ["step_00000003"]
