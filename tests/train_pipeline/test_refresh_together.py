"""Hot rows that change, beside what else a run does: sequences, evaluation, detaching, a second
pipeline, data that ends sooner on one rank, and bags; each against the plain loop."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torchrec.datasets.utils import Batch
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

from tests.sharding.jobs import CPU, Result, whole
from tests.sharding.sequence_jobs import (
    SequenceJob,
    build_sequences,
    dense_of,
    train_sequences,
)
from tests.train_pipeline.runs import ATOL, RTOL, plain_steps, run_to_the_end
from torchrec_picasso import HotRowRefresher, InterleavedTrainPipeline, PicassoError, Refresh
from torchrec_picasso.app.launch.run_ranks import run_ranks

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
    settings = {"num_micro_batches": 2, "lookahead": True, "loss_reduction": "sum", **settings}
    return InterleavedTrainPipeline(model, dense_of(model), CPU, **settings)


def _by_itself(model: DistributedModelParallel, batches: list[Batch]) -> list[Tensor]:
    pipeline = _pipeline(model, refresh=OFTEN)
    outputs, left = [], iter(batches)
    for _ in batches:
        outputs.append(pipeline.progress(left))
        found = pipeline.last_refresh
        MOVED["by_itself"] = MOVED.get("by_itself", 0) + (found.num_moved if found else 0)
    return outputs


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
    outputs, left, moved = [], iter(batches), 0
    for _ in batches:
        outputs.append(pipeline.progress(left))
        found = refresher.step()
        moved += found.num_moved if found else 0
    MOVED["by_hand"] = moved
    assert pipeline.last_refresh is None
    assert _listed(pipeline.hot_rows()) == _listed(refresher.hot_rows())
    return outputs


def _detached(model: DistributedModelParallel, batches: list[Batch]) -> list[Tensor]:
    pipeline, refresher = _pipeline(model, refresh=None), HotRowRefresher(model, OFTEN)
    outputs, left, moved = [], iter(batches), 0
    for step, _ in enumerate(batches):
        outputs.append(pipeline.progress(left))
        if step % 3 == 1:
            pipeline.detach()
            for _ in range(2):
                found = refresher.step()
                moved += found.num_moved if found else 0
            pipeline.attach()
    MOVED["detached"] = moved
    return outputs


def _sparse_dist(model: DistributedModelParallel, batches: list[Batch]) -> list[Tensor]:
    pipeline = TrainPipelineSparseDist(model, dense_of(model), CPU)
    refresher = HotRowRefresher(model, OFTEN)
    outputs, left, moved = [], iter(batches), 0
    for _ in batches:
        outputs.append(pipeline.progress(left))
        found = refresher.step()
        moved += found.num_moved if found else 0
    MOVED["sparse_dist"] = moved
    return outputs


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


def _plain(model: DistributedModelParallel, batches: list[Batch]) -> list[Tensor]:
    return plain_steps(model, batches, dense_of(model))


def _plain_evaluating(model: DistributedModelParallel, batches: list[Batch]) -> list[Tensor]:
    outputs, optimizer = [], dense_of(model)
    for step, batch in enumerate(batches):
        model.train(step not in NOT_TRAINED)
        outputs += plain_steps(model, [batch], optimizer)
    return outputs


def _listed(rows: dict[str, Tensor]) -> dict[str, list[int]]:
    return {name: of.tolist() for name, of in rows.items()}


def _run(rank: int, world_size: int) -> tuple[dict[str, Result], dict[str, int], str]:
    drivers = {
        **DRIVERS,
        "evaluating": _evaluating,
        "plain": _plain,
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
            outputs = plain_steps(model, batches, dense_of(model))
        loss, _ = model(batches[0])
        found = refresher.step()
        assert found is not None
        assert found.num_moved
        try:
            loss.backward()
        except PicassoError as error:
            said = str(error)
        return outputs

    train_sequences(model, job, rank, drive)
    return said


@pytest.fixture(scope="module")
def trained() -> list[tuple[dict[str, Result], dict[str, int], str]]:
    return run_ranks(_run, 2, timeout_s=120)


@pytest.mark.parametrize("name", [*DRIVERS, "evaluating"])
def test_trains_as_the_plain_loop(
    trained: list[tuple[dict[str, Result], dict[str, int], str]], name: str
) -> None:
    plain_name = "plain_evaluating" if name == "evaluating" else "plain"
    runs = [found[name] for found, _, _ in trained]
    plain = [found[plain_name] for found, _, _ in trained]
    for kind in ("weights", "states"):
        torch.testing.assert_close(whole(runs, kind), whole(plain, kind), rtol=RTOL, atol=ATOL)
    for mine, its in zip(runs, plain):
        torch.testing.assert_close(mine.losses, its.losses, rtol=RTOL, atol=ATOL)
    for replicas in zip(*(run.replicas for run in runs)):
        assert torch.equal(*replicas)


def test_rows_did_move(trained: list[tuple[dict[str, Result], dict[str, int], str]]) -> None:
    moved = [of for _, of, _ in trained]
    assert moved[0] == moved[1]
    assert moved[0].keys() == {"by_itself", "by_hand", "detached", "sparse_dist"}
    assert min(moved[0].values()) > 2


def test_a_change_within_a_step_is_refused(
    trained: list[tuple[dict[str, Result], dict[str, int], str]],
) -> None:
    for _, _, said in trained:
        assert said.startswith("hot rows changed between a forward and its backward")
