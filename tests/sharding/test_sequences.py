"""Sequence tables against stock TorchRec: losses, weights, optimizer state; ranks 1, 2 and 3.

An EmbeddingCollection and two EmbeddingBagCollections in one model, by the plain loop and by the
interleaved pipeline in 1, 2 and 4 micro-batches, looking ahead or not. Tolerances are those of
``test_against_stock``: float32 sums in another order, nothing else.
"""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor
from torchrec.datasets.utils import Batch
from torchrec.distributed import DistributedModelParallel

from tests.sharding.jobs import ATOL, RTOL, Result, assert_same_results, make_batch, whole
from tests.sharding.sequence_jobs import (
    FEATURES,
    TABLES_OF,
    Driver,
    SequenceJob,
    SequenceModel,
    build_sequences,
    train_sequences,
)
from tests.support.shared_run import run_once
from tests.train_pipeline.runs import make_driver, pipeline_of, plain_steps, run_to_the_end
from torchrec_picasso.errors import InputError

WIRE_RTOL, WIRE_ATOL = 2e-2, 2e-2
SETTINGS = [(1, False), (1, True), (2, True), (4, False), (4, True)]
"""Micro-batches and lookahead."""
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
    "in_waves": dataclasses.replace(BASE, waves={"shop": 1, "tag": 7}),
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


def _sparse_dist(model: DistributedModelParallel, batches: list[Batch]) -> list[Tensor]:
    return run_to_the_end(make_driver(None, model), iter(batches))


def _interleaved(k: int, lookahead: bool) -> Driver:
    def drive(model: DistributedModelParallel, batches: list[Batch]) -> list[Tensor]:
        pipeline = pipeline_of(model, num_micro_batches=k, lookahead=lookahead)
        outputs = run_to_the_end(pipeline, iter(batches))
        interleaved = {line.split(" in ")[0] for line in pipeline.summary().splitlines()}
        assert interleaved >= {f"{path}: interleaved" for path in TABLES_OF}
        return outputs

    return drive


DRIVERS: dict[str, Driver] = {
    "plain": plain_steps,
    "SparseDist": _sparse_dist,
    **{f"K={k}, {ahead=}": _interleaved(k, ahead) for k, ahead in SETTINGS},
}
EXTREMES = ("SparseDist", "K=1, ahead=False", "K=4, ahead=True")
DRIVERS_OF = {
    1: dict.fromkeys(("some_hot", "all_hot", "bags"), ("plain", "K=2, ahead=True")),
    2: {
        **dict.fromkeys(JOBS, EXTREMES),
        "weights": ("plain", *EXTREMES),
        **dict.fromkeys(("some_hot", "bags"), tuple(DRIVERS)),
    },
    3: dict.fromkeys(("no_hot", "some_hot", "bags", "all_bags"), ("SparseDist", "K=2, ahead=True")),
}
"""By number of ranks and job."""
CASES = [
    (world_size, name, driver)
    for world_size, of_jobs in DRIVERS_OF.items()
    for name, drivers in of_jobs.items()
    for driver in drivers
]


def _train(job: SequenceJob, rank: int, world_size: int, driver: Driver) -> Result:
    return train_sequences(build_sequences(job, world_size), job, rank, driver)


def _run(rank: int, world_size: int) -> dict[Any, Result]:
    results: dict[Any, Result] = {}
    for name, drivers in DRIVERS_OF[world_size].items():
        stock = dataclasses.replace(JOBS[name], placement={"*": "table_wise"})
        results[name, "stock"] = _train(stock, rank, world_size, _sparse_dist)
        for driver in drivers:
            results[name, driver] = _train(JOBS[name], rank, world_size, DRIVERS[driver])
    return results


@pytest.mark.parametrize(("world_size", "name", "driver"), CASES)
def test_sequences_train_as_stock(world_size: int, name: str, driver: str) -> None:
    ours, stock = (
        [found[name, of] for found in run_once(_run, world_size)] for of in (driver, "stock")
    )
    assert len(stock[0].losses) == JOBS[name].num_steps
    assert bool(ours[0].replicas) == (name != "no_hot")
    assert_same_results(ours, stock)


def _beside(rank: int, world_size: int) -> dict[Any, Any]:
    """What stock cannot be a witness of: no samples, rounding on the wire, bad input."""
    found: dict[Any, Any] = {
        driver: _train(NO_SAMPLES, rank, world_size, drive) for driver, drive in DRIVERS.items()
    }
    for wire in (None, "fp16", "bf16"):
        job = dataclasses.replace(BASE, wire=wire, **SGD)
        found["wire", wire] = _train(job, rank, world_size, _interleaved(2, True))
    found["bad input"] = _bad_input(rank, world_size)
    return found


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
        loss, _ = model(make_batch(NO_SAMPLES, 0, step))
        losses.append(loss.item())
        optimizer.zero_grad()
        (loss / 2).backward()
        optimizer.step()
    by_rank = run_once(_beside, 2)
    for driver in DRIVERS:
        ours = [of_rank[driver] for of_rank in by_rank]
        assert ours[0].losses == pytest.approx(losses, rel=RTOL, abs=ATOL)
        for name, weights in whole(ours, "weights").items():
            expected = model.get_parameter(name).detach()
            torch.testing.assert_close(weights, expected, rtol=RTOL, atol=ATOL)


@pytest.mark.parametrize("wire", ["fp16", "bf16"])
def test_rows_and_gradients_may_be_rounded_on_the_wire(wire: str) -> None:
    rounded, exact = (
        whole([found["wire", of] for found in run_once(_beside, 2)], "weights")
        for of in (wire, None)
    )
    torch.testing.assert_close(rounded, exact, rtol=WIRE_RTOL, atol=WIRE_ATOL)
    assert any(not torch.equal(rounded[name], exact[name]) for name in exact)


def _bad_input(rank: int, world_size: int) -> str:
    batch = make_batch(BASE, rank, 0)
    kjt = batch.sparse_features
    if rank == 1:
        first_of_history = kjt.offsets()[FEATURES.index("history") * BASE.batch_size(rank)]
        kjt.values()[first_of_history] = 40
    pipeline = pipeline_of(build_sequences(BASE, world_size))
    try:
        pipeline.progress(iter([batch]))
    except InputError as error:
        return str(error)
    return "trained"


def test_a_bad_id_in_a_sequence_stops_all_ranks_by_name() -> None:
    other, at_fault = (found["bad input"] for found in run_once(_beside, 2))
    assert other.startswith("rank 1 holds 1 ids outside their tables")
    assert at_fault.startswith("feature 'history' looks up row 40 of table 'item', whose rows")
