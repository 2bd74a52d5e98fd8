"""The whole path of rows on a device that is not there: what it launches and waits for.

Only rank 0 has the device; ``python -m tests.rows.test_pretended_device`` prints the lines that its
launches come from.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torchrec import KeyedJaggedTensor

from tests.rows.worlds import World, fill_replicas, make_world, table_of, whole_tables
from tests.support.fake_ranks import FakeRanks
from tests.support.pretended_device import (
    DEVICE,
    UPDATE,
    PretendedDevice,
    in_place_of_the_device,
    on_device,
    on_host,
)
from torchrec_picasso.ops import id_reader, segment_reduction
from torchrec_picasso.rows import refresher
from torchrec_picasso.rows.batch_gradients import BatchGradients, update_rows
from torchrec_picasso.rows.batch_rows import BatchRows
from torchrec_picasso.rows.refresh_policy import Refresh
from torchrec_picasso.rows.request import RowRequest
from torchrec_picasso.storage.row_tables import RowTables

MOST = {
    (2, 1, 1): (130, 2),
    (2, 1, 4): (180, 2),
    (8, 4, 1): (242, 2),
    (8, 4, 4): (351, 2),
    (64, 4, 1): (242, 2),
}
"""Launches and host syncs of a step by (ranks, packs, micro-batches); the dense part has none, and
valid lengths are looked at before (`test_valid_features.py`)."""
BAGS = [
    table_of(f"{pack}{home}", pack, 4, [6 - 6 * home, 6 * home], [])
    for pack in (0, 1)
    for home in (0, 1)
]
"""Two packs of a table on each rank."""
ALL_KINDS = [
    table_of("a", 0, 4, [3, 4], [1, 5]),
    replace(table_of("b", 0, 4, [2, 1], [0], 2), mean=True),
    replace(table_of("c", 0, 8, [6, 0], []), route="bags"),
    replace(table_of("d", 0, 8, [0, 5], []), route="bags", mean=True),
]


def world_of(world_size: int, num_packs: int, are_sequences: bool = False) -> World:
    """Two tables a pack, packs of different dims, some rows with replicas."""
    blocks = [3] * world_size
    tables = [
        table_of(f"{pack}{name}", pack, 4 * (1 + pack), blocks, [1, 2], features)
        for pack in range(num_packs)
        for name, features in (("a", 1), ("b", 2))
    ]
    return make_world(world_size, [replace(own, is_sequence=are_sequences) for own in tables])


def put_on_device(world: World) -> None:
    """Rank 0 has the device; the others show what comes out without one."""
    (group, *_) = world.groups
    on_device(group)
    for storage in group.storages:
        storage.tables._row_update = None  # the CPU's own


def features_on(
    world: World, rank: int, step: int, num_samples: int, weighted: bool
) -> KeyedJaggedTensor:
    """Bags of up to three lookups, of none in step 3."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    keys = [name for table in world.tables for name in table.feature_names]
    end = 1 if step == 3 else 4
    lengths = torch.randint(end, (len(keys), num_samples), generator=generator, dtype=torch.int32)
    values = [
        torch.randint(table.num_embeddings, (int(bags_S.sum()),), generator=generator)
        for table, bags_S in zip(
            [table for table in world.tables for _ in table.feature_names], lengths
        )
    ]
    ids_N = torch.cat(values)
    weights_N = torch.rand(ids_N.numel(), generator=generator) if weighted else None
    tensors = {"values": ids_N, "lengths": lengths.view(-1), "weights": weights_N}
    if world.groups[rank].device == DEVICE:
        tensors = on_device(tensors)
    return KeyedJaggedTensor(keys=keys, stride=num_samples, **tensors)


