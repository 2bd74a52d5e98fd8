"""Homes and replicas of one pack: one update per row, and when replicas count as stale."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tests.sharding.jobs import OPTIMIZERS, Job, Table, build
from torchrec_picasso.storage.row_storage import RowStorage
from torchrec_picasso.workloads.launch import run_ranks

JOB = Job(
    placement={"*": 2},
    tables=(Table("a", 4, 6, ("f0",)), Table("b", 4, 3, ("f1",))),
    optimizer="adagrad",
    optimizer_kwargs={"lr": 0.5, "eps": 1e-8},
)
NUM_HOME, NUM_HOT = 9, 4


UPDATES: Mapping[str, Mapping[str, Any]] = {
    "sgd": {"lr": 0.5},
    "adagrad": {"lr": 0.5, "eps": 1e-8},
    "rowwise_adagrad": {"lr": 0.5, "eps": 1e-8},
}


def _storage(job: Job = JOB) -> RowStorage:
    (lookup,) = build(job, 0, 1).module.ebc._lookups
    (storage,) = lookup._storages
    storage.fill_replicas()
    return storage


def _update(rank: int, world_size: int) -> dict[str, list[Tensor]]:
    """Rows before, after two steps, and after the same two steps of PyTorch's optimizer."""
    results = {}
    for name, settings in UPDATES.items():
        storage = _storage(dataclasses.replace(JOB, optimizer=name, optimizer_kwargs=settings))
        before = storage._rows.clone()
        by_row = [nn.Parameter(row_1D.clone()) for row_1D in before.split(1)]
        reference = OPTIMIZERS[name](by_row, **settings)
        torch.manual_seed(0)
        for _ in range(2):
            grads_mD = torch.randn(5, 4)
            # row 1 comes twice, as from two ranks; slot 2 is a replica; nothing else may move
            rows_n = torch.tensor([1, 7, 1, 8], dtype=torch.int32)
            storage.update(rows_n, torch.tensor([2]), grads_mD)
            summed = {1: grads_mD[0] + grads_mD[2], 7: grads_mD[1], 8: grads_mD[3]}
            for row, grad_D in {**summed, NUM_HOME + 2: grads_mD[4]}.items():
                by_row[row].grad = grad_D.unsqueeze(0)
            reference.step()
        results[name] = [before, storage._rows.clone(), torch.cat(by_row).detach()]
    return results


def _life_of_a_replica(rank: int, world_size: int) -> None:
    storage = _storage()
    own = storage._hot_homes.own_rows_h
    rows = storage._rows
    assert rows.shape == (NUM_HOME + NUM_HOT, 4)
    assert torch.equal(rows[own], rows[NUM_HOME:])
    assert not storage.replicas_stale()

    storage.update(torch.empty(0, dtype=torch.int64), torch.arange(NUM_HOT), torch.ones(4, 4))
    assert not torch.equal(rows[own], rows[NUM_HOME:]), "an update leaves the homes behind"
    assert not storage.replicas_stale(), "an update is no write from outside"
    _ = storage.fused_optimizer.state  # reading brings rows and state home
    assert torch.equal(rows[own], rows[NUM_HOME:])
    (state,) = storage._row_states()
    assert torch.equal(state[own], state[NUM_HOME:])
    assert not storage.replicas_stale()

    with torch.no_grad():
        storage.split_embedding_weights()[0].fill_(3.0)
    assert storage.replicas_stale(), "somebody wrote into a home"
    storage.flush()
    assert (rows[:6] == 3.0).all(), "stale replicas never overwrite what was written"
    storage.fill_replicas()
    assert not storage.replicas_stale()
    assert torch.equal(rows[own], rows[NUM_HOME:])

    storage.update(torch.empty(0, dtype=torch.int64), torch.arange(NUM_HOT), torch.ones(4, 4))
    storage.purge()
    assert torch.equal(rows[own], rows[NUM_HOME:]), "a purge brings home what replicas know"
    assert storage.replicas_stale()

    hot_hD = torch.empty(2, 4)
    storage.gather_hot(torch.tensor([3, 0]), hot_hD)
    assert torch.equal(hot_hD, rows[NUM_HOME:][[3, 0]])
    assert torch.equal(storage.gather(torch.tensor([5, 5, 0])), rows[[5, 5, 0]])


def test_one_update_per_row() -> None:
    (results,) = run_ranks(_update, 1, timeout_s=60)
    assert results.keys() == UPDATES.keys()
    for before, after, expected in results.values():
        torch.testing.assert_close(after, expected)
        moved = (after != before).any(1).nonzero().flatten().tolist()
        assert moved == [1, 7, 8, NUM_HOME + 2]


def test_life_of_a_replica() -> None:
    assert run_ranks(_life_of_a_replica, 1, timeout_s=60) == [None]
