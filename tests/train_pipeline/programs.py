"""Programs: a small model and what is done around it, trained by TorchRec's pipeline and by ours.

Tables are stock there and hot/cold here; weights and batches are equal, and large enough for
micro-batches to be tried by default. The programs of a module's ``PROGRAMS`` share one run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec import KeyedJaggedTensor
from torchrec.datasets.utils import Batch
from torchrec.distributed.model_parallel import DataParallelWrapper
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

from tests.sharding.jobs import Result, local_shards, whole
from tests.support.shared_run import run_once
from tests.train_pipeline.runs import ATOL, RTOL
from tests.train_pipeline.stock_models import (
    CPU,
    DIM,
    FEATURES,
    batch_of,
    build,
    dense_optimizer,
    ebc,
)
from torchrec_picasso import InterleavedTrainPipeline
from torchrec_picasso.errors import CompatError

SAMPLES, STEPS, WIDTH = 256, 5, 8
EXACT = {"rtol": RTOL, "atol": ATOL}
BFLOAT16 = {"rtol": 2.0**-6, "atol": 2.0**-6}
"""Its rounding in a few layers."""


class Model(nn.Module):
    """Tables, and a dense part that TorchRec's tracer does not enter."""

    def __init__(self, head: type[Head]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.make()
        self.head = head()

    def make(self) -> None:
        self.ebc = ebc(*FEATURES)

    def look_up(self, features: KeyedJaggedTensor) -> Any:
        return self.ebc(features)

    def forward(self, batch: Batch) -> tuple[Any, Any]:
        return self.head(self.look_up(batch.sparse_features), batch)


class Head(nn.Module):
    """A mean over samples, of a tower that subclasses change."""

    is_ours = True

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(DIM * (1 + len(FEATURES)), WIDTH)
        self.over = nn.Linear(WIDTH, 1)

    def forward(self, pooled: Any, batch: Batch) -> tuple[Any, Any]:
        values = [batch.dense_features, *(pooled[name] for name in FEATURES)]
        out = self.logits(torch.cat(values, dim=1))
        return self.loss(out, batch), self.output(out, batch)

    def logits(self, x: Tensor) -> Tensor:
        return self.tower(x).squeeze(1)

    def tower(self, x: Tensor) -> Tensor:
        return self.over(torch.tanh(self.hidden(x)))

    def loss(self, out: Tensor, batch: Batch) -> Any:
        return ((out - batch.labels) ** 2).mean()

    def output(self, out: Tensor, batch: Batch) -> Any:
        return out.detach()


@dataclass(frozen=True, kw_only=True)
class Program:
    """A model and what a program does around it."""

    head: type[Head] = Head
    model: Callable[[type[Head]], nn.Module] = Model
    told: Sequence[str] = ()
    """Parts of the pipeline's summary."""
    wrapper: Callable[[], DataParallelWrapper | None] = lambda: None
    prepare: Callable[[Any], Any] = lambda model: None
    pipeline: Callable[[type], type] = lambda base: base
    before_step: Callable[[Any, int], None] = lambda model, step: None
    batch: Callable[[int, int], Batch] = lambda rank, step: batch_of(rank, step, SAMPLES)
    stock: Sequence[str] = ()
    """Tables that are not hot/cold."""
    is_wrapped: bool = True
    is_inside: bool = False
    """Whether the pipeline gets the model without its wrapper."""
    within: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Around each step."""
    tolerance: Mapping[str, float] = field(default_factory=lambda: EXACT)
    refusal: str = ""
    """Of an error; none = it trains in any number of micro-batches."""
    refused: Sequence[int | None] = (4,)
    """Numbers of micro-batches that are refused so."""
    numbers: Sequence[int | None] = (None, 4)
    """Of micro-batches, to train in; by default the first steps are in one."""
    fails: bool = False
    """Whether stock raises; then ours raises the same."""
    planned: int | None = None
    """Micro-batches that the plan was priced for."""
    optimizer: Callable[[Any], torch.optim.Optimizer] = dense_optimizer
    options: dict[str, Any] = field(default_factory=dict)


def cases_of(programs: Mapping[str, Program]) -> Any:
    """Parametrizes a test with every program and its numbers of micro-batches."""
    cases = [(name, number) for name, program in programs.items() for number in program.numbers]
    return pytest.mark.parametrize(("name", "num_micro_batches"), cases)


def assert_as_stock(module: str, name: str, num_micro_batches: int | None) -> None:
    """A program of a module trains as under TorchRec, or is refused as it says, on all ranks."""
    by_rank, program = run_once(_train_all, 2, module), import_module(module).PROGRAMS[name]
    for results in by_rank:
        found, expected = results[name, num_micro_batches], results[name, "stock"]
        assert isinstance(expected, str) == program.fails
        if program.refusal and num_micro_batches in program.refused:
            assert program.refusal in found
            assert found == by_rank[0][name, num_micro_batches]
        elif program.fails or isinstance(found, str):
            assert found == expected
        else:
            torch.testing.assert_close(found, expected, **program.tolerance)


def _train_all(rank: int, world_size: int, module: str) -> dict[Any, Any]:
    results: dict[Any, Any] = {}
    for name, program in import_module(module).PROGRAMS.items():
        for number in ("stock", *program.numbers):
            try:
                results[name, number] = _train(program, rank, number)
            except CompatError as error:
                results[name, number] = str(error)
            except Exception as error:
                if not program.fails:
                    error.add_note(f"{name}, {number} micro-batches")
                    raise
                results[name, number] = str(error)
    return results


def _train(program: Program, rank: int, number: Any) -> Any:
    """Outputs of all steps, and what is left behind."""
    is_ours = number != "stock"
    model: Any = program.model(program.head)
    model.head.is_ours = is_ours
    sharded = build(
        model,
        program.stock if is_ours else None,
        is_wrapped=program.is_wrapped,
        wrapper=program.wrapper(),
        stock_is_row_wise=False,
        planned=program.planned,
    )
    program.prepare(sharded)
    kind = program.pipeline(InterleavedTrainPipeline if is_ours else TrainPipelineSparseDist)
    options = {"num_micro_batches": number, **program.options} if is_ours else {}
    trained = sharded.module if program.is_inside else sharded
    pipeline = kind(trained, program.optimizer(sharded), CPU, **options)
    batches = iter([program.batch(rank, step) for step in range(STEPS)])
    outputs = []
    with suppress(StopIteration):
        for step in range(STEPS):
            program.before_step(sharded, step)
            with program.within():
                outputs.append(pipeline.progress(batches))
    if is_ours:
        assert all(part in pipeline.summary() for part in program.told), pipeline.summary()
    return outputs, _gathered(sharded)


def _gathered(model: Any) -> dict[str, Tensor]:
    """Tables and their optimizer state of all ranks, whatever the placement; the rest of each."""
    values = dict(model.state_dict())
    for name, states in model.fused_optimizer.state_dict()["state"].items():
        values |= {f"{name}/{key}": value for key, value in states.items()}
    mine = {
        name if isinstance(value, ShardedTensor) else f"{name} of {dist.get_rank()}": value
        for name, value in values.items()
    }
    shards = {name: local_shards(value) for name, value in mine.items()}
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, Result([], {}, shards, {}, []))
    return whole(every, "states")
