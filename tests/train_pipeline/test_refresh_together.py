"""Hot rows that change, beside what else a run does: sequences, evaluation, detaching, a second
pipeline, data that ends sooner on one rank, and bags; each against the plain loop."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor
from torchrec.datasets.utils import Batch
from torchrec.distributed import DistributedModelParallel

from tests.sharding.jobs import Result, assert_same_results
from tests.sharding.sequence_jobs import SequenceJob, build_sequences, train_sequences
from tests.support.shared_run import run_once
from tests.train_pipeline.drivers import make_driver
from tests.train_pipeline.runs import pipeline_of, plain_steps, run_to_the_end
from torchrec_picasso import HotRowRefresher, InterleavedTrainPipeline, PicassoError, Refresh

OFTEN = Refresh(every_steps=2, half_life_steps=2, deviations=0.0, check_steps=None)
JOB = SequenceJob(
    placement={"item": 6, "shop": 1, "user": "bags", "tag": 2, "genre": 3},
    num_steps=9,
    batch_sizes=(6, 3),
)
NOT_TRAINED = range(3, 5)
Steps = Callable[[DistributedModelParallel, list[Batch]], list[Tensor]]
MOVED: dict[str, int] = {}
"""By driver, on this rank."""


def _pipeline(model: DistributedModelParallel, **settings: Any) -> InterleavedTrainPipeline:
    return pipeline_of(model, **{"num_micro_batches": 2, "lookahead": True, **settings})


def _stepwise(
    name: str, pipeline: Any, batches: list[Batch], look: Callable[[int], list[Any]]
) -> list[Tensor]:
    """Outputs; counts the rows that moved by what ``look`` gives after each step."""
    outputs, left, moved = [], iter(batches), 0
    for step, _ in enumerate(batches):
        outputs.append(pipeline.progress(left))
        moved += sum(found.num_moved for found in look(step) if found)
    MOVED[name] = moved
    return outputs


def _by_itself(model: DistributedModelParallel, batches: list[Batch]) -> list[Tensor]:
    pipeline = _pipeline(model, refresh=OFTEN)
    return _stepwise("by_itself", pipeline, batches, lambda step: [pipeline.last_refresh])


def _with_trial(model: DistributedModelParallel, batches: list[Batch]) -> list[Tensor]:
    """Settings are tried on the same steps; coverage is checked in each."""
    often = dataclasses.replace(OFTEN, check_steps=1)
    pipeline = _pipeline(model, num_micro_batches=None, lookahead=None, refresh=often)
    outputs = run_to_the_end(pipeline, iter(batches))
    assert pipeline.last_refresh is not None
    return outputs


def _by_hand(model: DistributedModelParallel, batches: list[Batch]) -> list[Tensor]:
    """Somebody else changes hot rows between the steps of a pipeline that changes none."""
    pipeline, refresher = _pipeline(model, refresh=None), HotRowRefresher(model, OFTEN)
    outputs = _stepwise("by_hand", pipeline, batches, lambda step: [refresher.step()])
    assert pipeline.last_refresh is None
    assert _listed(pipeline.hot_rows()) == _listed(refresher.hot_rows())
    return outputs


def _detached(model: DistributedModelParallel, batches: list[Batch]) -> list[Tensor]:
    pipeline, refresher = _pipeline(model, refresh=None), HotRowRefresher(model, OFTEN)

    def look(step: int) -> list[Any]:
        if step % 3 != 1:
            return []
        pipeline.detach()
        found = [refresher.step() for _ in range(2)]
        pipeline.attach()
        return found

    return _stepwise("detached", pipeline, batches, look)


def _sparse_dist(model: DistributedModelParallel, batches: list[Batch]) -> list[Tensor]:
    pipeline, refresher = make_driver(None, model), HotRowRefresher(model, OFTEN)
    return _stepwise("sparse_dist", pipeline, batches, lambda step: [refresher.step()])


DRIVERS: dict[str, Steps] = {
    "by_itself": _by_itself,
    "with_trial": _with_trial,
    "by_hand": _by_hand,
    "detached": _detached,
    "sparse_dist": _sparse_dist,
}


def _evaluating(model: DistributedModelParallel, batches: list[Batch]) -> list[Tensor]:
    pipeline = _pipeline(model, refresh=OFTEN)
    outputs, left = [], iter(batches)
    for step, _ in enumerate(batches):
        model.train(step not in NOT_TRAINED)
        outputs.append(pipeline.progress(left))
    return outputs


def _plain_evaluating(model: DistributedModelParallel, batches: list[Batch]) -> list[Tensor]:
    outputs = []
    for step, batch in enumerate(batches):
        model.train(step not in NOT_TRAINED)
        outputs += plain_steps(model, [batch])
    return outputs


def _listed(rows: dict[str, Tensor]) -> dict[str, list[int]]:
    return {name: of.tolist() for name, of in rows.items()}


def _run(rank: int, world_size: int) -> tuple[dict[str, Result], dict[str, int], str]:
    drivers = {
        **DRIVERS,
        "evaluating": _evaluating,
        "plain": plain_steps,
        "plain_evaluating": _plain_evaluating,
    }
    found = {
        name: train_sequences(build_sequences(JOB, world_size), JOB, rank, driver)
        for name, driver in drivers.items()
    }
    return found, MOVED, _backward_over_a_change(rank, world_size)


def _backward_over_a_change(rank: int, world_size: int) -> str:
    """What is said of hot rows that change between a forward and its backward."""
    job = dataclasses.replace(JOB, num_steps=1)
    model = build_sequences(job, world_size)
    refresher = HotRowRefresher(model, dataclasses.replace(OFTEN, every_steps=1))
    said = ""

    def drive(model: DistributedModelParallel, batches: list[Batch]) -> list[Tensor]:
        nonlocal said
        for _ in range(2):
            outputs = plain_steps(model, batches)
        loss, _ = model(batches[0])
        found = refresher.step()
        assert found.num_moved
        try:
            loss.backward()
        except PicassoError as error:
            said = str(error)
        return outputs

    train_sequences(model, job, rank, drive)
    return said


@pytest.mark.parametrize("name", [*DRIVERS, "evaluating"])
def test_trains_as_the_plain_loop(name: str) -> None:
    plain = "plain_evaluating" if name == "evaluating" else "plain"
    runs, expected = ([found[of] for found, *_ in run_once(_run, 2)] for of in (name, plain))
    assert_same_results(runs, expected)


def test_rows_did_move() -> None:
    moved, other = (of for _, of, _ in run_once(_run, 2))
    assert moved == other
    assert moved.keys() == {"by_itself", "by_hand", "detached", "sparse_dist"}
    assert min(moved.values()) > 2


def test_a_change_within_a_step_is_refused() -> None:
    for _, _, said in run_once(_run, 2):
        assert said.startswith("hot rows changed between a forward and its backward")
