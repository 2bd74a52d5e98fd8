"""Exceptions in the middle of a run, detaching and attaching: what is lost, and nothing else.

Two pipelines over one model: each sees the updates of the other, or is refused by name.
The states of a pipeline: which may follow which, and what a failed step leaves."""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torchrec.datasets.utils import Batch
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.train_pipeline import EvalPipelineSparseDist, TrainPipelineSparseDist

from tests.sharding.jobs import ATOL, ODD, PLAIN, RTOL, Job, build, dense_optimizer, result_of
from tests.support.placing import CPU
from tests.support.refusals import refusal
from tests.support.shared_run import run_once
from tests.train_pipeline import runs
from torchrec_picasso import CompatError
from torchrec_picasso.app.launch.run_ranks import run_ranks
from torchrec_picasso.errors import InputError, PicassoError
from torchrec_picasso.exchange.agreement import Agreement
from torchrec_picasso.proof import proof
from torchrec_picasso.train_pipeline import micro_batch_policy
from torchrec_picasso.train_pipeline.lifecycle import Lifecycle, State

HOT_COLD = Job(placement={"*": 2, "one_row": 1}, tables=ODD, batch_sizes=(12,))
WAVES = dataclasses.replace(HOT_COLD, waves={"a": 1, "two_rows": 2})
BY_HOST = dataclasses.replace(HOT_COLD, by_host=("*",))
MIXED = Job(placement={"*": 2, "b": "table_wise"}, tables=PLAIN, batch_sizes=(12,))
STOCK = Job(placement={"*": "table_wise"}, tables=PLAIN, batch_sizes=(12, 7))
STEPS = range(9)


class BrokenError(Exception):
    """Error that user code raises here."""


@contextmanager
def _broken_forward(model: DistributedModelParallel, call: int) -> Iterator[None]:
    """Within it the model raises at one of its calls, counted from 0, before tables are asked."""
    whole_forward, calls = model.module.forward, iter(range(1000))

    def forward(batch: Batch) -> Any:
        if next(calls) == call:
            raise BrokenError
        return whole_forward(batch)

    with pytest.MonkeyPatch.context() as patch:  # nobody looks at the model meanwhile
        patch.setattr(micro_batch_policy, "is_due", lambda step: False)
        patch.setattr(proof.Guard, "changed", lambda guard, batch=None: None)
        patch.setattr(model.module, "forward", forward)
        yield


