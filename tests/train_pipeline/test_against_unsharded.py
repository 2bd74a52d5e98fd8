"""Both drivers against one unsharded model on the concatenated batch: losses, weights, state.

The reference knows no TorchRec sharding and no ranks: TorchRec's EmbeddingBagCollection in one
process, PyTorch's optimizers (of those that stock TorchRec cannot run on the CPU, FBGEMM's formulas
over whole tables), one batch made of all ranks' batches. Data parallel training takes
the mean of the ranks' losses, so the reference's loss is their sum over the number of ranks.

Tolerance: the same float32 sums in another order, eight steps. FBGEMM adds its epsilon to the root
of the state as PyTorch does, so nothing else differs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
import torchrec
from torch import Tensor
from torchrec import KeyedJaggedTensor
from torchrec.datasets.utils import Batch

from tests.sharding.jobs import (
    ATOL,
    RTOL,
    Job,
    Model,
    Result,
    Table,
    build,
    make_batch,
    result_of,
    whole,
)
from tests.support.dense_updates import OPTIMIZERS as DENSE
from tests.support.dense_updates import DenseUpdate
from tests.support.shared_run import run_once
from tests.train_pipeline.drivers import DRIVERS_OF, Driver, make_driver
from tests.train_pipeline.runs import batches_of, losses_of, run_to_the_end

NUM_STEPS = 5
EPS = 1e-2  # with 1e-8 a gradient that cancels to nearly zero would move by its rounding's share
WORLD_SIZES = (2, 3)

TABLES = (
    Table("a", 8, 50, ("f0",)),
    Table("b", 16, 4, ("f1", "f2"), mean=True),
    Table("c", 16, 20, ("f0", "f3")),
)
BASE = Job(
    placement={"*": 2},
    tables=TABLES,
    optimizer="adagrad",
    optimizer_kwargs={"lr": 0.1, "eps": EPS},
    num_steps=NUM_STEPS,
)
JOBS = {
    "sgd": replace(BASE, optimizer="sgd", optimizer_kwargs={"lr": 0.5}, batch_sizes=(16, 9, 0)),
    "adagrad": BASE,
    "rowwise_adagrad": replace(BASE, optimizer="rowwise_adagrad", batch_sizes=(5, 8)),
    "weighted": replace(
        BASE, tables=tuple(replace(table, mean=False) for table in TABLES), weighted=True
    ),
    "adam": replace(
        BASE,
        optimizer="adam",
        optimizer_kwargs={"lr": 0.1, "eps": EPS, "beta1": 0.8, "weight_decay": 0.1},
        batch_sizes=(16, 9, 0),
    ),
    "partial_rowwise_lamb": replace(
        BASE,
        placement={"a": 2, "b": "bags", "c": 0},
        optimizer="partial_rowwise_lamb",
        optimizer_kwargs={"lr": 0.05, "eps": EPS, "beta2": 0.9},
        batch_sizes=(5, 8),
    ),
}
STATE_OF = {"adagrad": "sum", "rowwise_adagrad": "sum"}
"""What PyTorch and TorchRec call the state that FBGEMM calls ``momentum1``."""


class _Dense(torch.optim.Optimizer):
    """FBGEMM's formulas over whole tables; rows that no batch looked up are left as they were."""

    def __init__(self, tables: list[Tensor], job: Job) -> None:
        super().__init__(tables, {})
        self.updates = [DenseUpdate(name=job.optimizer, **job.optimizer_kwargs) for _ in tables]
        self.tables, self.job = tables, job

    def look_up(self, features: KeyedJaggedTensor) -> None:
        self.rows = [
            torch.cat([features[f].values() for f in table.features]) for table in self.job.tables
        ]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for weight, update, rows in zip(self.tables, self.updates, self.rows):
            is_touched = torch.bincount(rows, minlength=len(weight)) > 0
            assert weight.grad is not None
            update.step(weight, weight.grad, is_touched)
            self.state[weight] = {"momentum1": update.exp_avg, "exp_avg_sq": update.exp_avg_sq}


def concatenated(batches: list[Batch]) -> Batch:
    """The samples of all ranks as one batch."""
    features = [batch.sparse_features for batch in batches]
    keys = features[0].keys()
    by_key = [[kjt[key] for kjt in features] for key in keys]
    weighted = features[0].weights_or_none() is not None
    return Batch(
        dense_features=torch.cat([batch.dense_features for batch in batches]),
        sparse_features=KeyedJaggedTensor(
            keys=keys,
            values=torch.cat([part.values() for parts in by_key for part in parts]),
            lengths=torch.cat([part.lengths() for parts in by_key for part in parts]),
            weights=torch.cat([part.weights() for parts in by_key for part in parts])
            if weighted
            else None,
        ),
        labels=torch.cat([batch.labels for batch in batches]),
    )


