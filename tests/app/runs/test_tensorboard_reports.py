"""Curves in TensorBoard, read back: what the reports say, by steps of the whole training."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.sharding.jobs import PLAIN, Job, build
from tests.train_pipeline.runs import batches_of, pipeline_of
from torchrec_picasso import ConfigError, PicassoError, Refresh, TensorBoardReports
from torchrec_picasso.app.launch.run_ranks import run_ranks
from torchrec_picasso.refresh.refresher import Refreshed
from torchrec_picasso.train_pipeline.step_report import StepReport, StepReports

JOB = Job(placement={"a": 20, "b": 4}, tables=PLAIN, batch_sizes=(6, 3), num_steps=8)
FIRST_STEP = 10
STEPS = range(FIRST_STEP + 1, FIRST_STEP + JOB.num_steps + 1)
LOOKS = Refresh(every_steps=3, half_life_steps=2, deviations=0.0, check_steps=None)
FLOAT32 = 1e-6
"""Relative; what TensorBoard keeps."""

Curve = list[tuple[int, float]]


def curves_in(folder: Path) -> dict[str, Curve]:
    events = EventAccumulator(str(folder)).Reload()
    return {
        name: [(of.step, of.value) for of in events.Scalars(name)]
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
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[StepReport]]:
    folder = tmp_path_factory.mktemp("curves")
    return folder, run_ranks(_train, 2, str(folder), timeout_s=100)[0]


def test_each_step_is_a_point(trained: tuple[Path, list[StepReport]]) -> None:
    folder, reports = trained
    assert len(list((folder / "each").iterdir())) == 1  # rank 0's alone
    curves = curves_in(folder / "each")
    assert [len(reports), reports[0].num_samples] == [JOB.num_steps, JOB.batch_size(0)]
    for name in ("samples_per_s", "exposed_share", "sent_bytes", "coverage", "peak_bytes"):
        steps, values = zip(*curves[f"pipeline/{name}"])
        assert list(steps) == list(STEPS)
        assert list(values) == pytest.approx([getattr(of, name) for of in reports], rel=FLOAT32)
    looks = [reports[2].refreshed, reports[5].refreshed]
    assert [step for step, _ in curves["pipeline/rows_moved"]] == [STEPS[2], STEPS[5]]
    moved = [value for _, value in curves["pipeline/rows_moved"]]
    assert moved == [look.num_moved for look in looks if look is not None]
    assert sum(moved) > 0
    loads = [value for _, value in curves["pipeline/busiest_home"]]
    uses = [look.home_uses_W for look in looks if look is not None]
    assert loads == pytest.approx([max(of) / fmean(of) for of in uses], rel=FLOAT32)


def test_a_point_may_be_of_several_steps(trained: tuple[Path, list[StepReport]]) -> None:
    folder, reports = trained
    curves = curves_in(folder / "third")
    windows = [reports[:2], reports[2:5], reports[5:8]]  # steps 11 to 12, to 15, to 18
    seconds = [sum(of.seconds for of in window) for window in windows]
    expected = {
        "samples_per_s": [JOB.batch_size(0) * len(w) / s for w, s in zip(windows, seconds)],
        "exposed_share": [sum(of.exposed_s for of in w) / s for w, s in zip(windows, seconds)],
        "sent_bytes": [fmean(of.sent_bytes for of in window) for window in windows],
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