def _forward_raises(model: Any, pipeline: Any, job: Job, rank: int) -> list[Tensor]:
    """In the fourth step, with K = 4 in its third micro-batch: ids of the next are on the way."""
    batches = iter(runs.batches_of(job, rank, STEPS))
    outputs = [pipeline.progress(batches) for _ in range(3)]
    with _broken_forward(model, pipeline.num_micro_batches // 2), pytest.raises(BrokenError):
        pipeline.progress(batches)
    return outputs + _reset_and_go_on(pipeline, batches)


def _reset_and_go_on(pipeline: Any, batches: Iterator[Batch]) -> list[Tensor]:
    with pytest.raises(PicassoError, match=r"did not end; call reset\(\) on all ranks"):
        pipeline.progress(batches)
    pipeline.reset()
    return runs.run_to_the_end(pipeline, batches)


class _Faulty(Iterator[Batch]):
    """Batches, some of which cannot be read."""

    def __init__(self, batches: list[Batch], *broken: int) -> None:
        self._batches = enumerate(batches)
        self._broken = broken

    def __next__(self) -> Batch:
        index, batch = next(self._batches)
        if index in self._broken:
            raise BrokenError
        return batch


def _iterator_raises(model: Any, pipeline: Any, job: Job, rank: int) -> list[Tensor]:
    """Twice: after the first time the step is tried again, after the second it is forgotten."""
    batches = _Faulty(runs.batches_of(job, rank, STEPS[:6]), 3)
    outputs = [pipeline.progress(batches)]
    with pytest.raises(BrokenError):
        pipeline.progress(batches)
    outputs += [pipeline.progress(batches) for _ in range(2)]  # 1 and 2; 4 and 5 are in flight
    batches = _Faulty(runs.batches_of(job, rank, STEPS[6:]), 0)
    with pytest.raises(BrokenError):
        pipeline.progress(batches)
    pipeline.reset()
    return outputs + runs.run_to_the_end(pipeline, batches)


def _one_iterator_raises(model: Any, pipeline: Any, job: Job, rank: int) -> list[Tensor]:
    """Rank 1 cannot read its second and fourth batch; rank 0 waits for it, and loses nothing."""
    if rank == 0:
        return runs.run_to_the_end(pipeline, iter(runs.batches_of(job, rank, (0, 2, *STEPS[4:]))))
    batches = _Faulty(runs.batches_of(job, rank, STEPS), 1, 3)
    with pytest.raises(BrokenError):
        pipeline.progress(batches)
    with pytest.raises(BrokenError):
        pipeline.progress(batches)
    return runs.run_to_the_end(pipeline, batches)


def _bad_batches(model: Any, pipeline: Any, job: Job, rank: int) -> list[Tensor]:
    """The first batch is bad on rank 1, and so is the fifth; all ranks are told."""
    own, others = "feature 'f0' looks up row 1000000", r"rank 1 holds \d+ ids outside their tables"
    message = own if rank == 1 else others
    listed = runs.batches_of(job, rank, STEPS)
    for index in (0, 4) if rank == 1 else ():
        listed[index].sparse_features.values().fill_(10**6)
    batches = iter(listed)
    with pytest.raises(InputError, match=message):  # no step has begun, nothing is in flight
        pipeline.progress(batches)
    outputs = [pipeline.progress(batches)]
    with pytest.raises(InputError, match=message):  # in the step of 2
        pipeline.progress(batches)
    pipeline.reset()
    return outputs + runs.run_to_the_end(pipeline, batches)


def _interrupted(model: Any, pipeline: Any, job: Job, rank: int) -> list[Tensor]:
    """While the ranks agree on the step of 3: whoever has the answer may be further."""
    batches = iter(runs.batches_of(job, rank, STEPS))
    outputs = [pipeline.progress(batches) for _ in range(3)]
    wait = Agreement.wait

    def interrupt(agreement: Agreement) -> None:
        wait(agreement)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Agreement, "wait", interrupt)
        with pytest.raises(KeyboardInterrupt):
            pipeline.progress(batches)
    return outputs + _reset_and_go_on(pipeline, batches)


def _trained_while_detached(model: Any, pipeline: Any, job: Job, rank: int) -> list[Tensor]:
    """By hand: 10 and 11 while 3 and 4 are in flight, 12 while 5 is, 13 at the end."""
    forward = model.module.ebc.forward
    batches = iter(runs.batches_of(job, rank, range(6)))
    outputs = [pipeline.progress(batches) for _ in range(3)]
    assert model.module.ebc.forward != forward
    assert pipeline.detach() is model
    assert model.module.ebc.forward == forward
    outputs += runs.plain_steps(model, runs.batches_of(job, rank, (10, 11)))
    pipeline.attach()
    outputs += [pipeline.progress(batches) for _ in range(2)]
    pipeline.detach()
    pipeline.attach()
    pipeline.detach()  # no step has taken the modules over
    outputs += runs.plain_steps(model, runs.batches_of(job, rank, (12,)))
    outputs += runs.run_to_the_end(pipeline, batches)  # attaches by itself
    pipeline.detach()
    return outputs + runs.plain_steps(model, runs.batches_of(job, rank, (13,)))


def _evaluated_in_inference_mode(model: Any, pipeline: Any, job: Job, rank: int) -> list[Tensor]:
    """First 0 and 1, and 5 in between; outputs are those of training."""
    batches, outputs = iter(runs.batches_of(job, rank, STEPS)), []
    for step in STEPS:
        is_trained = step not in (0, 1, 5)
        model.train(is_trained)
        with nullcontext() if is_trained else torch.inference_mode():
            output = pipeline.progress(batches)
        assert output.is_inference() is not is_trained
        outputs += [output] if is_trained else []
    return outputs