@dataclass
class Reference:
    """What the unsharded training leaves behind."""

    losses: list[float]
    """Summed over the global batch."""
    weights: dict[str, Tensor]
    states: dict[str, Tensor]
    dense: dict[str, Tensor]


@cache
def _reference(name: str, num_ranks: int) -> Reference:
    """In this process."""
    job = JOBS[name]
    model = Model(job)
    bags = model.ebc.embedding_bags
    lr, eps = job.optimizer_kwargs["lr"], job.optimizer_kwargs.get("eps", 0.0)
    tables = [bags[table.name].weight for table in job.tables]
    optimizer: torch.optim.Optimizer
    if job.optimizer in DENSE:
        optimizer = _Dense(tables, job)
    elif job.optimizer == "sgd":
        optimizer = torch.optim.SGD(tables, lr=lr)
    elif job.optimizer == "adagrad":
        optimizer = torch.optim.Adagrad(tables, lr=lr, eps=eps)
    else:
        optimizer = torchrec.optim.RowWiseAdagrad(tables, lr=lr, eps=eps)
    dense = torch.optim.SGD(model.over.parameters(), lr=0.05)
    losses = []
    for step in range(job.num_steps):
        batch = concatenated([make_batch(job, peer, step) for peer in range(num_ranks)])
        optimizer.zero_grad()
        dense.zero_grad()
        if isinstance(optimizer, _Dense):
            optimizer.look_up(batch.sparse_features)
        loss, _ = model(batch)
        (loss / num_ranks).backward()
        optimizer.step()
        dense.step()
        losses.append(loss.item())
    names = [f"ebc.embedding_bags.{table.name}.weight" for table in job.tables]
    keys = {"momentum1": STATE_OF.get(job.optimizer)}
    if job.optimizer in DENSE:
        keys = {key: key for key in ("momentum1", "exp_avg_sq")}
    return Reference(
        losses=losses,
        weights={name: weight.detach() for name, weight in zip(names, tables)},
        states={
            f"{name}/{name.split('.')[-2]}.{key}": optimizer.state[weight][its].detach()
            for name, weight in zip(names, tables)
            for key, its in keys.items()
            if its is not None
        },
        dense={f"over.{name}": value.detach() for name, value in model.over.named_parameters()},
    )


def _sharded(rank: int, world_size: int) -> dict[Any, Result]:
    found = {}
    for name, job in JOBS.items():
        for driver in DRIVERS_OF[world_size]:
            model = build(job, rank, world_size)
            batches = batches_of(job, rank, range(job.num_steps))
            outputs = run_to_the_end(make_driver(driver, model), iter(batches))
            found[name, driver] = result_of(model, losses_of(outputs, batches))
    return found


@pytest.mark.parametrize("name", list(JOBS))
@pytest.mark.parametrize(
    ("world_size", "driver"),
    [(world_size, driver) for world_size in WORLD_SIZES for driver in DRIVERS_OF[world_size]],
    ids=str,
)
def test_trains_as_one_process(world_size: int, name: str, driver: Driver) -> None:
    expected = _reference(name, world_size)
    ours = [by_case[name, driver] for by_case in run_once(_sharded, world_size)]
    losses = torch.tensor([result.losses for result in ours]).sum(0)
    torch.testing.assert_close(losses, torch.tensor(expected.losses), rtol=RTOL, atol=ATOL)
    torch.testing.assert_close(whole(ours, "weights"), expected.weights, rtol=RTOL, atol=ATOL)
    states = {key: value.squeeze() for key, value in whole(ours, "states").items()}
    wanted = {key: value.squeeze() for key, value in expected.states.items()}
    if wanted:
        torch.testing.assert_close(states, wanted, rtol=RTOL, atol=ATOL)
    for result in ours:
        torch.testing.assert_close(result.dense, expected.dense, rtol=RTOL, atol=ATOL)


@pytest.mark.parametrize("name", list(JOBS))
def test_every_step_moves_every_table(name: str) -> None:
    """Guards the comparison: what does not move would equal anything that does not move."""
    trained = _reference(name, 2)
    start = Model(JOBS[name]).state_dict()
    for key, weight in trained.weights.items():
        assert (weight - start[key]).abs().max() > 100 * ATOL, key
    assert bool(trained.states) == (JOBS[name].optimizer != "sgd")
