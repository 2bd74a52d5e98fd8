"""Bad input ends every rank at once, with one error that says what, where and what was expected."""

from __future__ import annotations

import dataclasses
import time

import pytest
import torch
from torchrec import KeyedJaggedTensor

from tests.sharding import jobs
from tests.sharding.jobs import Job, build, make_batch
from torchrec_picasso import (
    CompatError,
    InputError,
    PlanError,
)
from torchrec_picasso.app.launch.run_ranks import RankError, run_ranks

JOB = Job(placement={"*": 2}, num_steps=2)


def _bad_batch(rank: int, world_size: int, job: Job, values: dict[str, float]) -> str:
    """Trains a good step, then one in which rank 1 holds a bad id or weight; returns the error."""
    model = build(job, rank, world_size)
    model(make_batch(job, rank, 0))[0].backward()
    batch = make_batch(job, rank, 1)
    features = batch.sparse_features
    if rank == 1:
        ids, weights = features.values().clone(), features.weights_or_none()
        if "id" in values:
            ids[3] = int(values["id"])
        if "weight" in values:
            weights = features.weights().clone()
            weights[3] = values["weight"]
        batch.sparse_features = KeyedJaggedTensor(
            keys=features.keys(), values=ids, weights=weights, lengths=features.lengths()
        )
    with pytest.raises(InputError) as caught:
        model(batch)
    return str(caught.value)


@pytest.mark.parametrize(
    ("bad_id", "place"), [(60, 2), (-1, 2), (2**40, 2), (60, "bags"), (-1, "bags")]
)
def test_id_outside_its_table(bad_id: int, place: int | str) -> None:
    start_s = time.monotonic()
    job = dataclasses.replace(JOB, placement={"*": 2, "a": place})
    told_0, told_1 = run_ranks(_bad_batch, 2, job, {"id": bad_id}, timeout_s=60)
    assert f"feature 'f0' looks up row {bad_id} of table 'a', whose rows are 0..59" in told_1
    assert "rank 1 holds 1 ids outside their tables" in told_0
    assert time.monotonic() - start_s < 50


@pytest.mark.parametrize(("weight", "place"), [(float("nan"), 2), (float("inf"), "bags")])
def test_weight_that_is_not_finite(weight: float, place: int | str) -> None:
    job = dataclasses.replace(JOB, placement={"*": place}, weighted=True)
    told_0, told_1 = run_ranks(_bad_batch, 2, job, {"weight": weight}, timeout_s=60)
    assert f"feature 'f0' of table 'a' has per-sample weight {weight}" in told_1
    assert "rank 1 holds 1 per-sample weights that are not finite" in told_0


def _build(rank: int, world_size: int, job: Job, what: str) -> str:
    if what == "too many":
        jobs.HotColdParams = lambda hot_rows, wave: _params(range(61))
    if what == "outside":
        jobs.HotColdParams = lambda hot_rows, wave: _params([100])
    with pytest.raises((CompatError, PlanError)) as caught:
        build(job, rank, world_size)
    return f"{type(caught.value).__name__}: {caught.value}"


def _params(rows: object) -> object:
    from torchrec_picasso.placement import HotColdParams

    return HotColdParams(hot_rows=rows)


@pytest.mark.parametrize(
    ("what", "job", "expected"),
    [
        ("too many", JOB, "PlanError: table 'a' has 60 rows, but 61 hot rows were requested"),
        ("outside", JOB, "PlanError: hot row 100 lies outside table 'a', whose rows are 0..59"),
        (
            "optimizer",
            dataclasses.replace(JOB, optimizer="lars"),
            "CompatError: hot/cold tables 'a', 'b', 'c': the optimizer LARS_SGD has no CPU kernel",
        ),
    ],
)
def test_what_cannot_be_sharded(what: str, job: Job, expected: str) -> None:
    assert expected in run_ranks(_build, 1, job, what, timeout_s=60)[0]


def _dies(rank: int, world_size: int) -> None:
    model = build(JOB, rank, world_size)
    if rank == 1:
        raise RuntimeError("user code failed")
    model(make_batch(JOB, rank, 0))


def test_a_rank_that_dies_ends_the_others() -> None:
    start_s = time.monotonic()
    with pytest.raises(RankError, match="rank 1 raised RuntimeError: user code failed"):
        run_ranks(_dies, 2, timeout_s=60)
    assert time.monotonic() - start_s < 50


def test_reshard_is_refused() -> None:
    assert "reshard" in run_ranks(_reshard, 1, timeout_s=60)[0]


def _reshard(rank: int, world_size: int) -> str:
    model = build(JOB, rank, world_size)
    with pytest.raises(CompatError) as caught:
        model.module.ebc.update_shards({}, None, torch.device("cpu"))
    return str(caught.value)
