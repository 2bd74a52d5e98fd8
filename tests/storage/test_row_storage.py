"""Homes and replicas of one pack: one update per row, and whose writes are noted.

In one table and in two.
"""

import copy
import dataclasses
import io
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.sharding.jobs import OPTIMIZERS, Job, Table, build
from tests.support.shared_run import run_once
from torchrec_picasso.errors import PicassoError
from torchrec_picasso.storage.row_storage import HotHomes, RowStorage, TouchedHot
from torchrec_picasso.storage.row_uses import RowUses
from torchrec_picasso.storage.torchrec_kernel import HotColdKernel

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
    return _kernel(job).rows


def _kernel(job: Job = JOB) -> HotColdKernel:
    (lookup,) = build(job, 0, 1).module.ebc._lookups
    (kernel,) = lookup._emb_modules
    storage = kernel.rows
    assert storage.tables.layout.in_two_tables == job.two_tables
    storage.fill_replicas()
    return kernel


def _touched(storage: RowStorage, slots_t: np.ndarray) -> TouchedHot:
    ((_, touched),) = HotHomes.find_own([storage.hot_homes], [slots_t], [slots_t])
    return touched


def _all_rows(storage: RowStorage) -> Tensor:
    """A copy of the homes' weights, then the replicas'."""
    return torch.cat([storage._homes, storage._replicas])


def one_update_per_row(two_tables: bool) -> None:
    """Two steps, beside the same two steps of PyTorch's optimizer."""
    for name, settings in UPDATES.items():
        job = dataclasses.replace(
            JOB, optimizer=name, optimizer_kwargs=settings, two_tables=two_tables
        )
        storage = _storage(job)
        before = _all_rows(storage)
        by_row = [nn.Parameter(row_1D.clone()) for row_1D in before.split(1)]
        reference = OPTIMIZERS[name](by_row, **settings)
        torch.manual_seed(0)
        for _ in range(2):
            grads_mD = torch.randn(5, 4)
            # row 1 comes twice, as from two ranks; slot 2 is a replica; nothing else may move
            rows_n = torch.tensor([1, 7, 1, 8], dtype=torch.int32)
            storage.update(rows_n, _touched(storage, np.array([2])), grads_mD.clone())
            summed = {1: grads_mD[0] + grads_mD[2], 7: grads_mD[1], 8: grads_mD[3]}
            home_of_2 = int(storage.hot_homes.own_row_H[2])
            for row in (NUM_HOME + 2, home_of_2):
                summed[row] = grads_mD[4]
            for row, grad_D in summed.items():
                by_row[row].grad = grad_D.unsqueeze(0)
            reference.step()
        after = _all_rows(storage)
        torch.testing.assert_close(after, torch.cat(by_row).detach())
        moved = (after != before).any(1).nonzero().flatten().tolist()
        assert moved == [1, 6, 7, 8, NUM_HOME + 2]


def life_of_a_replica(two_tables: bool) -> None:
    kernel = _kernel(dataclasses.replace(JOB, two_tables=two_tables))
    storage = kernel.rows
    own = storage.hot_homes.own_row_H
    homes, replicas = storage._homes, storage._replicas
    assert (homes.shape, replicas.shape) == ((NUM_HOME, 4), (NUM_HOT, 4))
    assert torch.equal(homes[own], replicas)
    assert not storage.was_written()

    every_slot, no_row = (
        _touched(storage, np.arange(NUM_HOT)),
        torch.empty(0, dtype=torch.int64),
    )
    before = homes[own].clone()
    storage.update(no_row, every_slot, torch.ones(4, 4))
    assert not torch.equal(before, replicas)
    (state,) = storage.tables.row_states.values()
    assert state.replicas.shape == (NUM_HOT, 4)
    assert state.replicas.all()
    for rows in storage.tables.per_row():
        assert torch.equal(rows.homes[own], rows.replicas), "homes are never behind"
    assert not storage.was_written(), "an update is no write from outside"

    with torch.no_grad():
        kernel.split_embedding_weights()[0].fill_(3.0)
    with pytest.raises(PicassoError, match="'a', 'b' was written between a forward and the update"):
        storage.update(no_row, every_slot, torch.ones(4, 4))
    assert (homes[:6] == 3.0).all()
    assert storage.was_written()
    storage.fill_replicas()
    assert not storage.was_written()
    assert torch.equal(homes[own], replicas)

    state_a, _ = kernel.fused_optimizer.state.values()
    (sum_a,) = state_a.values()
    sum_a.local_shards()[0].tensor.fill_(2.0)
    assert storage.was_written(), "somebody wrote into a home's optimizer state"
    storage.fill_replicas()
    assert (state.homes[:6] == 2.0).all()
    assert torch.equal(state.homes[own], state.replicas)

    hot_hD = torch.empty(2, 4)
    storage.gather_hot(torch.tensor([3, 0]), hot_hD)
    assert torch.equal(hot_hD, replicas[[3, 0]])
    assert torch.equal(storage.gather(torch.tensor([5, 5, 0])), homes[[5, 5, 0]])


def cold_rows_are_updated_though_they_were_written(two_tables: bool) -> None:
    """Where no row is hot an update goes on, and makes no write unseen."""
    kernel = _kernel(dataclasses.replace(JOB, placement={"*": 0}))
    storage = kernel.rows
    nothing = _touched(storage, np.arange(0))
    storage.update(torch.tensor([1]), nothing, torch.ones(1, 4))
    assert not storage.was_written()
    with torch.no_grad():
        kernel.split_embedding_weights()[0].fill_(3.0)
    storage.update(torch.tensor([1]), nothing, torch.ones(1, 4))
    assert storage.was_written()


