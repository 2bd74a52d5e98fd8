"""Rows are updated where a gradient came to, as a plain loop would; with stand-ins for modules."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from torchrec_picasso.batches.feed import Fetched
from torchrec_picasso.schedule.schedule import Op, Setting
from torchrec_picasso.train_pipeline.in_flight_batch import InFlightBatch
from torchrec_picasso.train_pipeline.losses import Losses
from torchrec_picasso.train_pipeline.operations import Operations, Program


class _Step:
    num_updates = 0

    def update(self, wave: int | None, untrained: set[int]) -> bool:
        self.num_updates += 0 not in untrained
        return True

    def release(self) -> None:
        self.is_released = True


class _Group:
    def __init__(self, name: str) -> None:
        self.modules = {name: None}


class _OneRank:
    def size(self) -> int:
        return 1


def _operations() -> Operations:
    pg: Any = _OneRank()
    groups: Any = [_Group("a"), _Group("b")]
    streams: Any = None
    program = Program(
        model=nn.Linear(1, 1),
        forward=lambda batch: (batch, batch),
        backward=lambda losses: None,
        step=lambda: None,
        zero_grad=lambda: None,
        losses=Losses("mean"),
    )
    taken: Any = SimpleNamespace(pg=pg, device=torch.device("cpu"), groups=groups, plain={})
    return Operations(program, taken, streams, lambda context: None)


def _updates(operations: Operations, trained: set[str], num_samples: int) -> dict[str, int]:
    context: Any = None
    inflight = InFlightBatch(Fetched(None, context), Setting(1, True), [num_samples], [None])
    steps: dict[str, Any] = {"a": _Step(), "b": _Step()}
    inflight.rows = inflight.gradients = list(steps.values())
    inflight.trained, inflight.losses_K = trained, {0: torch.zeros(())}
    for op in (Op("backward", index=0), Op("update")):
        operations.run(op, [inflight])
    return {name: step.num_updates for name, step in steps.items()}


@pytest.mark.parametrize("num_samples", [0, 3])
def test_a_module_that_no_gradient_comes_to_is_not_updated(num_samples: int) -> None:
    operations = _operations()
    assert _updates(operations, {"a"}, 3) == {"a": 1, "b": 0}
    # without samples nothing is known but what was so before
    assert _updates(operations, {"a"}, num_samples) == {"a": 1, "b": 0}
    assert _updates(operations, {"a", "b"}, num_samples) == {"a": 1, "b": 1}


def test_without_samples_from_the_start_others_are_believed_to_train() -> None:
    assert _updates(_operations(), set(), 0) == {"a": 1, "b": 1}
