"""Checkpoints are plain TorchRec's: the same keys, types and shapes, loadable both ways.

A run is cut in two by ``torch.distributed.checkpoint``; the second half is trained by another
placement. Its losses, weights and optimizer state must equal the uncut run's, within the float32
order of sums that test_exactness.py allows.
"""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor

from tests.sharding.jobs import (
    PLAIN,
    Job,
    Model,
    Result,
    assert_same_results,
    build,
    checkpoint_of,
    dense_optimizer,
    load_whole,
    make_batch,
    replicas_of,
    result_of,
    run_jobs,
    train,
)
from torchrec_picasso.app.launch.run_ranks import run_ranks

FIRST, SECOND = range(5), range(5, 10)
STOCK = Job(placement={"*": "row_wise"}, optimizer="adagrad")
OURS = Job(placement={"*": 4}, optimizer="adagrad")
OTHER_HOT = Job(placement={"a": 30, "b": 1, "c": 0}, optimizer="adagrad")
ALL_HOT = Job(placement={t.name: t.rows for t in PLAIN}, optimizer="rowwise_adagrad")
JOBS = {"stock": STOCK, "ours": OURS, "other_hot": OTHER_HOT}
PLACED = {
    **JOBS,
    "lopsided": dataclasses.replace(OURS, lopsided=True),
    "two_tables": dataclasses.replace(OURS, two_tables=True),
    "table_wise": dataclasses.replace(STOCK, placement={"*": "table_wise"}),
    "bags": dataclasses.replace(OURS, placement={"*": "bags"}),
    "rows_and_bags": dataclasses.replace(OURS, placement={"*": "bags", "a": 4}),
}


def _describe(value: Any) -> Any:
    if isinstance(value, ShardedTensor):
        shards = [
            (tuple(s.shard_offsets), tuple(s.shard_sizes)) for s in value.metadata().shards_metadata
        ]
        return type(value).__name__, tuple(value.size()), value.dtype, shards
    if isinstance(value, dict):
        return {key: _describe(inner) for key, inner in value.items()}
    if isinstance(value, Tensor):
        return type(value).__name__, tuple(value.shape), value.dtype
    return type(value).__name__


def _describe_states(rank: int, world_size: int, jobs: dict[str, Job]) -> dict[str, Any]:
    described = {}
    for name, job in jobs.items():
        model = build(job, rank, world_size)
        described[name] = (
            _describe(dict(model.state_dict())),
            _describe(model.fused_optimizer.state_dict()),
            [n for n, _ in model.named_parameters()],
            [n for n, _ in model.named_buffers()],
        )
    return described


@pytest.mark.parametrize("world_size", [2, 3])
def test_keys_types_and_shapes_are_those_of_the_stock_placement(world_size: int) -> None:
    for rank in run_ranks(_describe_states, world_size, PLACED, timeout_s=100):
        for name in ("ours", "other_hot", "two_tables"):
            assert rank[name] == rank["stock"]
        assert rank["bags"] == rank["table_wise"]


PAIRS = (
    ("ours", "stock"),
    ("stock", "ours"),
    ("ours", "other_hot"),
    ("lopsided", "stock"),
    ("stock", "lopsided"),
    ("two_tables", "stock"),
    ("stock", "two_tables"),
    ("two_tables", "other_hot"),
    ("bags", "stock"),
    ("table_wise", "bags"),
    ("rows_and_bags", "other_hot"),
)
"""Placements of the first half and of the second."""


def _cut_in_two(rank: int, world_size: int, folder: Path) -> dict[Any, Result]:
    """Trains and saves half under each placement; the other half under another that loads it.

    Either with ``load_state_dict`` or by what ``dcp.load`` writes into tensors.
    """
    losses, found = {}, {}
    for first in dict.fromkeys(first for first, _ in PAIRS):
        model = build(PLACED[first], rank, world_size)
        losses[first] = train(model, PLACED[first], rank, FIRST)
        dcp.save(checkpoint_of(model), checkpoint_id=folder / first)
    for first, second in PAIRS:
        for load_strictly in (True, False):
            job = PLACED[second]
            resumed = build(job, rank, world_size)
            # train a step first: replicas are filled and wrong, and must notice what is loaded
            train(resumed, job, rank, [99])
            state = checkpoint_of(resumed)
            dcp.load(state, checkpoint_id=folder / first)
            if load_strictly:
                resumed.load_state_dict(state["model"])
                resumed.fused_optimizer.load_state_dict(state["optim"])
            both = losses[first] + train(resumed, job, rank, SECOND)
            found[first, second, load_strictly] = result_of(resumed, both)
    return {**found, "uncut": run_jobs(rank, world_size, {"stock": STOCK})["stock"]}


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Result]]:
    return run_ranks(_cut_in_two, 2, tmp_path_factory.mktemp("halves"), timeout_s=200)


@pytest.mark.parametrize(("first", "second"), PAIRS)
@pytest.mark.parametrize("load_strictly", [True, False])
def test_training_continues_under_another_placement(
    cut: list[dict[Any, Result]], first: str, second: str, load_strictly: bool
) -> None:
    resumed, uncut = (
        [found[key] for found in cut] for key in ((first, second, load_strictly), "uncut")
    )
    assert_same_results(resumed, uncut)


def _write_in_flight(rank: int, world_size: int, job: Job) -> tuple[float, float, list[Tensor]]:
    """Writes weights while a batch's ids are already exchanged; its forward must see them."""
    model = build(job, rank, world_size)
    train(model, job, rank, range(2))
    ebc, features = model.module.ebc, make_batch(job, rank, 7).sparse_features
    ctx = ebc.create_context()
    exchanged = ebc.input_dist(ctx, features).wait().wait()
    load_whole(model, Model(job).state_dict())
    in_flight = ebc.compute_and_output_dist(ctx, exchanged).wait().values().sum().item()
    anew = build(job, rank, world_size).module.ebc
    return in_flight, anew(features).wait().values().sum().item(), replicas_of(model)


@pytest.mark.parametrize("two_tables", [False, True])
def test_weights_written_while_a_batch_is_in_flight_are_seen(two_tables: bool) -> None:
    job = dataclasses.replace(ALL_HOT, num_steps=2, two_tables=two_tables)
    ranks = run_ranks(_write_in_flight, 2, job, timeout_s=100)
    for in_flight, expected, _ in ranks:
        assert in_flight == pytest.approx(expected, rel=1e-6)
    for mine, its in zip(ranks[0][2], ranks[1][2]):
        assert torch.equal(mine, its)


def _one_rank_reads_state(rank: int, world_size: int, job: Job) -> list[float]:
    """A state dict taken on one rank only must not make the ranks disagree."""
    model = build(job, rank, world_size)
    losses = train(model, job, rank, range(3))
    if rank == 0:
        model.state_dict()
        model.fused_optimizer.state_dict()
    return losses + train(model, job, rank, range(3, 6), dense_optimizer(model))


def test_reading_state_on_one_rank_neither_hangs_nor_changes_training() -> None:
    job = dataclasses.replace(OURS, num_steps=6)
    cut = run_ranks(_one_rank_reads_state, 2, job, timeout_s=60)
    uncut = run_ranks(run_jobs, 2, {"ours": job}, timeout_s=60)
    for rank in range(2):
        assert cut[rank] == uncut[rank]["ours"].losses
