"""The drift benchmark on ids that move on every hour."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.reliability.drift import Stream, measure, moved_shares, summary_of
from torchrec_picasso import Refresh

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
    of = summary_of(found, skipped_hours=1)
    assert of["frozen"] < 0.05
    assert of["refreshed"] > 0.6 * of["oracle"]
    assert of["oracle"] > 0.8
    assert found["loss_difference"] < 1e-6
    assert len(found["looks"]) == HOURS * STEPS_PER_HOUR // 2


def test_a_look_comes_early_where_coverage_falls() -> None:
    found = measure(
        _stream(50, Refresh(every_steps=40, half_life_steps=2, check_steps=3, deviations=1.0))
    )
    of = summary_of(found, skipped_hours=1)
    assert of["refreshed"] > 0.25 * of["oracle"]
    steps = [look["step"] for look in found["looks"]]
    assert steps
    assert all(step % 3 == 0 for step in steps)
    # the first comes soon after the first hour's end
    assert STEPS_PER_HOUR < steps[0] <= STEPS_PER_HOUR + 6


def test_without_drift_rows_stay() -> None:
    found = measure(_stream(0, Refresh(every_steps=12)))
    assert sum(moved_shares(found)) == 0
    assert summary_of(found)["refreshed"] == pytest.approx(summary_of(found)["frozen"])
