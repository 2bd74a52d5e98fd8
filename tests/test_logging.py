"""A user who turns logging on under ``torchrec_picasso`` reads what was decided."""

from __future__ import annotations

import logging

import pytest

from torchrec_picasso.schedule.schedule import Setting
from torchrec_picasso.train_pipeline.cuts import Cuts


def test_whole_batches_are_logged_with_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="torchrec_picasso")
    cuts = Cuts(None, None)
    cuts.begin(
        None,  # type: ignore[arg-type]  # nothing asks it
        "a BatchNorm1d compares samples",
        planned=None,
        num_samples=512,
        is_interleaved=True,
    )
    assert "batches are trained whole: a BatchNorm1d compares samples" in caplog.text
    assert cuts.choice.current == Setting(1, True)


def test_the_library_adds_no_handlers() -> None:
    assert not logging.getLogger("torchrec_picasso").handlers
