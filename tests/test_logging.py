"""A user who turns logging on under ``torchrec_picasso`` reads what was decided."""

import logging
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch

from torchrec_picasso.batches.feed import Fetched, IdStream
from torchrec_picasso.schedule.schedule import Setting
from torchrec_picasso.train_pipeline.batch_queue import BatchQueue
from torchrec_picasso.train_pipeline.lifecycle import Lifecycle
from torchrec_picasso.train_pipeline.micro_batch_policy import MicroBatchPolicy
from torchrec_picasso.train_pipeline.options import PipelineOptions


def test_whole_batches_are_logged_with_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="torchrec_picasso")
    policy = MicroBatchPolicy(None, None, torch.device("cpu"))
    pipelined = SimpleNamespace(
        why_whole_batches=lambda: "a BatchNorm1d compares samples",
        planned_micro_batches=None,
        first_batch=SimpleNamespace(num_samples=512),
        interleaved={"tables": None},
    )
    policy.begin(SimpleNamespace(pipelined=pipelined))  # type: ignore[arg-type]  # nothing else is asked
    assert "batches are trained whole: a BatchNorm1d compares samples" in caplog.text
    assert policy.current == Setting(1, True)
    assert str(policy).endswith("batches are whole: a BatchNorm1d compares samples")
    # attached again without it
    pipelined.why_whole_batches = lambda: None
    policy.begin(SimpleNamespace(pipelined=pipelined))  # type: ignore[arg-type]
    assert "whole" not in str(policy)
    batch: Any = SimpleNamespace(is_whole=False, setting=policy.current)
    with mock.patch.object(policy, "_prove") as prove:
        policy.decide_whether_whole(batch, has_changed=False)
    prove.assert_called_once()


def test_the_library_adds_no_handlers() -> None:
    assert not logging.getLogger("torchrec_picasso").handlers


def test_a_batch_that_cannot_be_split_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="torchrec_picasso")
    pipelined: Any = SimpleNamespace(
        read=lambda batch, context: ({}, 8),
        plain={},
        shares_rows=True,
        num_waves=1,
        groups=(),
    )
    policy: Any = SimpleNamespace(current=Setting(2, True))
    nothing: Any = None
    queue = BatchQueue(
        torch.nn.Linear(1, 1),
        cast(Any, SimpleNamespace()),
        PipelineOptions(),
        policy,
        Lifecycle(),
        IdStream(None, None),
    )
    queue.work_with(cast(Any, SimpleNamespace(pipelined=pipelined)))
    for _ in range(2):
        inflight = queue._new_inflight(Fetched({"ids": object()}, nothing))
        assert inflight.sizes_K == [8, 0]
    (record,) = caplog.records
    assert "do not know how to cut object by samples" in record.getMessage()
