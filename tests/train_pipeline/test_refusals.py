"""Programs that cannot be trained exactly are refused by name, on all ranks, leaving the model as
it was; and what only looks like it is trained."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.fx
from torch import Tensor, nn
from torchrec.datasets.utils import Batch
from torchrec.distributed import DistributedModelParallel
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from tests.sharding.jobs import PLAIN, Job, Model, build, dense_optimizer, make_batch, result_of
from tests.sharding.sequence_jobs import SequenceJob, build_sequences
from tests.support.refusals import refusal
from tests.support.shared_run import run_once
from tests.train_pipeline.runs import (
    Run,
    batches_of,
    compare_runs,
    pipeline_of,
    plain_run,
    plain_steps,
    run_to_the_end,
)
from torchrec_picasso import InterleavedTrainPipeline
from torchrec_picasso.app.launch.run_ranks import run_ranks
from torchrec_picasso.errors import CompatError

JOB = Job(placement={"*": 2}, tables=PLAIN)


class Changing(Model):
    """Draws before it looks up, so that the tables are left alone."""

    def look_up(self, batch: Batch) -> Any:
        return self.ebc(drawn(batch.sparse_features))


def drawn(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """The same ids, which might have been others."""
    ids = features.values() + torch.randint_like(features.values(), 1)
    return KeyedJaggedTensor(
        features.keys(), ids, features.weights_or_none(), lengths=features.lengths()
    )


class _Hidden(Model):
    """Looks up in a function that the tracer does not look into."""

    def look_up(self, batch: Batch) -> Any:
        return _look_up(self.ebc, batch)


@torch.fx.wrap
def _look_up(ebc: nn.Module, batch: Batch) -> Any:
    return ebc(batch.sparse_features)


class _Untraceable(Model):
    """A forward that needs numbers; the loss is that of the parent."""

    def count(self, labels: Tensor) -> Any:
        return int((labels > 0.5).sum().item())

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        loss, out = super().forward(batch)
        return loss * (1 + self.count(batch.labels)), out


class _WithLen(_Untraceable):
    def count(self, labels: Tensor) -> int:
        return len(labels)


class _WithLoop(_Untraceable):
    def count(self, labels: Tensor) -> Any:
        return sum(label > 0.5 for label in labels)


class _WithOwnError(_Untraceable):
    def count(self, labels: Tensor) -> int:
        if not isinstance(labels, Tensor):
            raise ValueError("labels are no tensor")
        return int((labels > 0.5).sum().item())


@torch.fx.wrap
def _count_high(labels: Tensor) -> int:
    return int((labels > 0.5).sum().item())


class _Wrapped(_Untraceable):
    def count(self, labels: Tensor) -> int:
        return _count_high(labels)


class _Counter(nn.Module):
    def forward(self, labels: Tensor) -> int:
        return int((labels > 0.5).sum().item())


class _DenseModule(_Untraceable):
    def count(self, labels: Tensor) -> Any:
        return self.counter(labels)


def _untraceable(line: str, why: str) -> list[str]:
    return [
        f"the tracer stopped at {__file__}:",
        f"`{line}` ({why}",
        "Only modules with tables inside are traced",
        "torch.fx.wrap",
        "an nn.Module of its own that holds no tables",
    ]


def _with_batch_norm(model: DistributedModelParallel) -> None:
    over = model.module.over
    model.module.over = nn.Sequential(nn.BatchNorm1d(over.in_features), over)


def _as(kind: type[Model]) -> Callable[[DistributedModelParallel], None]:
    return lambda model: setattr(model.module, "__class__", kind)


def _as_it_is(given: Any) -> Any:
    return given


def _variable(batch: Batch) -> Batch:
    """The first feature has a sample more than the others."""
    features = batch.sparse_features
    strides = [[features.stride() + (i == 0)] for i in range(len(features.keys()))]
    lengths = torch.cat([torch.zeros(1, dtype=features.lengths().dtype), features.lengths()])
    batch.sparse_features = KeyedJaggedTensor(
        keys=features.keys(),
        values=features.values(),
        lengths=lengths,
        stride_per_key_per_rank=strides,
    )
    return batch


class _Bare(Pipelineable):
    """A batch whose samples nobody but its owner can count."""

    __slots__ = ("labels", "sparse_features")

    def __init__(self, batch: Batch) -> None:
        self.sparse_features, self.labels = batch.sparse_features, batch.labels

    def to(self, device: torch.device, non_blocking: bool = False) -> _Bare:
        return self

    def record_stream(self, stream: torch.Stream) -> None:
        pass

    def pin_memory(self) -> _Bare:
        return self


REFUSED: list[tuple[Callable[..., Any], Callable[..., Any], int, list[str]]] = [
    (
        *(_with_batch_norm, _as_it_is, 2),
        ["over.0 is a BatchNorm1d", "num_micro_batches=1", "LayerNorm"],
    ),
    (
        _as(Changing),
        _as_it_is,
        2,
        ["ebc: ", "made inside the model", "draws random", "num_micro_batches=1"],
    ),
    (_as(_Hidden), _as_it_is, 2, ["ebc: ", "sees no call of it", "call the module in a forward"]),
    (_as_it_is, _variable, 3, ["ebc: ", "batch size per feature", "num_micro_batches=1"]),
    (_as_it_is, _Bare, 2, ["a _Bare has no samples", "num_micro_batches=1", "split_batch="]),
]
_NUMBER = "return int((labels > 0.5).sum().item())"
_LOOP = "return sum(label > 0.5 for label in labels)"
UNTRACEABLE = [
    (_as(kind), _as_it_is, 1, _untraceable(*parts))
    for kind, parts in {
        _Untraceable: (_NUMBER, "TypeError: int() argument must be"),
        _WithLen: ("return len(labels)", "RuntimeError: 'len' is not supported in symbolic tr"),
        _WithLoop: (_LOOP, "TraceError: Proxy object cannot be iterated"),
        _WithOwnError: (
            'raise ValueError("labels are no tensor")',
            "ValueError: labels are no tensor)",
        ),
    }.items()
]
"""Refused however the batch is cut, and whether that was asked for or not."""


def _refused(rank: int, world_size: int) -> list[str]:
    messages = []
    for change_model, change_batch, num_micro_batches, _ in (*REFUSED, *UNTRACEABLE):
        model = build(JOB, rank, world_size)
        change_model(model)
        forward = model.module.ebc.forward
        pipeline = pipeline_of(model, num_micro_batches=num_micro_batches)
        for _ in range(2):
            with pytest.raises(CompatError) as refused:
                pipeline.progress(iter([change_batch(make_batch(JOB, rank, 0))]))
        messages.append(str(refused.value))
        pipeline.detach()
        assert model.module.ebc.forward == forward
    return messages


def test_what_cannot_be_exact_is_refused_by_name_on_all_ranks() -> None:
    by_rank = run_ranks(_refused, 2, timeout_s=60)
    assert by_rank[0] == by_rank[1]
    for message, (*_, parts) in zip(by_rank[0], (*REFUSED, *UNTRACEABLE), strict=True):
        for part in parts:
            assert part in message, message


def _cured(rank: int, world_size: int) -> list[Run]:
    """The plain loop of a model that cannot be traced; then the pipeline, once it can be."""
    batches = batches_of(JOB, rank, range(3))
    runs = []
    for kind in (None, _Wrapped, _DenseModule):
        model = build(JOB, rank, world_size)
        _as(_Untraceable)(model)
        if kind is None:
            outputs = plain_steps(model, batches)
        else:
            pipeline = pipeline_of(model, num_micro_batches=1)
            with pytest.raises(CompatError, match="cannot be traced"):
                pipeline.progress(iter(batches[:1]))
            model.module.__class__, model.module.counter = kind, _Counter()
            pipeline.reset()
            outputs = run_to_the_end(pipeline, iter(batches))
        runs.append((result_of(model, []), outputs))
    return runs


def test_both_cures_of_a_model_that_cannot_be_traced() -> None:
    by_rank = run_ranks(_cured, 2, timeout_s=60)
    for cured in (1, 2):
        compare_runs(by_rank, cured, 0)


def _automatic(rank: int, world_size: int) -> list[tuple[int, str]]:
    """Programs that are refused with requested micro-batches are trained whole without."""
    chosen = []
    for change_model, change_batch, *_ in REFUSED:
        if change_batch is _variable:  # this model cannot make use of it; test_own_rows' can
            continue
        model = build(JOB, rank, world_size)
        change_model(model)
        pipeline = pipeline_of(model, num_micro_batches=None, lookahead=True)
        batches = [change_batch(make_batch(JOB, rank, step)) for step in range(3)]
        assert len(run_to_the_end(pipeline, iter(batches))) == 3
        chosen.append((pipeline.num_micro_batches, pipeline.summary()))
    return chosen


def test_what_would_be_refused_is_trained_whole_unless_asked_for() -> None:
    for chosen in run_ranks(_automatic, 2, timeout_s=60):
        assert [number for number, _ in chosen] == [1] * (len(REFUSED) - 1)


def _refused_late(rank: int, world_size: int) -> dict[Any, tuple[list[str], Run, Run]]:
    """One of rank 1's batches has features with batch sizes of their own."""
    found = {}
    for job, (name, (odd, trained)) in product((JOB, BESIDE_STOCK), ODD_BATCHES.items()):
        model = build(job, rank, world_size)
        pipeline = pipeline_of(model, num_micro_batches=2)
        batches = batches_of(job, rank, range(9))
        if rank == 1:
            batches[odd] = _variable(batches[odd])
        outputs, messages = [], []
        for some in (batches[:3], batches[3:]):
            reader = iter(some)
            while True:
                try:
                    outputs.append(pipeline.progress(reader))
                except StopIteration:
                    break
                except CompatError as error:
                    messages.append(str(error))
                    pipeline.reset()
        expected = plain_run(job, rank, world_size, trained)
        found[job is JOB, name] = messages, (result_of(model, []), outputs), expected
    return found