class Trained:
    """Batches on all ranks, one operation after the other."""

    def __init__(
        self, world: World, num_parts: int, lookahead: bool, weighted: bool = False
    ) -> None:
        self.world, self.lookahead = world, lookahead
        self.device = PretendedDevice()
        self.pooled: list[list[Tensor]] = []
        """Of rank 0, by step and part."""
        self.grads_of_weights: list[list[Tensor]] = []
        self._sizes_K, self._weighted = [2] * num_parts, weighted
        self._before: list[RowRequest] = []

    def request(self, step: int) -> list[RowRequest]:
        def made(rank: int) -> RowRequest:
            features = features_on(self.world, rank, step, sum(self._sizes_K), self._weighted)
            return RowRequest(self.world.groups[rank], [features], self._sizes_K)

        requests = self._each(made, range(len(self.world.ranks)))
        assert all(self._each(RowRequest.send_row_numbers, requests))
        self._each(RowRequest.receive_row_numbers, requests)
        if self.lookahead and self._before:
            self._each(RowRequest.send_dirty_mask, requests, self._before)
        self._before = requests
        return requests

    def step(self, step: int) -> None:
        groups, chunks = self.world.groups, range(len(self._sizes_K))
        layouts = self._each(RowRequest.build_layout, self.request(step))
        rows_W = self._each(BatchRows, groups, layouts)
        if self.lookahead:
            self._each(BatchRows.fetch_clean, rows_W)
        for chunk in chunks:
            self._each(partial(BatchRows.fetch_dirty, chunk=chunk), rows_W)
        fill_replicas(self.world)
        self._each(BatchRows.read_hot, rows_W)
        gradients = self._each(BatchGradients, groups, layouts)
        found_KW = [self._each(partial(_forward_and_backward, k), rows_W) for k in chunks]
        self.pooled += [[on_host(own).clone() for own in by_home[0][0]] for by_home in found_KW]
        self.grads_of_weights += [[on_host(own) for own in by_home[0][2]] for by_home in found_KW]
        for k in reversed(chunks):
            grads_W = [grads_M for _, grads_M, _ in found_KW[k]]
            self._each(BatchGradients.add, gradients, [k] * len(groups), grads_W)
            self._each(partial(BatchGradients.send, chunk=k), gradients)
        self._each(BatchGradients.reduce_hot, gradients)
        assert all(self._each(update_rows, groups, [[own] for own in gradients]))
        self._each(BatchRows.release, rows_W)

    def _each(self, what: Any, *by_rank: Any) -> list[Any]:
        """Calls it for each rank; what rank 0 does is noted, and others have no device."""
        first, *others = zip(*by_rank)
        with pytest.MonkeyPatch.context() as patch, in_place_of_the_device(), self.device:
            _count_what_is_no_operator(patch, self.device)
            result = what(*first)
        return [result, *(what(*given) for given in others)]


def _forward_and_backward(part: int, rows: BatchRows) -> tuple[list[Tensor], ...]:
    """Returns what is pooled, the gradients of rows and those of weights."""
    given = rows.acquire(part, lambda _: None)
    pooled, grads, grads_of_weights = [], [], []
    for matrix, pooling, scales_N in zip(given.arrive(), given.pooling_M, given.scales_M):
        pieces = pooling.pool(matrix, scales_N)
        pooled += pieces
        grads.append(pooling.gradients(pieces, scales_N))
        if scales_N is not None:
            found_N = pooling.gradient_of_scales(pieces, matrix)
            assert found_N is not None
            grads_of_weights.append(found_N)
    return pooled, grads, grads_of_weights


def _count_what_is_no_operator(patch: pytest.MonkeyPatch, device: PretendedDevice) -> None:
    start, by_tbe = FakeRanks._start, RowTables._update_by_fbgemm

    def started(*args: Any) -> Any:
        device.note(1)
        return start(*args)

    def updated(tables: RowTables, *args: Any) -> None:
        device.note(UPDATE)
        tables._counting = on_host(tables._counting)
        by_tbe(tables, *on_host(args))

    patch.setattr(FakeRanks, "_start", started)
    patch.setattr(RowTables, "_update_by_fbgemm", updated)


def measure(world_size: int, num_packs: int, num_parts: int, lookahead: bool) -> PretendedDevice:
    return _second_step(world_of(world_size, num_packs), num_parts, lookahead)


def _second_step(world: World, num_parts: int, lookahead: bool) -> PretendedDevice:
    """A step after itself and another one, which made what steps keep."""
    put_on_device(world)
    trained = Trained(world, num_parts, lookahead)
    trained.step(2)
    trained.step(1)
    trained.device = PretendedDevice()
    trained.step(2)
    return trained.device


@pytest.mark.parametrize(("case", "most"), MOST.items(), ids=str)
def test_launches_and_waits_are_no_more(case: tuple[int, int, int], most: tuple[int, int]) -> None:
    device = measure(*case, lookahead=True)
    assert not device.mixed
    launches, syncs, _ = device.totals
    assert launches <= most[0], device.table()
    assert syncs <= most[1], device.table()


@pytest.mark.parametrize("num_parts", [1, 4])
def test_bags_wait_for_the_header_alone(num_parts: int) -> None:
    world = make_world(2, [replace(table, route="bags") for table in BAGS])
    device = _second_step(world, num_parts, lookahead=True)
    assert not device.mixed
    (wait,) = device.syncs.elements()
    assert wait.startswith("exchange/header.py"), device.table()


