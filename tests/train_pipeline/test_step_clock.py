"""How long a step of the trial lasts: with what ranks wait for between steps."""

from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torchrec_picasso.schedule.schedule import NUM_BATCHES, Setting
from torchrec_picasso.train_pipeline.micro_batch_policy import MicroBatchPolicy

SETTINGS = [Setting(1, lookahead=True)] * NUM_BATCHES


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> tuple[MicroBatchPolicy, list[Any]]:
    """A policy whose clock counts its stamps, and the spans that they record."""
    policy, spans, ticks = MicroBatchPolicy(None, None, torch.device("cpu")), [], count()
    policy._evidence = SimpleNamespace(pipelined=SimpleNamespace(pg=None))  # type: ignore[assignment]
    monkeypatch.setattr(policy._clock, "stamp", lambda: next(ticks))
    monkeypatch.setattr(policy._choice, "note_step", lambda _, span, *__: spans.append(span))
    return policy, spans


def test_a_step_lasts_from_the_end_of_the_step_before_unless_that_evaluated(
    timed: tuple[MicroBatchPolicy, list[Any]],
) -> None:
    policy, spans = timed
    for is_evaluated in (False, False, True, False):
        if is_evaluated:
            policy.train_whole_next()
        policy.start_step()
        policy.end_step(SETTINGS)
    assert spans == [(0, 1), (1, 3), (4, 5), (5, 7)]  # stamps 2, 4 and 6 are starts
