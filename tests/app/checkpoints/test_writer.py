"""What is written while training goes on is the state at the call; checkpoints are whole or none.

The writing thread is held back until training has changed everything, so a state that was not
copied would show.
"""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from benchmarks.reliability.small_trainer import SmallTrainer
from benchmarks.reliability.whole_state import differences, join_state
from tests.support.processes import wait_until
from torchrec_picasso.app.checkpoints.load import load_checkpoint
from torchrec_picasso.app.checkpoints.writer import CheckpointWriter
from torchrec_picasso.app.config import CheckpointConfig
from torchrec_picasso.app.launch.run_ranks import run_ranks
from torchrec_picasso.errors import PicassoError

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
