"""The steps of the trial that count, and their length: with what ranks wait for between them."""

from itertools import count
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from torchrec_picasso.schedule.schedule import NUM_BATCHES, Setting
from torchrec_picasso.train_pipeline.batch_queue import BatchQueue
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


def _train(policy: MicroBatchPolicy, num_batches: int = NUM_BATCHES) -> None:
    """A step with so many batches in flight."""
    policy._counts = True
    policy.end_step(SETTINGS[:num_batches], 8)


def test_a_step_lasts_from_the_end_of_the_step_before(
    timed: tuple[MicroBatchPolicy, list[Any]],
) -> None:
    policy, spans = timed
    for _ in range(3):
        _train(policy)
    assert spans == [None, (0, 1), (1, 2)]


def test_a_step_that_follows_no_training_step_does_not_count(
    timed: tuple[MicroBatchPolicy, list[Any]],
) -> None:
    policy, spans = timed
    _train(policy)
    policy.train_whole_next()  # an evaluation
    _train(policy)
    for num_batches in (2, 1):  # data ends
        _train(policy, num_batches)
    _train(policy)
    queue: Any = MagicMock(_policy=policy, _inflights=[])
    for forget in (BatchQueue.clear, BatchQueue.request_again):  # by reset(), by a refresh
        forget(queue)
        _train(policy)
    assert spans == [None] * 5
    _train(policy)
    assert spans[-1] == (6, 7)


def test_a_whole_step_does_not_count_for_micro_batches(
    timed: tuple[MicroBatchPolicy, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, spans = timed
    monkeypatch.setattr(policy, "_examine", lambda *_: False)
    policy._proof, policy._is_next_whole = object(), False  # type: ignore[assignment]
    for is_whole, number in ((False, 1), (False, 2), (True, 2), (True, 1)):
        batch: Any = SimpleNamespace(is_whole=is_whole, setting=Setting(number, lookahead=True))
        policy.decide_whether_whole(batch, has_changed=False)
        policy.end_step(SETTINGS, 8)
    assert [span is not None for span in spans] == [False, True, False, True]


def test_a_step_with_an_examination_does_not_count(
    timed: tuple[MicroBatchPolicy, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, spans = timed
    examines = iter([False, False, True, False])
    monkeypatch.setattr(policy, "_examine", lambda *_: next(examines))
    monkeypatch.setattr(policy, "_agree_on", lambda reason: reason)
    policy._proof = SimpleNamespace(equal_rows=())  # type: ignore[assignment]
    for _ in range(4):
        batch: Any = SimpleNamespace(is_whole=False, setting=Setting(2, lookahead=True))
        policy._is_next_whole = False
        policy.decide_whether_whole(batch, has_changed=False)
        policy.end_step(SETTINGS, 8)
    assert [span is not None for span in spans] == [False, True, False, True]


def test_all_ranks_train_a_batch_whole_whose_equal_rows_are_not_counted(
    timed: tuple[MicroBatchPolicy, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, _ = timed
    monkeypatch.setattr(policy, "_examine", lambda *_: True)
    for equal_rows, elsewhere, is_whole in (
        ((), None, False),
        ((["x", "samples"],), None, True),
        ((), "rows are not counted", True),  # this rank's batch had no samples
    ):
        policy._proof = SimpleNamespace(equal_rows=equal_rows)  # type: ignore[assignment]
        policy._is_next_whole = False
        monkeypatch.setattr(policy, "_agree_on", lambda own, other=elsewhere: own or other)
        batch: Any = SimpleNamespace(is_whole=False, setting=Setting(2, lookahead=True))
        policy.decide_whether_whole(batch, has_changed=True)
        assert batch.is_whole == is_whole
