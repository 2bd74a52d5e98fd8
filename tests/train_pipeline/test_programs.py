"""What a program does around its model happens as under TorchRec's pipeline, or is refused by name.

Each program trains stock tables under ``TrainPipelineSparseDist`` and hot/cold tables under ours,
from equal weights on equal batches, large enough for micro-batches to be tried by default.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torchrec import KeyedTensor
from torchrec.datasets.utils import Batch
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.model_parallel import DataParallelWrapper, DefaultDataParallelWrapper
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

from tests.sharding.jobs import Result, local_shards, whole
from tests.train_pipeline.runs import ATOL, RTOL
from tests.train_pipeline.stock_models import (
    CPU,
    DIM,
    FEATURES,
    Stock,
    batch_of,
    build,
    dense_optimizer,
    ebc,
)
from torchrec_picasso import InterleavedTrainPipeline
from torchrec_picasso.app.launch.run_ranks import RankError, run_ranks
from torchrec_picasso.batches.split import split_batch
from torchrec_picasso.errors import CompatError

SAMPLES, STEPS, WIDTH = 256, 5, 8


class Model(nn.Module):
    """Tables, and a dense part that TorchRec's tracer does not enter."""

    def __init__(self, head: type[Head]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.ebc = ebc(*FEATURES)
        self.head = head()

    def forward(self, batch: Batch) -> tuple[Any, Any]:
        return self.head(self.ebc(batch.sparse_features), batch)


class Head(nn.Module):
    """A mean over samples, of a tower that subclasses change."""

    is_ours = True

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(DIM * (1 + len(FEATURES)), WIDTH)
        self.over = nn.Linear(WIDTH, 1)

    def forward(self, pooled: KeyedTensor, batch: Batch) -> tuple[Any, Any]:
        values = [batch.dense_features, *(pooled[name] for name in FEATURES)]
        out = self.tower(torch.cat(values, dim=1)).squeeze(1)
        return self.loss(out, batch), self.output(out, batch)

    def tower(self, x: Tensor) -> Tensor:
        return self.over(torch.tanh(self.hidden(x)))

    def loss(self, out: Tensor, batch: Batch) -> Any:
        return ((out - batch.labels) ** 2).mean()

    def output(self, out: Tensor, batch: Batch) -> Any:
        return out.detach()


class Siamese(Head):
    """A layer used twice behind reentrant checkpoints: each weight gets two gradients."""

    def tower(self, x: Tensor) -> Tensor:
        both = [checkpoint(self._hidden, part, use_reentrant=True) for part in (x, x.flip(1))]
        return self.over(both[0] - both[1])

    def _hidden(self, x: Tensor) -> Tensor:
        return torch.tanh(self.hidden(x))


class Normed(Head):
    """Statistics of batches, in buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def tower(self, x: Tensor) -> Tensor:
        return self.over(self.norm(self.hidden(x)))


class SparseGradients(Head):
    """A table of the dense part whose gradients are sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Embedding(10, WIDTH, sparse=True)

    def tower(self, x: Tensor) -> Tensor:
        place = (x[:, 0] * 10).long().clamp(0, 9)
        return self.over(torch.tanh(self.hidden(x)) + self.places(place))


class Regular(Head):
    """A term of the weights, which counts whatever the samples."""

    def loss(self, out: Tensor, batch: Batch) -> Tensor:
        total = super().loss(out, batch) if len(out) else out.sum()
        return total + 0.1 * sum(p.square().sum() for p in self.hidden.parameters())


class Metric(Head):
    """A number about the whole batch that it gives in evaluation only."""

    def output(self, out: Tensor, batch: Batch) -> Any:
        return out.detach() if self.training else out.detach().median()


class Squeezed(Head):
    """A squeeze that takes the dim of a single sample away."""

    def forward(self, pooled: KeyedTensor, batch: Batch) -> tuple[Any, Any]:
        values = [batch.dense_features, *(pooled[name] for name in FEATURES)]
        out = self.tower(torch.cat(values, dim=1)).squeeze()
        return nn.functional.binary_cross_entropy_with_logits(out, batch.labels), out.detach()


class Ratio(Head):
    """Weighted losses over weights, two of them."""

    def loss(self, out: Tensor, batch: Batch) -> Any:
        errors, weights = (out - batch.labels) ** 2, batch.dense_features[:, 0]
        sums = torch.stack([(errors * weights).sum(), errors.abs().sum()])
        totals = torch.stack([weights.sum(), batch.labels.sum()])
        return (sums, totals) if self.is_ours else sums / totals


class Broadcasting(DataParallelWrapper):
    """As torch wraps by default: with buffers of rank 0 for all."""

    def wrap(self, dmp: Any, env: Any, device: torch.device) -> None:
        ignored = set(DistributedModelParallel._sharded_parameter_names(dmp._dmp_wrapped_module))
        inner = dmp._dmp_wrapped_module
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(inner, ignored)
        dmp._dmp_wrapped_module = DistributedDataParallel(inner, process_group=env.process_group)


def _clip(state, bucket):  # type: ignore[no-untyped-def]  # DDP reads annotations
    bucket.buffer().clamp_(-1e-3, 1e-3)
    return allreduce_hook(None, bucket)


def _with_comm_hook(model: Any) -> None:
    model._dmp_wrapped_module.register_comm_hook(None, _clip)


def _with_model_hook(model: Any) -> None:
    model.register_forward_hook(lambda module, args, output: (2 * output[0], output[1]))


def _with_gradient_hook(model: Any) -> None:
    model.module.head.over.weight.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))


