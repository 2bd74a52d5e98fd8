"""A run that is watched and drawn: curves and a picture, and not one bit of another training."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.app.runs.test_tensorboard_reports import FLOAT32, curves_in
from tests.app.runs.tiny import tiny_run
from torchrec_picasso.app.config import CheckpointConfig, PipelineConfig, TrainConfig, WatchConfig
from torchrec_picasso.app.launch.run_ranks import run_ranks
from torchrec_picasso.app.runs.profiling import ProfileRequest, StepProfiler, check_profile
from torchrec_picasso.app.runs.train import train_on_rank
from torchrec_picasso.errors import ConfigError, PicassoError
from torchrec_picasso.refresh.policy import Refresh

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
    "samples_per_s",
    "exposed_share",
    "sent_bytes",
    "coverage",
    "peak_bytes",
    "rows_moved",
    "busiest_home",
}
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
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("runs")
    return folder, run_ranks(_runs, 2, str(folder), timeout_s=200)[0]


def test_watching_and_drawing_change_no_bit(runs: tuple[Path, dict[str, Any]]) -> None:
    folder, found = runs
    assert found["watched"]["losses"] == found["plain"]["losses"]
    assert found["watched"]["auc"] == found["plain"]["auc"]
    assert found["resumed"]["first_step"] == STEPS
    names = sorted(path.name for path in (folder / "kept").iterdir())
    assert names == [f"step_{step:08d}" for step in (12, 16, 24)]  # none where a profile ended


def test_curves_are_of_the_whole_training(runs: tuple[Path, dict[str, Any]]) -> None:
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
    for (_, of_both), (_, of_one) in zip(
        curves["train/samples_per_s"], curves["pipeline/samples_per_s"]
    ):
        assert 0 < of_both < 2 * of_one * (1 + FLOAT32)  # the clock runs between steps, too


def test_stock_pipelines_have_the_curves_of_the_run(runs: tuple[Path, dict[str, Any]]) -> None:
    folder, found = runs
    curves = curves_in(folder / "stock")
    assert curves.keys() == OF_RUN
    assert [loss for _, loss in curves["train/loss"]] == pytest.approx(
        found["stock"]["losses"], rel=FLOAT32
    )


def test_pictures_are_of_the_steps_that_are_told(runs: tuple[Path, dict[str, Any]]) -> None:
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
def test_what_cannot_be_drawn_is_refused(
    changed: dict[str, Any], num_steps: int, words: str
) -> None:
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