AROUND_RAISED, AROUND_DETACHED = [0, 1, 2, 6, 7, 8], [0, 1, 2, 10, 11, 3, 4, 12, 5, 13]
CASES: dict[str, tuple[Callable[..., list[Tensor]], Job, int, list[int]]] = {
    "forward raised, K=1": (_forward_raises, HOT_COLD, 1, AROUND_RAISED),
    "forward raised, K=4": (_forward_raises, HOT_COLD, 4, AROUND_RAISED),
    "forward raised, waves": (_forward_raises, WAVES, 4, AROUND_RAISED),
    "forward raised, stock beside": (_forward_raises, MIXED, 4, AROUND_RAISED),
    "iterator raised": (_iterator_raises, HOT_COLD, 2, [0, 1, 2, 7, 8]),
    "iterator raised, stock": (_iterator_raises, STOCK, 1, [0, 1, 2, 7, 8]),
    "iterator of one rank raised": (_one_iterator_raises, HOT_COLD, 2, [0, 2, *STEPS[4:]]),
    "iterator of one rank raised, stock": (_one_iterator_raises, STOCK, 1, [0, 2, *STEPS[4:]]),
    "interrupted": (_interrupted, HOT_COLD, 2, AROUND_RAISED),
    "inference mode, K=1": (_evaluated_in_inference_mode, HOT_COLD, 1, [2, 3, 4, 6, 7, 8]),
    "inference mode, K=4": (_evaluated_in_inference_mode, WAVES, 4, [2, 3, 4, 6, 7, 8]),
    "inference mode, stock beside": (_evaluated_in_inference_mode, MIXED, 1, [2, 3, 4, 6, 7, 8]),
    "bad batches": (_bad_batches, HOT_COLD, 2, [1, 5, 6, 7, 8]),
    "bad batches, by host, K=1": (_bad_batches, BY_HOST, 1, [1, 5, 6, 7, 8]),
    "bad batches, by host, K=4": (_bad_batches, BY_HOST, 4, [1, 5, 6, 7, 8]),
    "detached, K=1": (_trained_while_detached, HOT_COLD, 1, AROUND_DETACHED),
    "detached, K=4": (_trained_while_detached, HOT_COLD, 4, AROUND_DETACHED),
    "detached, waves": (_trained_while_detached, WAVES, 1, AROUND_DETACHED),
    "detached, stock beside": (_trained_while_detached, MIXED, 4, AROUND_DETACHED),
    "detached, stock": (_trained_while_detached, STOCK, 1, AROUND_DETACHED),
}
"""What happens, to which job, with how many micro-batches, and the batches that are trained on."""


def _world_size(job: Job) -> int:
    return 4 if job.by_host else 2


def _run(rank: int, world_size: int) -> dict[str, tuple[runs.Run, runs.Run]]:
    """Every case, and the plain loop over what it trains on."""
    results = {}
    for name, (act, job, num_micro_batches, trained) in CASES.items():
        if world_size != _world_size(job):
            continue
        mine, plain = build(job, rank, world_size), runs.plain_run(job, rank, world_size, trained)
        pipeline = runs.pipeline_of(mine, num_micro_batches=num_micro_batches)
        outputs = act(mine, pipeline, job, rank)
        results[name] = (result_of(mine, []), outputs), plain
    return results


@pytest.mark.parametrize("name", list(CASES))
def test_training_goes_on_as_the_plain_loop_over_the_same_batches(name: str) -> None:
    by_rank = run_once(_run, _world_size(CASES[name][1]))
    runs.compare_runs([results[name] for results in by_rank], 0, 1)


def _another_model(rank: int, world_size: int) -> tuple[runs.Run, runs.Run]:
    """The pipeline goes over to another model with batches in flight, which are forgotten."""
    first, mine, plain = (build(HOT_COLD, rank, world_size) for _ in range(3))
    pipeline = runs.pipeline_of(first, num_micro_batches=2)
    batches = iter(runs.batches_of(HOT_COLD, rank, STEPS))
    pipeline.progress(batches)
    pipeline.detach()
    pipeline.attach(mine)
    mine.eval()
    outputs = runs.run_to_the_end(pipeline, batches)
    plain.eval()
    expected = runs.plain_steps(plain, runs.batches_of(HOT_COLD, rank, STEPS[3:]))
    return (result_of(mine.train(), []), outputs), (result_of(plain.train(), []), expected)


def test_another_model_may_be_attached() -> None:
    runs.compare_runs(run_ranks(_another_model, 2, timeout_s=60), 0, 1)


JOB = Job(placement={"*": 2, "a": 0}, tables=PLAIN)
NUM_STEPS = 6
"""Of each pipeline."""