VIEWS: Mapping[str, Callable[[HotColdKernel], Tensor]] = {
    "slice": lambda kernel: dict(kernel.named_parameters_by_table())["b"],
    "parameter": lambda kernel: dict(kernel.named_parameters())["b.weight"],
    "state dict": lambda kernel: kernel.state_dict()["b.weight"].local_shards()[0].tensor,
}


def a_write_through_data_shows(two_tables: bool) -> None:
    """``.data`` of whatever is handed out, taken before or kept, counts as the rows themselves."""
    kernel = _kernel(dataclasses.replace(JOB, two_tables=two_tables))
    storage = kernel.rows
    for name, view in VIEWS.items():
        rows_RD = view(kernel)
        kept = rows_RD.data
        assert (kept.shape, kept.requires_grad) == ((3, 4), False), name
        assert not storage.was_written(), f"{name}: nobody wrote"
        for write in (kept, kept[1:], rows_RD.data, rows_RD):
            with torch.no_grad():
                write.mul_(2.0)
            assert storage.was_written(), name
            storage.fill_replicas()
        rows_RD.data = rows_RD.data  # as nn.Module.to does
        assert not storage.was_written(), name
        rows_RD.data.add_(1.0)
        assert storage.was_written(), name
        storage.fill_replicas()
    shard = VIEWS["state dict"](kernel)
    buffer = io.BytesIO()
    torch.save(shard, buffer)
    buffer.seek(0)
    for copied in (copy.deepcopy(shard), shard + 0, torch.load(buffer, weights_only=True)):
        assert type(copied) is Tensor, "what is made of it is plain torch's"
        assert torch.equal(copied, storage._homes[6:])


def a_table_is_seen_without_its_replicas(two_tables: bool) -> None:
    """TorchRec's views of a table reach its home rows, and those of no other."""
    kernel = _kernel(dataclasses.replace(JOB, two_tables=two_tables))
    storage = kernel.rows
    with torch.no_grad():
        for value, (name, weight) in enumerate(kernel.named_parameters_by_table(), start=1):
            weight.fill_(value)
            (view,) = [p for n, p in kernel.named_parameters() if n == f"{name}.weight"]
            assert (view == value).all()
    assert storage._homes.mean(1).tolist() == [1.0] * 6 + [2.0] * 3
    assert not (storage._replicas % 1 == 0).any()
    (states_a, states_b) = kernel.fused_optimizer.state.values()
    shapes = [next(iter(s.values())).local_shards()[0].tensor.shape for s in (states_a, states_b)]
    assert shapes == [(6, 4), (3, 4)]


def a_step_without_rows_counts(two_tables: bool) -> None:
    """Steps by the TBE's own count after each update; the second has no row at all."""
    storage = _storage(dataclasses.replace(JOB, optimizer="rowwise_adagrad", two_tables=two_tables))
    counts, none = [], torch.empty(0, dtype=torch.int64)
    for rows_n, slots_h in ((torch.tensor([1]), none), (none, none), (none, torch.tensor([2]))):
        before = _all_rows(storage)
        num_rows = len(rows_n) + len(slots_h)
        storage.update(rows_n, _touched(storage, slots_h.numpy()), torch.ones(num_rows, 4))
        num_moved = num_rows + len(slots_h)  # a hot row moves at home too
        assert int((_all_rows(storage) != before).any(1).sum()) == num_moved
        counts.append(int(storage.tables.tbe.iter))
    assert counts == [1, 2, 3]


CHECKS = (
    one_update_per_row,
    life_of_a_replica,
    cold_rows_are_updated_though_they_were_written,
    a_write_through_data_shows,
    a_table_is_seen_without_its_replicas,
    a_step_without_rows_counts,
)


def _run(rank: int, world_size: int) -> dict[tuple[str, bool], str]:
    """Every check in both layouts, and how it failed."""
    found = {}
    for check in CHECKS:
        for two_tables in (False, True):
            try:
                check(two_tables)
            except Exception:
                found[check.__name__, two_tables] = traceback.format_exc()
    return found


@pytest.mark.parametrize("two_tables", [False, True], ids=["one_table", "two_tables"])
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_rows(check: Callable[[bool], None], two_tables: bool) -> None:
    (failures,) = run_once(_run, 1)
    assert (check.__name__, two_tables) not in failures, failures[check.__name__, two_tables]


def test_a_use_counts_half_a_half_life_later() -> None:
    uses = RowUses(4, 2, torch.device("cpu"))
    for _ in range(3):
        uses.count(torch.tensor([0, 2, 0]), torch.tensor([1]))
        uses.decay(0.5)
    assert (uses.num_cold, uses.num_hot) == (9, 3)
    for _ in range(2):  # settled once or twice, they are the same
        uses.rescale()
        assert uses.homes_n.tolist() == pytest.approx([1.75, 0, 0.875, 0])
        assert uses.replicas_H.tolist() == pytest.approx([0, 0.875])
    uses.count(torch.tensor([3], dtype=torch.int32), torch.tensor([], dtype=torch.int64))
    uses.decay(0.5)
    uses.rescale()
    assert uses.homes_n.tolist() == pytest.approx([0.875, 0, 0.4375, 0.5])
    uses.begin_window()
    assert (uses.num_cold, uses.num_hot) == (0, 0)


def test_counts_stay_finite_however_seldom_they_are_settled() -> None:
    uses = RowUses(2, 0, torch.device("cpu"))
    nothing = torch.tensor([], dtype=torch.int64)
    for _ in range(300):  # 2^300 is beyond float32
        uses.count(torch.tensor([1]), nothing)
        uses.decay(0.5)
    uses.rescale()
    assert uses.homes_n.tolist() == pytest.approx([0, 1.0])
