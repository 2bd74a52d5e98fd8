"""Sequence tables against stock TorchRec: losses, weights, optimizer state; ranks 1, 2 and 3.

An EmbeddingCollection and two EmbeddingBagCollections in one model, by the plain loop and by the
interleaved pipeline in 1, 2 and 4 micro-batches, looking ahead or not. Tolerances are those of
``test_against_stock``: float32 sums in another order, nothing else.
"""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec.datasets.utils import Batch
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.planner import Topology
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import ShardingEnv

from tests.sharding.jobs import CPU, Result, whole
from tests.sharding.sequence_jobs import (
    FEATURES,
    TABLES_OF,
    Driver,
    SequenceJob,
    SequenceModel,
    build_sequences,
    dense_of,
    make_sequence_batch,
    train_sequences,
)
from tests.train_pipeline.runs import plain_steps, run_to_the_end
from torchrec_picasso import (
    FrequencyStats,
    HotColdEmbeddingBagCollectionSharder,
    HotColdEmbeddingCollectionSharder,
    InterleavedTrainPipeline,
    hot_cold_planner,
)
from torchrec_picasso.app.launch.run_ranks import RankError, run_ranks
from torchrec_picasso.errors import InputError

RTOL, ATOL = 1e-4, 2e-5
WIRE_RTOL, WIRE_ATOL = 2e-2, 2e-2
WORLD_SIZES = (1, 2, 3)
SETTINGS = [(1, False), (1, True), (2, True), (4, False), (4, True)]
SOME_SETTINGS = {
    1: [(2, True)],
    2: [(1, False), (4, True)],
    3: [(2, True)],
}
"""Micro-batches and lookahead, by number of ranks; on 2 ranks some jobs run with all of them."""
PLAIN_DRIVERS = {1: ("_plain",), 2: ("_plain", "_sparse_dist"), 3: ("_sparse_dist",)}
UNEVEN = (16, 9, 1)
"""None without samples: stock cannot look up sequences for a rank that has none."""

BASE = SequenceJob(placement={"*": 2})
SGD = {"optimizer": "sgd", "optimizer_kwargs": {"lr": 0.2}}
JOBS: dict[str, SequenceJob] = {
    "no_hot": dataclasses.replace(BASE, placement={"*": 0}),
    "sequences_first": dataclasses.replace(
        BASE, features=("history", "target", "shops", "tags", "genres", "user", "more_tags")
    ),
    "some_hot": dataclasses.replace(BASE, batch_sizes=UNEVEN),
    "all_hot": dataclasses.replace(BASE, placement={"item": 40, "shop": 3, "*": 5}, **SGD),
    "indices": dataclasses.replace(BASE, need_indices=True, batch_sizes=UNEVEN),
    "weights": dataclasses.replace(BASE, weighted=True, **SGD),
    "in_waves": dataclasses.replace(BASE, waves={"shop": 1, "tag": 2}),
    "bags": dataclasses.replace(
        BASE,
        placement={"user": "bags", "genre": "bags", "*": 2},
        features=("user", "tags", "more_tags", "target", "genres", "history", "shops"),
        num_steps=6,
    ),
    "all_bags": dataclasses.replace(
        BASE,
        placement={"item": 1, "shop": 0, "*": "bags"},
        weighted=True,
        batch_sizes=UNEVEN,
        num_steps=6,
        **SGD,
    ),
    "half_stock": dataclasses.replace(
        BASE, placement={"item": 2, "shop": "table_wise", "user": "table_wise", "*": 1}
    ),
}
"""Each is compared with stock table-wise under TrainPipelineSparseDist. In two of them a module's
features come first and in the order of its tables, which TorchRec does not reorder."""
NO_SAMPLES = dataclasses.replace(BASE, batch_sizes=(16, 0), **SGD)
"""Compared with an unsharded model."""


def _plain(model: DistributedModelParallel, batches: list[Batch]) -> list[Tensor]:
    return plain_steps(model, batches, dense_of(model))


def _sparse_dist(model: DistributedModelParallel, batches: list[Batch]) -> list[Tensor]:
    pipeline = TrainPipelineSparseDist(model, dense_of(model), CPU)
    return run_to_the_end(pipeline, iter(batches))