ODD_BATCHES = {
    "the first of later batches": (3, [0, 1, 2, 4, 5, 6, 7, 8]),
    "the second": (4, [0, 1, 2, 6, 7, 8]),
    "the third": (5, [0, 1, 2, 6, 7, 8]),
    "in a step": (7, [0, 1, 2, 3, 4, 8]),
}
"""Number of the batch, and of those that are trained: with a refused one are those in flight."""


BESIDE_STOCK = dataclasses.replace(JOB, placement={"*": 2, "b": "table_wise"})


@pytest.mark.parametrize("name", ODD_BATCHES)
@pytest.mark.parametrize("alone", [True, False], ids=["alone", "beside stock"])
def test_a_batch_that_one_rank_cannot_train_is_refused_on_all(alone: bool, name: str) -> None:
    found = [on_rank[alone, name] for on_rank in run_once(_refused_late, 3)]
    messages = [on_rank[0] for on_rank in found]
    assert messages[0] == messages[1] == messages[2]
    (message,) = messages[0]
    assert message.startswith("rank 1: ebc: its KeyedJaggedTensor has a batch size per feature")
    compare_runs(found, 1, 2)


def _weights_want_gradients(rank: int, world_size: int) -> list[str]:
    """The weights of one of rank 1's batches do, and other ranks apply them."""
    job, messages = dataclasses.replace(JOB, placement={"*": "bags"}, weighted=True), []
    for number in (0, 1, 3):
        pipeline = pipeline_of(build(job, rank, world_size), num_micro_batches=2)
        batches = batches_of(job, rank, range(5))
        if rank == 1:
            batches[number].sparse_features.weights().requires_grad_()
        messages.append(refusal(CompatError, run_to_the_end, pipeline, iter(batches)))
    return messages