def _in_turn(rank: int, world_size: int) -> dict[Any, runs.Run]:
    """Two pipelines with data of their own take steps in turn; the witness is the plain loop."""
    batches = runs.batches_of(JOB, rank, range(2 * NUM_STEPS))
    found = {}
    for number in (1, 2):
        model = build(JOB, rank, world_size)
        pipelines = [runs.pipeline_of(model, num_micro_batches=number) for _ in range(2)]
        readers = [iter(batches[::2]), iter(batches[1::2])]
        outputs = [
            pipeline.progress(reader)
            for _ in range(NUM_STEPS)
            for pipeline, reader in zip(pipelines, readers)
        ]
        found[number] = result_of(model, []), outputs
    return {**found, "plain": runs.plain_run(JOB, rank, world_size, range(2 * NUM_STEPS))}


@pytest.mark.parametrize("number", [1, 2])
def test_rows_fetched_ahead_are_not_older_than_the_other_pipelines_update(number: int) -> None:
    runs.compare_runs(run_once(_in_turn, 2), number, "plain")


def _evaluate(model: Any, batches: list[Any]) -> Any:
    model.eval()
    with torch.no_grad():
        evaluation = EvalPipelineSparseDist(model, dense_optimizer(model), CPU)
        outputs = runs.run_to_the_end(evaluation, iter(batches))
    evaluation.detach()
    model.train()
    return [output for _, output in outputs] if isinstance(outputs[0], tuple) else outputs


def _beside_torchrecs(rank: int, world_size: int) -> tuple[list[str], Any, Any]:
    """TorchRec's pipeline takes over a model from ours, and ours from TorchRec's."""
    batches = runs.batches_of(JOB, rank, range(9))
    messages = []
    for torchrecs_first in (True, False):
        model = build(JOB, rank, world_size)
        ours, stock = (
            runs.pipeline_of(model),
            TrainPipelineSparseDist(model, dense_optimizer(model), CPU),
        )
        first, second = (stock, ours) if torchrecs_first else (ours, stock)
        reader = iter(batches)
        for pipeline in (first, first, second):
            pipeline.progress(reader)
        messages.append(refusal(CompatError, first.progress, reader))
    evaluated = []
    for make in (
        runs.pipeline_of,
        lambda model: TrainPipelineSparseDist(model, dense_optimizer(model), CPU),
    ):
        model = build(JOB, rank, world_size)
        pipeline = make(model)
        for _ in range(2):
            runs.run_to_the_end(pipeline, iter(batches[:6]))
            pipeline.detach()
            evaluated.append(_evaluate(model, batches[6:]))
            pipeline.attach(model)
    return messages, evaluated[:2], evaluated[2:]


def test_a_model_that_another_pipeline_took_is_refused_by_name() -> None:
    for messages, _, _ in run_once(_beside_torchrecs, 2):
        by_torchrecs, by_ours = messages
        assert "or outside a step of the pipeline that runs it" in by_torchrecs
        assert "another pipeline has replaced its forward; call detach()" in by_ours


def test_torchrecs_evaluation_of_a_detached_model_is_equal() -> None:
    for _, mine, expected in run_once(_beside_torchrecs, 2):
        torch.testing.assert_close(mine, expected, rtol=RTOL, atol=ATOL)


def _attached() -> Lifecycle:
    lifecycle = Lifecycle()
    lifecycle.change_to(State.ATTACHED)
    return lifecycle


def test_a_step_begins_and_ends_attached() -> None:
    lifecycle = _attached()
    with lifecycle.in_step():
        with pytest.raises(PicassoError, match="did not end"):
            lifecycle.check_step()
        with pytest.raises(PicassoError, match="is in a step and cannot become detached"):
            lifecycle.change_to(State.DETACHED)
    lifecycle.check_step()
    assert lifecycle.state is State.ATTACHED


@pytest.mark.parametrize("state", [State.NEW, State.DETACHED])
def test_nothing_runs_before_modules_are_taken_over(state: State) -> None:
    lifecycle = Lifecycle()
    lifecycle.change_to(state)
    with pytest.raises(PicassoError, match="cannot become in a step"), lifecycle.in_step():
        pass


@pytest.mark.parametrize("after", [State.ATTACHED, State.DETACHED, State.NEW])
def test_only_reset_leaves_a_failed_step(after: State) -> None:
    lifecycle = _attached()
    with pytest.raises(KeyError), lifecycle.in_step():
        raise KeyError
    lifecycle.change_to(after)  # as detach() and attach() do
    assert lifecycle.state is State.FAILED
    with pytest.raises(PicassoError, match=r"call reset\(\) on all ranks"):
        lifecycle.check_step()
    lifecycle.reset()
    assert lifecycle.state is after