def _interleaved(k: int, lookahead: bool) -> Driver:
    def drive(model: DistributedModelParallel, batches: list[Batch]) -> list[Tensor]:
        pipeline = InterleavedTrainPipeline(
            model,
            dense_of(model),
            CPU,
            num_micro_batches=k,
            lookahead=lookahead,
            loss_reduction="sum",
        )
        outputs = run_to_the_end(pipeline, iter(batches))
        lines = pipeline.summary().splitlines()
        interleaved = {line.split(" in ")[0] for line in lines}
        assert interleaved >= {f"{path}: interleaved" for path in TABLES_OF}
        return outputs

    return drive


JOBS_OF = {1: tuple(JOBS), 2: tuple(JOBS), 3: ("no_hot", "some_hot", "bags", "all_bags")}
"""By number of ranks."""


def _settings(world_size: int, name: str) -> list[tuple[int, bool, bool]]:
    has_all = world_size == 2 and name in ("some_hot", "bags")
    return SETTINGS if has_all else SOME_SETTINGS[world_size]


def _run(rank: int, world_size: int) -> dict[Any, Result]:
    results: dict[Any, Result] = {}
    for name in JOBS_OF[world_size]:
        job = JOBS[name]
        stock = dataclasses.replace(job, placement={"*": "table_wise"})
        model = build_sequences(stock, world_size)
        results[name, "stock"] = train_sequences(model, stock, rank, _sparse_dist)
        for driver in PLAIN_DRIVERS[world_size]:
            model = build_sequences(job, world_size)
            results[name, driver] = train_sequences(model, job, rank, globals()[driver])
        for setting in _settings(world_size, name):
            model = build_sequences(job, world_size)
            results[name, setting] = train_sequences(model, job, rank, _interleaved(*setting))
    return results


@cache
def _once(world_size: int) -> list[dict[Any, Result]] | RankError:
    try:
        return run_ranks(_run, world_size, timeout_s=200)
    except RankError as error:  # remembered: the tests that share the run must not repeat it
        return error


def _cases() -> list[tuple[int, str, Any]]:
    return [
        (world_size, name, driver)
        for world_size in WORLD_SIZES
        for name in JOBS_OF[world_size]
        for driver in (*PLAIN_DRIVERS[world_size], *_settings(world_size, name))
    ]


@pytest.mark.parametrize(("world_size", "name", "driver"), _cases())
def test_sequences_train_as_stock(world_size: int, name: str, driver: Any) -> None:
    by_rank = _once(world_size)
    if isinstance(by_rank, RankError):
        raise by_rank
    ours = [of_rank[name, driver] for of_rank in by_rank]
    stock = [of_rank[name, "stock"] for of_rank in by_rank]
    for mine, its in zip(ours, stock, strict=True):
        assert len(its.losses) == JOBS[name].num_steps
        assert mine.losses == pytest.approx(its.losses, rel=RTOL, abs=ATOL)
        torch.testing.assert_close(mine.dense, its.dense, rtol=RTOL, atol=ATOL)
        assert bool(mine.replicas) == (name != "no_hot")
        for replica, first in zip(mine.replicas, ours[0].replicas):
            torch.testing.assert_close(replica, first, rtol=0, atol=0)
    for kind in ("weights", "states"):
        actual, expected = whole(ours, kind), whole(stock, kind)
        assert actual.keys() == expected.keys()
        torch.testing.assert_close(actual, expected, rtol=RTOL, atol=ATOL)


def _without_samples(rank: int, world_size: int) -> dict[Any, Result]:
    return {
        setting: train_sequences(
            build_sequences(NO_SAMPLES, world_size), NO_SAMPLES, rank, _interleaved(*setting)
        )
        for setting in SETTINGS
    } | {
        "plain": train_sequences(build_sequences(NO_SAMPLES, world_size), NO_SAMPLES, rank, _plain)
    }