def test_weights_whose_gradients_leave_the_rank_are_refused_on_all_at_once() -> None:
    on_rank_0, on_rank_1 = run_ranks(_weights_want_gradients, 2, timeout_s=60)
    assert on_rank_0 == on_rank_1
    for message in on_rank_0:
        assert message.startswith("rank 1: the per-sample weights of features")
        assert "form='rows'" in message


def _weights_come(rank: int, world_size: int) -> str:
    """Bags and sequences share an exchange; the fourth batch of rank 1 has weights."""
    job = SequenceJob(placement={"*": 2}, batch_sizes=(24,))
    pipeline = pipeline_of(build_sequences(job, world_size), num_micro_batches=2)
    batches = [make_batch(job, rank, step) for step in range(6)]
    if rank == 1:
        kjt = batches[3].sparse_features
        batches[3].sparse_features = KeyedJaggedTensor(
            kjt.keys(), kjt.values(), torch.ones(kjt.values().numel()), kjt.lengths()
        )
    return refusal(CompatError, run_to_the_end, pipeline, iter(batches))


def test_weights_that_come_later_are_refused_on_all_at_once() -> None:
    on_rank_0, on_rank_1 = run_ranks(_weights_come, 2, timeout_s=60)
    assert on_rank_0 == on_rank_1
    assert "have per-sample weights and those of" in on_rank_0


