"""How long a step of the trial lasts: with what ranks wait for between steps."""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torchrec_picasso.schedule.schedule import NUM_BATCHES, Setting
from torchrec_picasso.train_pipeline.cuts import Cuts

SETTINGS = [Setting(1, lookahead=True)] * NUM_BATCHES


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> tuple[Cuts, list[Any]]:
    """Cuts whose clock counts its stamps, and the spans that they record."""
    cuts, spans, ticks = Cuts(None, None, torch.device("cpu")), [], count()
    cuts._begun = SimpleNamespace(taken=SimpleNamespace(pg=None))  # type: ignore[assignment]
    cuts._clock = SimpleNamespace(stamp=lambda: next(ticks))  # type: ignore[assignment]
    monkeypatch.setattr(cuts._choice, "note_step", lambda _, span, *__: spans.append(span))
    return cuts, spans


def test_a_step_lasts_from_the_end_of_the_step_before(timed: tuple[Cuts, list[Any]]) -> None:
    cuts, spans = timed
    for _ in range(3):
        cuts.start_step()
        cuts.end_step(SETTINGS)
    assert spans == [(0, 1), (1, 3), (3, 5)]  # stamps 2 and 4 are starts


def test_evaluation_between_steps_does_not_count(timed: tuple[Cuts, list[Any]]) -> None:
    cuts, spans = timed
    cuts.start_step()
    cuts.end_step(SETTINGS)
    cuts.train_whole_next()
    cuts.start_step()
    cuts.end_step(SETTINGS)
    assert spans == [(0, 1), (2, 3)]