def test_means_of_own_batch_sizes_wait_for_nothing() -> None:
    world = make_world(2, ALL_KINDS[:2])
    put_on_device(world)
    lookups = on_device({"values": torch.zeros(5).long(), "lengths": torch.ones(5).int()})
    sizes: Any = [[2], [0], [3]]
    with in_place_of_the_device(), PretendedDevice() as device:
        features = KeyedJaggedTensor(["a0", "b0", "b1"], **lookups, stride_per_key_per_rank=sizes)
        (request,) = RowRequest(world.groups[0], [features]).by_route
    assert not device.mixed
    assert not device.syncs, device.table()
    ((are_means,),) = request.cut.mean_MK
    assert on_host(are_means).tolist() == [False] * 2 + [True] * 3


def test_few_keys_are_sorted_as_integers_of_few_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    dtypes = []

    def noted(sort: Any, keys_n: Tensor, **options: Any) -> Any:
        dtypes.append(keys_n.dtype)
        return sort(keys_n, **options)

    for name in ("sort", "argsort"):
        monkeypatch.setattr(torch, name, partial(noted, getattr(torch, name)))
    measure(2, 1, 4, lookahead=True)
    # ids, segments and micro-batches of three batches, and the fetch orders of two
    assert Counter(dtypes) == {torch.int32: 3, torch.uint8: 2 * 3 + 2}


@pytest.mark.parametrize("num_parts", [1, 3])
@pytest.mark.parametrize("kind", ["rows", "sequences", "all"])
def test_devices_train_as_cpus(kind: str, num_parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if num_parts > 1:
        monkeypatch.setattr(segment_reduction, "_PIECE", 1)  # gradients are summed in pieces
    both = []
    for has_device in (False, True):
        world = make_world(2, ALL_KINDS) if kind == "all" else world_of(2, 2, kind == "sequences")
        if has_device:
            put_on_device(world)
        trained = Trained(world, num_parts, lookahead=True, weighted=kind == "all")
        for step in range(4):
            trained.step(step)
        assert not trained.device.mixed
        assert bool(trained.device.copies) is has_device
        if has_device:
            _check_ways(trained.device, kind, num_parts)
        tables = [on_host(table) for table in whole_tables(world)]
        both.append((trained.pooled, [tables, trained.grads_of_weights]))
    (pooled, others), (expected, expected_others) = both
    assert sum(part[0].count_nonzero() > 0 for part in pooled) == 3 * num_parts
    torch.testing.assert_close(pooled[:num_parts], expected[:num_parts], rtol=0, atol=0)
    torch.testing.assert_close(pooled, expected)
    torch.testing.assert_close(others, expected_others)


def _check_ways(device: PretendedDevice, kind: str, num_parts: int) -> None:
    """Of ways to the same numbers a device takes those that do not wait for a single warp, add in a
    fixed order, and need no memory for each lookup."""

    def functions(operator: str) -> set[str]:
        return {function for function, name in device.operators if name == operator}

    assert functions("repeat_interleave") <= {"bag_of_lookup", "mean_weights"}  # short runs
    assert (("sum_in_pieces", "sort") in device.operators) is (num_parts > 1)
    assert functions("index_add_") <= {"add_gradients", "read"}  # distinct rows, integers
    weights = functions("_embedding_bag_per_sample_weights_backward")
    assert weights == ({"gradient_of_weights"} if kind == "all" else set())


def test_a_check_of_the_coverage_asks_the_device_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    world = world_of(2, 2)
    put_on_device(world)
    (group, *_) = world.groups
    group.ranks.pg = None
    agreed = SimpleNamespace(wait=lambda: [[3, 1], [1, 3]])
    monkeypatch.setattr(refresher, "Agreement", lambda *args: agreed)
    with in_place_of_the_device(), PretendedDevice() as device:
        checks = refresher.Refresher([group], Refresh(check_steps=1))
        before = device.totals
        checks._decay()
        assert checks._coverage() == (0.5, (1, 3))
    assert device.totals == before


def test_a_mix_and_a_wait_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    find = id_reader.unique_rows

    def careless(ids_N: Tensor) -> Any:
        segment_reduction.mean_scale(ids_N.float(), torch.ones(ids_N.numel()) > 0)
        id_reader._digest(SimpleNamespace(lengths=lambda: ids_N, values=lambda: ids_N))  # type: ignore[arg-type]
        return find(ids_N)

    plain = measure(2, 1, 1, lookahead=False)
    assert plain.totals[1] == 1  # the header
    monkeypatch.setattr(id_reader, "unique_rows", careless)
    device = measure(2, 1, 1, lookahead=False)
    assert not plain.mixed
    (mixed,) = device.mixed
    assert mixed.startswith("ops/segment_reduction.py")
    (place,) = device.syncs - plain.syncs
    assert "_digest" in place
    with device, pytest.raises(RuntimeError, match="numpy"):
        on_device(torch.ones(1)).numpy()


if __name__ == "__main__":
    for case in MOST:
        print(case, measure(*case, lookahead=True).table(), sep="\n")
