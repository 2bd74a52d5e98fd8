"""A run that is watched and drawn: curves and a picture, and not one bit of another training.

Curves are read back: they are what the reports say, by steps of the whole training.
"""

import contextlib
import dataclasses
import io
import re
import sys
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.app.runs.tiny import tiny_run
from tests.sharding.jobs import PLAIN, Job, build
from tests.train_pipeline.runs import batches_of, pipeline_of
from torchrec_picasso import ConfigError, PicassoError, Refresh, TensorBoardReports
from torchrec_picasso.app.config import CheckpointConfig, PipelineConfig, TrainConfig, WatchConfig
from torchrec_picasso.app.launch.run_ranks import run_ranks
from torchrec_picasso.app.runs.profiling import ProfileRequest, StepProfiler, check_profile
from torchrec_picasso.app.runs.train import train_on_rank
from torchrec_picasso.rows.refresher import Refreshed
from torchrec_picasso.train_pipeline.step_report import StepReport, StepReports

STEPS = 12
RESUMED_STEPS = 24
CONFIG = tiny_run(
    steps=STEPS,
    pipeline=PipelineConfig(
        num_micro_batches=2,
        lookahead=True,
        refresh=Refresh(every_steps=2, half_life_steps=2, deviations=0.0),
    ),
)
OF_PIPELINE = {
    *("samples_per_s", "exposed_share", "sent_bytes", "coverage", "peak_bytes"),
    *("rows_moved", "busiest_home"),
}
Runs, Trained = tuple[Path, dict[str, Any]], tuple[Path, list[StepReport]]
OF_RUN = {"train/loss", "train/samples_per_s", "heldout/auc"}


def _watched(folder: Path, **changed: Any) -> TrainConfig:
    watch = WatchConfig(tensorboard=str(folder))
    return dataclasses.replace(CONFIG, watch=watch, **changed)