def test_a_rank_without_samples_trains_along() -> None:
    """Stock raises for it; an unsharded model, with the mean of the ranks' gradients, does not."""
    model = SequenceModel(NO_SAMPLES)
    tables = [p for name, p in model.named_parameters() if "over" not in name]
    lr = NO_SAMPLES.optimizer_kwargs["lr"]
    optimizer = torch.optim.SGD(
        [{"params": tables, "lr": lr}, {"params": model.over.parameters()}], 0.05
    )
    losses = []
    for step in range(NO_SAMPLES.num_steps):
        loss, _ = model(make_sequence_batch(NO_SAMPLES, 0, step))
        losses.append(loss.item())
        optimizer.zero_grad()
        (loss / 2).backward()
        optimizer.step()
    by_rank = run_ranks(_without_samples, 2, timeout_s=100)
    for driver in ("plain", *SETTINGS):
        ours = [of_rank[driver] for of_rank in by_rank]
        assert ours[0].losses == pytest.approx(losses, rel=RTOL, abs=ATOL)
        for name, weights in whole(ours, "weights").items():
            expected = model.get_parameter(name).detach()
            torch.testing.assert_close(weights, expected, rtol=RTOL, atol=ATOL)


def _on_the_wire(rank: int, world_size: int, wire: str | None) -> Result:
    job = dataclasses.replace(BASE, wire=wire, **SGD)
    return train_sequences(build_sequences(job, world_size), job, rank, _interleaved(2, True))


@pytest.mark.parametrize("wire", ["fp16", "bf16"])
def test_rows_and_gradients_may_be_rounded_on_the_wire(wire: str) -> None:
    rounded = whole(run_ranks(_on_the_wire, 2, wire, timeout_s=100), "weights")
    exact = whole(run_ranks(_on_the_wire, 2, None, timeout_s=100), "weights")
    torch.testing.assert_close(rounded, exact, rtol=WIRE_RTOL, atol=WIRE_ATOL)
    assert any(not torch.equal(rounded[name], exact[name]) for name in exact)


def _plan(rank: int, world_size: int) -> tuple[dict[str, str], list[float]]:
    job = dataclasses.replace(BASE, placement={"*": 0})
    model = SequenceModel(job)
    batches = [make_sequence_batch(job, rank, step) for step in range(job.num_steps)]
    sharders = [HotColdEmbeddingCollectionSharder(), HotColdEmbeddingBagCollectionSharder()]
    for module in (model.ec, model.ebc):
        apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.2})
    stats = FrequencyStats.collect((batch.sparse_features for batch in batches), model)
    planner = hot_cold_planner(
        Topology(world_size=world_size, compute_device="cpu"), stats, hot_rows=9, batch_size=6
    )
    plan = planner.collective_plan(model, sharders, dist.group.WORLD)
    placed = {
        table: type(sharding.cache_params).__name__
        for module in plan.plan.values()
        for table, sharding in module.items()
    }
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    sharded = DistributedModelParallel(model, env=env, device=CPU, plan=plan, sharders=sharders)
    pipeline = InterleavedTrainPipeline(sharded, dense_of(sharded), CPU, loss_reduction="sum")
    outputs = run_to_the_end(pipeline, iter(batches))
    return placed, [float(output.sum()) for output in outputs]


def test_the_planner_places_sequences_beside_bags() -> None:
    by_rank = run_ranks(_plan, 2, timeout_s=100)
    for placed, outputs in by_rank:
        names = [name for tables in TABLES_OF.values() for name in tables]
        assert placed == dict.fromkeys(names, "HotColdParams")
        assert len(outputs) == BASE.num_steps


def _bad_input(rank: int, world_size: int) -> str:
    batch = make_sequence_batch(BASE, rank, 0)
    kjt = batch.sparse_features
    if rank == 1:
        first_of_history = kjt.offsets()[FEATURES.index("history") * BASE.batch_size(rank)]
        kjt.values()[first_of_history] = 40
    model = build_sequences(BASE, world_size)
    pipeline = InterleavedTrainPipeline(model, dense_of(model), CPU, loss_reduction="sum")
    try:
        pipeline.progress(iter([batch]))
    except InputError as error:
        return str(error)
    return "trained"


def test_a_bad_id_in_a_sequence_stops_all_ranks_by_name() -> None:
    other, at_fault = run_ranks(_bad_input, 2, timeout_s=60)
    assert other.startswith("rank 1 holds 1 ids outside their tables")
    assert at_fault.startswith("feature 'history' looks up row 40 of table 'item', whose rows")
