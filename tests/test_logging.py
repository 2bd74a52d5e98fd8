"""A user who turns logging on under ``torchrec_picasso`` reads what was decided."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch

from torchrec_picasso.schedule.schedule import Setting
from torchrec_picasso.train_pipeline.cuts import Cuts


def test_whole_batches_are_logged_with_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="torchrec_picasso")
    cuts = Cuts(None, None, torch.device("cpu"))
    taken = SimpleNamespace(
        why_whole_batches=lambda: "a BatchNorm1d compares samples",
        planned_micro_batches=None,
        look=SimpleNamespace(num_samples=512),
        interleaved={"tables": None},
    )
    cuts.begin(SimpleNamespace(taken=taken))  # type: ignore[arg-type]  # nothing else is asked
    assert "batches are trained whole: a BatchNorm1d compares samples" in caplog.text
    assert cuts.current == Setting(1, True)


def test_the_library_adds_no_handlers() -> None:
    assert not logging.getLogger("torchrec_picasso").handlers