def _runs(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    path, said = Path(folder), io.StringIO()
    kept = CheckpointConfig(folder=str(path / "kept"), every_steps=8, async_save=True)

    def train(config: TrainConfig, resume: bool = False, profile: Any = None) -> dict[str, Any]:
        with contextlib.redirect_stdout(said):
            return train_on_rank(rank, world_size, config, resume, None, profile)

    first = ProfileRequest(1, str(path / "made" / "first.svg"))
    later = ProfileRequest(3, str(path / "later.png"))
    automatic = dataclasses.replace(CONFIG, pipeline=PipelineConfig(refresh=None))
    stock = PipelineConfig(kind="sparse_dist")
    return {
        "plain": train(CONFIG),
        "watched": train(_watched(path / "watched", checkpoint=kept), profile=first),
        "resumed": train(
            _watched(path / "watched", checkpoint=kept, steps=RESUMED_STEPS), True, later
        ),
        "unsettled": train(automatic, profile=ProfileRequest(2, str(path / "last.svg"))),
        "stock": train(_watched(path / "stock", pipeline=stock)),
        "said": said.getvalue(),
    }


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("runs")
    return folder, run_ranks(_runs, 2, str(folder), timeout_s=200)[0]


def test_watching_and_drawing_change_no_bit(runs: Runs) -> None:
    folder, found = runs
    assert found["watched"]["losses"] == found["plain"]["losses"]
    assert found["watched"]["auc"] == found["plain"]["auc"]
    assert found["resumed"]["first_step"] == STEPS
    names = sorted(path.name for path in (folder / "kept").iterdir())
    assert names == [f"step_{step:08d}" for step in (12, 16, 24)]  # none where a profile ended


def test_curves_are_of_the_whole_training(runs: Runs) -> None:
    folder, found = runs
    curves = curves_in(folder / "watched")
    assert curves.keys() == OF_RUN | {f"pipeline/{name}" for name in OF_PIPELINE}
    losses = found["watched"]["losses"] + found["resumed"]["losses"]
    steps = list(range(1, RESUMED_STEPS + 1))
    for name in ("train/loss", "train/samples_per_s", "pipeline/samples_per_s"):
        assert [step for step, _ in curves[name]] == steps
    assert [loss for _, loss in curves["train/loss"]] == pytest.approx(losses, rel=FLOAT32)
    aucs = [(STEPS, found["watched"]["auc"]), (RESUMED_STEPS, found["resumed"]["auc"])]
    assert curves["heldout/auc"] == [(step, pytest.approx(auc, rel=FLOAT32)) for step, auc in aucs]
    for (_, both), (_, single) in zip(
        curves["train/samples_per_s"], curves["pipeline/samples_per_s"]
    ):
        assert 0 < both < 2 * single * (1 + FLOAT32)  # the clock runs between steps, too


def test_stock_pipelines_have_the_curves_of_the_run(runs: Runs) -> None:
    folder, found = runs
    curves = curves_in(folder / "stock")
    assert curves.keys() == OF_RUN
    assert [loss for _, loss in curves["train/loss"]] == pytest.approx(
        found["stock"]["losses"], rel=FLOAT32
    )


def test_pictures_are_of_the_steps_that_are_told(runs: Runs) -> None:
    folder, found = runs
    # two steps with the setting found, one not drawn; a resumed run counts on, up to a checkpoint
    # and from the one after; a run that ends unsettled has its last steps drawn, but two
    for steps, name in (
        ("5 to 5", "made/first.svg"),
        ("19 to 21", "later.png"),
        ("9 to 10", "last.svg"),
    ):
        assert f"steps {steps}: timeline in {folder / name}" in found["said"]
    assert len((folder / "last.svg").read_text()) > 10_000
    drawn = (folder / "made" / "first.svg").read_text()
    assert [step for step in range(12) if f"<!--  step {step} -->" in drawn] == [5]
    assert (folder / "later.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("changed", "num_steps", "words"),
    [
        ({}, 0, "expected at least 1 step, got 0"),
        ({}, 9, "takes 13 steps in a row without a checkpoint, and this run has 12"),
        ({"checkpoint": CheckpointConfig(folder="c", every_steps=5)}, 2, "this run has 5;"),
        ({"pipeline": PipelineConfig(kind="sparse_dist")}, 2, "kind is sparse_dist; set it"),
    ],
)
def test_what_none_can_draw_is_refused(changed: dict[str, Any], num_steps: int, words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        check_profile(dataclasses.replace(CONFIG, **changed), num_steps, None)


def test_too_little_is_left_to_draw() -> None:
    with pytest.raises(ConfigError, match=r"that takes 7 steps in a row .* this run has 4;"):
        StepProfiler(ProfileRequest(3, "a.svg"), CONFIG, STEPS - 4, None, lambda: None)  # type: ignore[arg-type]


def test_what_draws_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(PicassoError, match="needs the package matplotlib; pip install matplotlib"):
        check_profile(CONFIG, 2, None)


def test_a_picture_is_beside_the_checkpoints() -> None:
    kept = dataclasses.replace(CONFIG, checkpoint=CheckpointConfig(folder="a/b/"))
    assert check_profile(kept, 8, None) == ProfileRequest(8, "a/b.timeline.svg")
    assert check_profile(CONFIG, 8, None) == ProfileRequest(8, "timeline.svg")


JOB = Job(placement={"a": 20, "b": 4}, tables=PLAIN, batch_sizes=(6, 3), num_steps=8)
FIRST_STEP = 10
POINTS = range(FIRST_STEP + 1, FIRST_STEP + JOB.num_steps + 1)
LOOKS = Refresh(every_steps=3, half_life_steps=2, deviations=0.0, check_steps=None)
FLOAT32 = 1e-6
"""Relative; what TensorBoard keeps."""

Curve = list[tuple[int, float]]


def curves_in(folder: Path) -> dict[str, Curve]:
    events = EventAccumulator(str(folder)).Reload()
    return {
        name: [(one.step, one.value) for one in events.Scalars(name)]
        for name in events.Tags()["scalars"]
    }


def _train(rank: int, world_size: int, folder: str) -> list[StepReport]:
    model, reports = build(JOB, rank, world_size), StepReports()
    each = TensorBoardReports(Path(folder) / "each", first_step=FIRST_STEP)
    third = TensorBoardReports(Path(folder) / "third", first_step=FIRST_STEP, every_steps=3)
    pipeline = pipeline_of(
        model, num_micro_batches=2, refresh=LOOKS, on_step=[reports, each, third]
    )
    left = iter(batches_of(JOB, rank, range(JOB.num_steps)))
    for _ in range(JOB.num_steps):
        pipeline.progress(left)
    each.close()
    third.close()
    return reports.reports


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("curves")
    return folder, run_ranks(_train, 2, str(folder), timeout_s=100)[0]


def test_each_step_is_a_point(trained: Trained) -> None:
    folder, reports = trained
    assert len(list((folder / "each").iterdir())) == 1  # rank 0's alone
    curves = curves_in(folder / "each")
    assert [len(reports), reports[0].num_samples] == [JOB.num_steps, JOB.batch_size(0)]
    for name in ("samples_per_s", "exposed_share", "sent_bytes", "coverage", "peak_bytes"):
        steps, values = zip(*curves[f"pipeline/{name}"])
        assert list(steps) == list(POINTS)
        assert list(values) == pytest.approx([getattr(one, name) for one in reports], rel=FLOAT32)
    looks = [reports[2].refreshed, reports[5].refreshed]
    assert [step for step, _ in curves["pipeline/rows_moved"]] == [POINTS[2], POINTS[5]]
    moved = [value for _, value in curves["pipeline/rows_moved"]]
    assert moved == [look.num_moved for look in looks if look is not None]
    assert sum(moved) > 0
    loads = [value for _, value in curves["pipeline/busiest_home"]]
    uses = [look.home_uses_W for look in looks if look is not None]
    assert loads == pytest.approx([max(one) / fmean(one) for one in uses], rel=FLOAT32)


def test_a_point_may_be_of_several_steps(trained: Trained) -> None:
    folder, reports = trained
    curves = curves_in(folder / "third")
    windows = [reports[:2], reports[2:5], reports[5:8]]  # steps 11 to 12, to 15, to 18
    seconds = [sum(one.seconds for one in window) for window in windows]
    expected = {
        "samples_per_s": [JOB.batch_size(0) * len(w) / s for w, s in zip(windows, seconds)],
        "exposed_share": [sum(one.exposed_s for one in w) / s for w, s in zip(windows, seconds)],
        "sent_bytes": [fmean(one.sent_bytes for one in window) for window in windows],
    }
    for name, values in expected.items():
        points = curves[f"pipeline/{name}"]
        assert [step for step, _ in points] == [12, 15, 18]
        assert [value for _, value in points] == pytest.approx(values, rel=FLOAT32)
    assert [step for step, _ in curves["pipeline/rows_moved"]] == [15, 18]


def test_a_run_that_goes_on_replaces_what_it_trains_again(tmp_path: Path) -> None:
    look = Refreshed(
        step=1, num_hot=1, num_moved=1, moved_bytes=4, coverage=0.0, home_uses_W=(0, 0)
    )
    report = StepReport(
        step=0,
        seconds=2.0,
        num_samples=8,
        exposed_s=0.5,
        sent_bytes=1,
        received_bytes=1,
        served_rows=0,
        lookups_by_home=None,
        coverage=None,
        peak_bytes=1,
        refreshed=look,
    )
    for first_step, num_samples in ((0, 8), (2, 80)):
        reports = TensorBoardReports(tmp_path, first_step=first_step)
        for step in range(3):
            reports(replace(report, step=step, num_samples=num_samples))
        reports.close()
    curves = curves_in(tmp_path)
    assert curves["pipeline/samples_per_s"] == [(1, 4), (2, 4), (3, 40), (4, 40), (5, 40)]
    assert curves["pipeline/rows_moved"] == [(1, 1), (3, 1)]
    assert {"pipeline/coverage", "pipeline/busiest_home"}.isdisjoint(curves)  # there was none


def test_what_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="file: TensorBoard needs a folder, and this is a file"):
        TensorBoardReports(tmp_path / "file")
    with pytest.raises(ConfigError, match="at least 1, got 0 and 0"):
        TensorBoardReports(tmp_path, every_steps=0)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(PicassoError, match="is not installed; pip install tensorboard"):
        TensorBoardReports(tmp_path / "new")
    assert not (tmp_path / "new").exists()
