"""Checkpoints are whole or not taken; a resumed run continues with equal losses."""

import contextlib
import io
from pathlib import Path
from typing import Any

import pytest

from benchmarks.reliability.broken_writes import broken_writes, disk_is_full
from tests.app.runs.tiny import checkpoints, tiny_run
from torchrec_picasso.app.checkpoints import write
from torchrec_picasso.app.checkpoints.folder import check_run_folder, newest_checkpoint
from torchrec_picasso.app.config import OptimizerConfig, PipelineConfig, ShardingConfig, TrainConfig
from torchrec_picasso.app.launch.run_ranks import RankError, run_ranks
from torchrec_picasso.app.runs.train import train_on_rank
from torchrec_picasso.errors import ConfigError, PicassoError

TIMEOUT_S = 120


PIPELINES = {
    "sparse_dist": PipelineConfig(kind="sparse_dist"),
    "automatic": PipelineConfig(),
    "4 micro-batches": PipelineConfig(num_micro_batches=4, lookahead=True),
}


def config(
    folder: Path | None, steps: int, placement: str, dim: int = 8, pipeline: str = "automatic"
) -> TrainConfig:
    return tiny_run(
        dim=dim,
        steps=steps,
        sharding=ShardingConfig(placement=placement, hot_rows=20),
        optimizer=OptimizerConfig(dense_optimizer="adagrad"),  # state that must be restored too
        pipeline=PIPELINES[pipeline],
        checkpoint=checkpoints(folder, 4),
    )


def train_and_break(rank: int, world_size: int, folder: str, placement: str, pipeline: str) -> Any:
    """Trains 8 steps whole, then 4 and 4 more, then is interrupted while it writes step 12."""
    path = Path(folder)

    def run(folder: Path | None, steps: int, resume: bool) -> dict[str, Any]:
        asked = config(folder, steps, placement, pipeline=pipeline)
        return train_on_rank(rank, world_size, asked, resume)

    whole = run(None, 8, False)
    first = run(path, 4, False)
    second = run(path, 8, True)

    full = broken_writes(".distcp", 100, disk_is_full) if rank == 1 else contextlib.nullcontext()
    with full, pytest.raises(PicassoError, match="No space left on device"):
        run(path, 12, True)
    with contextlib.redirect_stdout(io.StringIO()) as said:
        third = run(path, 9, True)
    return whole, first, second, third, said.getvalue()


@pytest.mark.parametrize(
    ("placement", "pipeline"),
    [("table_wise", "automatic"), ("hot_cold", "sparse_dist"), ("hot_cold", "4 micro-batches")],
)
def test_resumed_training_has_equal_losses(tmp_path: Path, placement: str, pipeline: str) -> None:
    folder = tmp_path / "run"
    job = (train_and_break, 2, str(folder), placement, pipeline)
    ranks = run_ranks(*job, timeout_s=TIMEOUT_S)
    whole, first, second, third, said = ranks[0]
    assert (second["first_step"], third["first_step"]) == (4, 8)
    # Equal weights, state and batches give equal sums: nothing is rounded on the way. But a run
    # that cuts batches begins with a whole one, whose sums are in another order.
    rel = 1e-6 if pipeline == "4 micro-batches" else 0.0
    assert first["losses"] + second["losses"] == pytest.approx(whole["losses"], rel=rel, abs=0.0)
    assert second["auc"] == pytest.approx(whole["auc"], rel=rel, abs=0.0)
    assert 0 <= whole["auc"] <= 1
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["step_00000004", "step_00000008", "step_00000009", "step_00000012.tmp"]
    assert f"passed over {folder / 'step_00000012.tmp'}" in said


def run_again(
    rank: int, world_size: int, folder: str, steps: int, dim: int = 8, resume: bool = True
) -> None:
    train_on_rank(rank, world_size, config(Path(folder), steps, "table_wise", dim=dim), resume)


def save_same_step_again(rank: int, world_size: int, folder: str) -> None:
    write.save_checkpoint(folder, 4, {})


def test_checkpoints_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    run_ranks(run_again, 1, folder, 4, 8, False, timeout_s=TIMEOUT_S)
    for (job, *args), message in (
        ((run_again, 8, 16), r"step_00000004: cannot be loaded into this model"),
        ((run_again, 3), r"steps: 3, but .*step_00000004 has trained 4 already; raise"),
        ((save_same_step_again,), r"step_00000004: a checkpoint of step 4 exists already"),
    ):
        with pytest.raises(RankError) as caught:
            run_ranks(job, 1, folder, *args, timeout_s=TIMEOUT_S)
        assert isinstance(caught.value.__cause__, PicassoError)
        assert caught.match(message)


def test_the_newest_complete_checkpoint_is_found(tmp_path: Path) -> None:
    with pytest.raises(PicassoError, match=r"no checkpoint in it; expected folders named"):
        newest_checkpoint(tmp_path / "none")
    (tmp_path / "step_00000003.tmp").mkdir()
    with pytest.raises(PicassoError, match=r"found only step_00000003\.tmp"):
        newest_checkpoint(tmp_path)
    (tmp_path / "step_00000003").mkdir()
    with pytest.raises(PicassoError, match=r"step_00000003: not a checkpoint \(no \.metadata file"):
        newest_checkpoint(tmp_path)
    for name in ("step_00000020", "step_00000100", "step_00000200.tmp", "notes"):
        (tmp_path / name).mkdir()
        (tmp_path / name / ".metadata").touch()
    newest, unfinished = newest_checkpoint(tmp_path)
    assert newest.name == "step_00000100"
    assert [path.name for path in unfinished] == ["step_00000003.tmp", "step_00000200.tmp"]


def test_new_run_does_not_mix_with_an_old_one(tmp_path: Path) -> None:
    check_run_folder(tmp_path, resume=False)
    (tmp_path / "step_00000020").mkdir()
    with pytest.raises(PicassoError, match=r"holds checkpoints already \(newest step_00000020\)"):
        check_run_folder(tmp_path, resume=False)
    (tmp_path / "file").touch()
    with pytest.raises(PicassoError, match="is a file; expected a folder for the checkpoints"):
        check_run_folder(tmp_path / "file", resume=False)


def test_resume_needs_a_folder() -> None:
    with pytest.raises(ConfigError, match=r"--resume: the configuration names no checkpoint\.fold"):
        check_run_folder(None, resume=True)