def _with_accumulation_hook(model: Any) -> None:
    weight = model.module.head.over.weight
    node = torch.autograd.graph.get_gradient_edge(weight).node
    node.register_prehook(lambda grads: tuple(grad.clamp(-1e-3, 1e-3) for grad in grads))


def _replicated(model: Any) -> None:
    replicate(model.module.head.hidden)
    replicate(model.module.head.over)


def _scaled(base: type) -> type:
    class Scaled(base):  # type: ignore[misc]
        """As a loss scaler does it."""

        def _backward(self, losses: Tensor) -> None:
            super()._backward(8 * losses)

        def _optimizer_step(self) -> None:
            for group in self._optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad /= 8
            super()._optimizer_step()

    return Scaled


def _empty_on_one(rank: int, step: int) -> Batch:
    batch = batch_of(rank, step, SAMPLES)
    return split_batch(batch, [0, SAMPLES])[0] if rank and step % 2 else batch


def _small_last(rank: int, step: int) -> Batch:
    return batch_of(rank, step, 7 if step == STEPS - 1 else SAMPLES)


@dataclass(frozen=True, kw_only=True)
class Program:
    """A model and what a program does around it."""

    head: type[Head] = Head
    wrapper: Callable[[], DataParallelWrapper | None] = lambda: None
    prepare: Callable[[Any], None] = lambda model: None
    pipeline: Callable[[type], type] = lambda base: base
    before_step: Callable[[Any, int], None] = lambda model, step: None
    batch: Callable[[int, int], Batch] = lambda rank, step: batch_of(rank, step, SAMPLES)
    stock: Sequence[Stock] = ()
    is_wrapped: bool = True
    within: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Around each step."""
    atol: float = ATOL
    cut: bool = True
    """Whether four micro-batches train it; else they are refused with ``refusal``."""
    refusal: str = ""
    options: dict[str, Any] = field(default_factory=dict)


def _warm_up(model: Any, step: int) -> None:
    for group in model.fused_optimizer.param_groups:
        group["lr"] = 0.02 * (step + 1)


def _evaluated(model: Any, step: int) -> None:
    model.train(step not in (2, 3))


PROGRAMS = {
    "as it is": Program(),
    "communication hook": Program(prepare=_with_comm_hook),
    "half precision sums": Program(
        wrapper=lambda: DefaultDataParallelWrapper(allreduce_comm_precision="fp16")
    ),
    "layer used twice behind checkpoints": Program(head=Siamese),
    "buffers of rank 0": Program(
        head=Normed, wrapper=Broadcasting, cut=False, refusal="head.norm is a BatchNorm1d"
    ),
    "hook on the model": Program(
        prepare=_with_model_hook, cut=False, refusal="a hook is registered on the Distributed"
    ),
    "hook on a gradient": Program(
        prepare=_with_gradient_hook, cut=False, refusal="a gradient hook is registered on parameter"
    ),
    "hook on a gradient's accumulation": Program(
        prepare=_with_accumulation_hook, cut=False, refusal="a gradient hook is registered on"
    ),
    "sparse gradients": Program(
        head=SparseGradients, cut=False, refusal="DistributedDataParallel reduces sparse gradients"
    ),
    "loss scaler": Program(pipeline=_scaled, cut=False, refusal="Scaled overrides _backward"),
    "replicate()": Program(
        prepare=_replicated, is_wrapped=False, cut=False, refusal="replicate() was applied to"
    ),
    "unused parameters": Program(
        wrapper=lambda: DefaultDataParallelWrapper(static_graph=False, find_unused_parameters=True),
        cut=False,
        refusal="DistributedDataParallel looks for unused parameters",
    ),
    "a loss of weights, no samples on a rank": Program(head=Regular, batch=_empty_on_one),
    "warm-up": Program(before_step=_warm_up),
    "warm-up of stock tables": Program(
        before_step=_warm_up, stock=[Stock("ebc", frozenset({"t_f"}))]
    ),
    "autocast": Program(within=lambda: torch.autocast("cpu", dtype=torch.bfloat16), atol=1e-2),
    "metric in evaluation": Program(head=Metric, before_step=_evaluated),
    "small last batch": Program(head=Squeezed, batch=_small_last),
    "ratio of sums": Program(head=Ratio, options={"loss_reduction": "ratio"}),
}


def train_program(program: Program, rank: int, is_ours: bool, **options: Any) -> Any:
    model = Model(program.head)
    model.head.is_ours = is_ours
    sharded = build(
        model,
        program.stock if is_ours else None,
        is_wrapped=program.is_wrapped,
        wrapper=program.wrapper(),
        stock_is_row_wise=False,
    )
    program.prepare(sharded)
    kind = program.pipeline(InterleavedTrainPipeline if is_ours else TrainPipelineSparseDist)
    pipeline = kind(sharded, dense_optimizer(sharded), CPU, **options)
    batches = iter([program.batch(rank, step) for step in range(STEPS)])
    outputs = []
    for step in range(STEPS):
        program.before_step(sharded, step)
        with program.within():
            outputs.append(pipeline.progress(batches))
    return outputs, _gathered(sharded)


def _gathered(model: Any) -> dict[str, Tensor]:
    """Weights and optimizer state of all ranks, whatever the placement."""
    values = dict(model.state_dict())
    for name, states in model.fused_optimizer.state_dict()["state"].items():
        values |= {f"{name}/{key}": value for key, value in states.items()}
    mine = Result([], {}, {name: local_shards(value) for name, value in values.items()}, {}, [])
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    return whole(every, "states")


def _all_programs(rank: int, world_size: int) -> dict[Any, Any]:
    results: dict[Any, Any] = {}
    for name, program in PROGRAMS.items():
        results[name, "stock"] = train_program(program, rank, is_ours=False)
        for number in (None, 1, 4):
            try:
                options = {"num_micro_batches": number, **program.options}
                results[name, number] = train_program(program, rank, is_ours=True, **options)
            except CompatError as error:
                results[name, number] = str(error)
            except Exception as error:
                error.add_note(f"{name}, {number} micro-batches")
                raise
    return results


@cache
def _by_rank() -> list[dict[Any, Any]] | RankError:
    try:
        return run_ranks(_all_programs, 2, timeout_s=280)
    except RankError as error:  # remembered: the tests that share the run must not repeat it
        return error


@pytest.mark.parametrize("num_micro_batches", [None, 1, 4])
@pytest.mark.parametrize("name", list(PROGRAMS))
def test_a_program_trains_as_under_torchrec(name: str, num_micro_batches: int | None) -> None:
    by_rank = _by_rank()
    if isinstance(by_rank, RankError):
        raise by_rank
    program = PROGRAMS[name]
    for results in by_rank:
        found = results[name, num_micro_batches]
        if num_micro_batches == 4 and not program.cut:
            assert program.refusal in found
            assert found == by_rank[0][name, num_micro_batches]
            continue
        assert not isinstance(found, str), found
        torch.testing.assert_close(found, results[name, "stock"], rtol=RTOL, atol=program.atol)
