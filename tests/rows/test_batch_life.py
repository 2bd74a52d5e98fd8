"""A batch from its features to its update on fake ranks, against rows indexed one by one."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.rows import worlds
from torchrec_picasso.ops.segment_reduction import gradient_of_rows, pool_rows
from torchrec_picasso.rows.batch_gradients import BatchGradients, update_rows
from torchrec_picasso.rows.batch_rows import BatchRows
from torchrec_picasso.rows.group import RowBuffers
from torchrec_picasso.rows.request import RowRequest

PROPERTY = settings(max_examples=8, deadline=None, derandomize=True, database=None)
NUM_STEPS = 2

Bags = list[list[list[int]]]
"""Ids of one rank, by feature and sample."""


@st.composite
def batches(draw: st.DrawFn, world_size: int, num_parts: int) -> list[list[tuple[Bags, list[int]]]]:
    """By step and rank, bags and the sizes of their parts."""
    rows_F = [t.num_embeddings for t in worlds.TABLES[world_size] for _ in t.feature_names]
    steps = []
    for _ in range(NUM_STEPS):
        by_rank = []
        for _ in range(world_size):
            sizes_K = draw(st.lists(st.integers(0, 2), min_size=num_parts, max_size=num_parts))
            bags = [
                [draw(st.lists(st.integers(0, rows - 1), max_size=3)) for _ in range(sum(sizes_K))]
                for rows in rows_F
            ]
            by_rank.append((bags, sizes_K))
        steps.append(by_rank)
    return steps


def _everywhere(values: Sequence[Any], what: Callable[..., Any], *args: Any) -> list[Any]:
    return [what(value, *args) for value in values]


def _request(world: worlds.World, by_rank: Sequence[tuple[Bags, list[int]]]) -> list[RowRequest]:
    requests = [
        RowRequest(group, [worlds.features_of(world, bags)], sizes_K)
        for group, (bags, sizes_K) in zip(world.groups, by_rank)
    ]
    assert all(_everywhere(requests, RowRequest.send_row_numbers))
    _everywhere(requests, RowRequest.receive_row_numbers)
    return requests


def _upstream(place: int, num_bags: int, dim: int) -> Tensor:
    return torch.randn(num_bags, dim, generator=torch.Generator().manual_seed(place))


def _grads_of(rows: BatchRows, part: int) -> tuple[list[Tensor], list[Tensor]]:
    """Pools a part; what it pooled and the gradients of its rows."""
    given = rows.acquire(part, lambda _: None)
    pooled, grads = [], []
    for place, (matrix, pooling) in enumerate(zip(given.arrive(), given.pooling_M)):
        pooled.append(pool_rows(matrix, None, pooling.index))
        upstream = _upstream(100 * part + place, *pooled[-1].shape)
        grads.append(gradient_of_rows(upstream, None, pooling.index))
    return pooled, grads


def _expected_step(
    world: worlds.World, tables: list[Tensor], by_rank: Sequence[tuple[Bags, list[int]]]
) -> tuple[list[list[list[Tensor]]], list[Tensor]]:
    """Returns what every part pools, by rank, and the tables after the step."""
    moved = [table.clone() for table in tables]
    features = [(i, t.dim) for i, t in enumerate(world.tables) for _ in t.feature_names]
    plan = world.groups[0].plan
    pooled_of_ranks = []
    for bags, sizes_K in by_rank:
        pooled_K, first_sample = [], 0
        for part, size in enumerate(sizes_K):
            pooled_M, first = [], 0
            for matrix, (num_features, dim) in enumerate(zip(plan.features_M, plan.dim_M)):
                own = range(first, first + num_features)
                bags_S = [
                    (features[f][0], bags[f][sample])
                    for sample in range(first_sample, first_sample + size)
                    for f in own
                ]
                sums = [tables[t][rows].sum(0) for t, rows in bags_S]
                pooled_M.append(torch.stack(sums) if sums else torch.zeros(0, dim))
                upstream = _upstream(100 * part + matrix, len(bags_S), dim)
                for (t, rows), grad in zip(bags_S, upstream):
                    for row in rows:
                        moved[t][row] -= worlds.LEARNING_RATE * grad / len(by_rank)
                first += num_features
            pooled_K.append(pooled_M)
            first_sample += size
        pooled_of_ranks.append(pooled_K)
    return pooled_of_ranks, moved


def _train(
    world: worlds.World,
    steps: Sequence[Sequence[tuple[Bags, list[int]]]],
    num_parts: int,
    lookahead: bool,
    in_waves: bool,
) -> None:
    tables = worlds.whole_tables(world)
    waves = list(range(len(world.groups[0].plan.waves))) if in_waves else [None]
    before: list[RowRequest] | None = None
    for by_rank in steps:
        requests = _request(world, by_rank)
        if lookahead and before is not None:
            for request, earlier in zip(requests, before):
                request.send_dirty_mask(earlier)
        before = requests
        layouts = _everywhere(requests, RowRequest.build_layout)
        rows_W = [BatchRows(group, layout) for group, layout in zip(world.groups, layouts)]
        if lookahead:
            _everywhere(rows_W, BatchRows.fetch_clean)
        for wave in waves:
            _everywhere(rows_W, BatchRows.fetch_dirty, 0, wave)
        for chunk in range(1, num_parts):
            _everywhere(rows_W, BatchRows.fetch_dirty, chunk)
        _fill_and_read_hot(world, rows_W)
        pooled_of_ranks, tables = _expected_step(world, tables, by_rank)
        gradients = [BatchGradients(group, layout) for group, layout in zip(world.groups, layouts)]
        found = [[_grads_of(rows, part) for part in range(num_parts)] for rows in rows_W]
        for pooled_K, expected_K in zip(found, pooled_of_ranks):
            for (pooled_M, _), expected_M in zip(pooled_K, expected_K):
                torch.testing.assert_close(pooled_M, expected_M)
        for part in reversed(range(num_parts)):
            for group, summed, grads_K in zip(world.groups, gradients, found):
                free_M = [len(buffers._free) for buffers in group.buffers_M]
                summed.add(part, grads_K[part][1])
                # a row buffer of sums would be idle in forward
                assert free_M == [len(buffers._free) for buffers in group.buffers_M]
            for wave in waves if part == 0 else [None]:
                _everywhere(gradients, partial(BatchGradients.send, chunk=part, wave=wave))
        for wave in waves:
            _everywhere(gradients, BatchGradients.reduce_hot, wave)
        for wave in waves:
            updated = [update_rows(g, [each], wave) for g, each in zip(world.groups, gradients)]
            assert updated == [wave == waves[-1]] * len(updated)
        _everywhere(rows_W, BatchRows.release)
        torch.testing.assert_close(worlds.whole_tables(world), tables)


def _fill_and_read_hot(world: worlds.World, rows_W: Sequence[BatchRows]) -> None:
    worlds.fill_replicas(world)
    for rows in rows_W:
        rows.read_hot()


@pytest.mark.parametrize(
    ("num_parts", "lookahead", "in_waves"),
    [(1, False, False), (1, True, True), (3, False, True), (3, True, False)],
)
@pytest.mark.parametrize("world_size", worlds.TABLES)
def test_a_batch_trains_as_rows_one_by_one(
    world_size: int, num_parts: int, lookahead: bool, in_waves: bool
) -> None:
    world = worlds.make_world(world_size)  # examples train it on

    @PROPERTY
    @given(batches(world_size, num_parts))
    def holds(steps: list[list[tuple[Bags, list[int]]]]) -> None:
        _train(world, steps, num_parts, lookahead, in_waves)

    holds()


def test_rows_of_another_hot_set_are_never_served() -> None:
    world = worlds.make_world(1)
    group = world.groups[0]
    bags = [[[0]] for t in world.tables for _ in t.feature_names]
    request = RowRequest(group, [worlds.features_of(world, bags)])
    request.send_row_numbers()
    request.receive_row_numbers()
    (route,) = group.routes
    route.hot = type(route.hot)(route.hot.ids_H, route.hot.start_P1, epoch=1)
    with pytest.raises(AssertionError, match="another hot set"):
        BatchRows(group, request.build_layout())


def test_given_back_memory_is_used_again_also_by_a_smaller_matrix() -> None:
    buffers = RowBuffers(4, torch.device("cpu"))
    first = buffers.take(100)
    assert first.shape == (100, 4)
    address = first.data_ptr()
    buffers.release(first)
    again = buffers.take(90)
    assert again.shape == (90, 4)
    assert again.data_ptr() == address


@pytest.mark.parametrize("world_size", [2, 3, 8, 32])
def test_bits_of_hot_slots_do_not_grow_with_ranks(world_size: int) -> None:
    num_hot = 64 * 64
    table = worlds.table_of("a", 0, 4, [num_hot] * world_size, range(num_hot))
    sent = []
    for tables in ([replace(table, hot_rows_H=table.hot_rows_H[:0])], [table]):
        world = worlds.make_world(world_size, tables)
        _request(world, [([[]], [0])] * world_size)
        sent.append(world.ranks[0].sent_elements)
    assert sent[1] - sent[0] <= 3 * num_hot // 64  # words of a header, numbers of half a word