class _TwoBackwards(InterleavedTrainPipeline[Any, Any]):
    def _backward(self, losses: Tensor) -> None:
        losses.backward(retain_graph=True)
        losses.backward()


def _backward_twice(rank: int, world_size: int) -> str:
    model = build(dataclasses.replace(JOB, placement={"*": 0}), rank, world_size)
    pipeline = _TwoBackwards(model, dense_optimizer(model), torch.device("cpu"))
    return refusal(CompatError, run_to_the_end, pipeline, iter(batches_of(JOB, rank, range(3))))


def test_a_second_backward_of_a_step_is_refused() -> None:
    for message in run_ranks(_backward_twice, 2, timeout_s=60):
        assert "ebc: a second backward of one step reaches its tables" in message


def test_methods_that_would_not_be_called_are_refused() -> None:
    class Own(InterleavedTrainPipeline):
        def enqueue_batch(self, dataloader_iter: Any) -> bool:
            return bool(super().enqueue_batch(dataloader_iter))

    with pytest.raises(CompatError, match="Own overrides enqueue_batch, which"):
        Own(torch.nn.Linear(1, 1), torch.optim.SGD([torch.zeros(1)], lr=0.1), torch.device("cpu"))


def _sealed(rank: int, world_size: int) -> list[str]:
    """Batches that only their owner can cut: as many on both ranks, then fewer on rank 0."""
    results = []
    for count in (7, 1, 2, 5, 0):
        pipeline = pipeline_of(build(JOB, rank, world_size), num_micro_batches=1)
        batches = [_Bare(batch) for batch in batches_of(JOB, rank, range(7))]
        try:
            run_to_the_end(pipeline, iter(batches[:count] if rank == 0 else batches))
            results.append("trained")
        except CompatError as refused:
            results.append(str(refused))
    return results


def test_an_empty_batch_that_one_rank_cannot_make_is_refused_on_all_at_once() -> None:
    on_rank_0, on_rank_1 = run_ranks(_sealed, 2, timeout_s=60)
    assert on_rank_0 == on_rank_1
    trained, *refused = on_rank_0
    assert trained == "trained"
    for message in refused:
        assert "type _Bare could not be cut to 0 samples" in message
        assert "split_batch=" in message
    for message in refused[:-1]:
        assert message.startswith("rank 0: a rank whose data ends before the others' goes on with")
