"""From ids to request order and back: every lookup finds its row, every row its home or replica."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from torchrec_picasso.ops.bags import bag_order, reorder_bags
from torchrec_picasso.ops.fetch_order import CLEAN, dirty_exchange, find_fetch_order
from torchrec_picasso.ops.hot_slots import HotSlots
from torchrec_picasso.ops.ids import IdSpace, PackedTable
from torchrec_picasso.ops.request_order import (
    LocatedRows,
    fetch_positions,
    first_use_chunks,
    locate_rows,
)
from torchrec_picasso.ops.unique import UniqueRows, unique_rows

CPU = torch.device("cpu")
PROPERTY = settings(max_examples=150, deadline=None, derandomize=True, database=None)


@dataclass(frozen=True)
class Laid:
    """Tables, and the values that a row group knows them by."""

    tables: Sequence[PackedTable]
    space: IdSpace
    hot: HotSlots


@st.composite
def spaces(draw: st.DrawFn) -> Laid:
    """Tables with uneven and empty blocks, several packs, any hot set."""
    world_size = draw(st.integers(1, 4))
    packs = sorted(draw(st.lists(st.integers(0, 1), min_size=1, max_size=4)))
    packs = [pack - packs[0] for pack in packs]
    tables = []
    for i, pack in enumerate(packs):
        sizes = st.lists(st.integers(0, 5), min_size=world_size, max_size=world_size)
        block_rows_W = draw(sizes.filter(lambda rows: sum(rows) > 0))
        hot = draw(st.sets(st.integers(0, sum(block_rows_W) - 1)))
        tables.append(
            PackedTable(
                name=f"t{i}",
                pack=pack,
                dim=4 * pack,
                block_rows_W=tuple(block_rows_W),
                hot_rows_H=torch.tensor(sorted(hot), dtype=torch.int64),
                feature_names=tuple(f"t{i}f{j}" for j in range(draw(st.integers(1, 2)))),
            )
        )
    return Laid(tables, IdSpace.build(tables, CPU), HotSlots.build(tables, CPU))


@st.composite
def batches(draw: st.DrawFn) -> tuple[Laid, list[list[int]]]:
    """Tables and, feature by feature, the rows a batch looks up."""
    laid = draw(spaces())
    lookups = [
        draw(st.lists(st.integers(0, rows - 1), max_size=8))
        for rows in laid.space.feature_rows_F.tolist()
    ]
    return laid, lookups


def _pack(space: IdSpace, lookups: list[list[int]]) -> tuple[Tensor, Tensor]:
    rows_N = torch.tensor([row for rows in lookups for row in rows], dtype=torch.int64)
    return space.pack_ids(rows_N, torch.tensor([len(rows) for rows in lookups]))


def _home(block_rows_W: tuple[int, ...], row: int) -> tuple[int, int]:
    """Rank and row on it of a table's row, counted by hand."""
    for rank, rows in enumerate(block_rows_W):
        if row < rows:
            return rank, row
        row -= rows
    raise AssertionError("row outside its table")


def _locate(laid: Laid, packed_N: Tensor) -> tuple[UniqueRows, LocatedRows]:
    rows = unique_rows(packed_N)
    return rows, locate_rows(rows.ids_U, laid.space, laid.hot)


@PROPERTY
@given(batches())
def test_every_lookup_finds_its_row(drawn: tuple[Laid, list[list[int]]]) -> None:
    laid, lookups = drawn
    space = laid.space
    packed_N, num_outside = _pack(space, lookups)
    assert num_outside == 0
    rows, located = _locate(laid, packed_N)
    # where each row is served from: (pack, replica or home), in the order of the counts
    served = [
        (pack, place)
        for pack, counts_Q in enumerate(located.counts_PQ.tolist())
        for place, count in enumerate(counts_Q)
        for _ in range(count)
    ]
    tables = [t for t in laid.tables for _ in t.feature_names]
    looked_up = [(t, row) for t, rows in zip(tables, lookups) for row in rows]
    touched = set()
    positions = located.position_U[rows.row_of_lookup_N].tolist()
    for (table, row), position in zip(looked_up, positions):
        pack, place = served[position]
        target = int(located.target_U[position])
        assert pack == table.pack
        if row in table.hot_rows_H.tolist():
            base = sum(t.num_embeddings for t in laid.tables[: laid.tables.index(table)])
            assert place == 0
            assert int(laid.hot.ids_H[target]) == base + row
            touched.add(target)
        else:
            rank, local_row = _home(table.block_rows_W, row)
            before = [t for t in laid.tables[: laid.tables.index(table)] if t.pack == pack]
            assert place == 1 + rank
            assert target == sum(t.block_rows_W[rank] for t in before) + local_row
    assert len(served) == len({(t.name, row) for t, row in looked_up})
    assert set(located.touched_H.nonzero().flatten().tolist()) == touched


@PROPERTY
@given(batches(), st.data())
def test_chunks_and_marks_give_every_row_one_place(
    drawn: tuple[Laid, list[list[int]]], data: st.DataObject
) -> None:
    laid, lookups = drawn
    packed_N, _ = _pack(laid.space, lookups)
    num_parts, world_size = data.draw(st.integers(2, 3)), laid.space.world_size
    parts = data.draw(
        st.lists(
            st.integers(0, num_parts - 1), min_size=packed_N.numel(), max_size=packed_N.numel()
        )
    )
    rows = unique_rows(packed_N)
    chunk_U = first_use_chunks(rows, torch.tensor(parts, dtype=torch.int64), num_parts)
    ids = packed_N.tolist()
    expected = [
        min(part for part, other in zip(parts, ids) if other == packed_id)
        for packed_id in rows.ids_U.tolist()
    ]
    assert chunk_U.tolist() == expected
    located = locate_rows(rows.ids_U, laid.space, laid.hot, chunk_U, num_parts)
    counts_PQ = located.counts_PQ.tolist()
    hot_P = [hot for hot, *_ in counts_PQ]
    counts_PKW = [
        [cold[k * world_size : (k + 1) * world_size] for k in range(num_parts)]
        for _, *cold in counts_PQ
    ]
    dirty_P = [
        torch.tensor(data.draw(st.lists(st.booleans(), min_size=n, max_size=n)), dtype=torch.bool)
        for n in (sum(map(sum, counts_KW)) for counts_KW in counts_PKW)
    ]
    orders = [find_fetch_order(c, dirty) for c, dirty in zip(counts_PKW, dirty_P)]
    places_U = fetch_positions(located, hot_P, orders)
    assert sorted(places_U.tolist()) == list(range(rows.ids_U.numel()))
    # a clean row lies in the clean exchange, a dirty one in that of its chunk; hot rows first
    start = 0
    for pack, (hot, order, dirty) in enumerate(zip(hot_P, orders, dirty_P)):
        first = sum(map(sum, counts_PQ[:pack]))
        for index, place in enumerate(places_U.tolist()):
            position = int(located.position_U[index]) - first
            if not 0 <= position < hot + order.num_rows:
                continue
            if position < hot:
                assert place == start + position
                continue
            chunk = int(chunk_U[index])
            exchange = dirty_exchange(chunk) if dirty[position - hot] else CLEAN
            rows_of = order.rows(exchange)
            assert rows_of.start <= place - start - hot < rows_of.stop
        start += hot + order.num_rows


@PROPERTY
@given(batches(), st.sampled_from([-1, -(2**40), 0, 2**31, 2**62]))
def test_rows_outside_their_table_are_flagged(
    drawn: tuple[Laid, list[list[int]]], offset: int
) -> None:
    laid, lookups = drawn
    space = laid.space
    bad = offset if offset < 0 else int(space.feature_rows_F[0]) + offset
    packed_N, num_outside = _pack(space, [[*lookups[0], bad], *lookups[1:]])
    assert num_outside == 1
    assert packed_N[len(lookups[0])] == 0
    assert ((packed_N >= 0) & (packed_N < space.num_rows)).all()


def test_ids_widen_when_the_space_does() -> None:
    hot = torch.empty(0, dtype=torch.int64)
    for rows, dtype in ((2**31 - 1, torch.int32), (2**31, torch.int64)):
        table = PackedTable(
            name="t", pack=0, dim=4, block_rows_W=(rows,), hot_rows_H=hot, feature_names=("f",)
        )
        space = IdSpace.build([table], CPU)
        assert space.id_dtype == dtype
        packed_N, _ = space.pack_ids(torch.tensor([rows - 1]), torch.tensor([1]))
        assert packed_N.tolist() == [rows - 1]


@PROPERTY
@given(st.lists(st.integers(-5, 5), max_size=30))
def test_unique_rows(ids: list[int]) -> None:
    ids_N = torch.tensor(ids, dtype=torch.int32)
    rows = unique_rows(ids_N)
    expected_U, inverse_N, counts_U = torch.unique(ids_N, return_inverse=True, return_counts=True)
    assert torch.equal(rows.ids_U, expected_U)
    assert torch.equal(rows.row_of_lookup_N, inverse_N)
    assert torch.equal(rows.counts_U, counts_U)
    assert torch.equal(inverse_N[rows.lookups_by_row_N], inverse_N.sort().values)


@PROPERTY
@given(st.data())
def test_bags_come_sample_by_sample(data: st.DataObject) -> None:
    features_M = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=2))
    batch_size = data.draw(st.integers(0, 4))
    num_bags = sum(features_M) * batch_size
    lengths = data.draw(st.lists(st.integers(0, 3), min_size=num_bags, max_size=num_bags))
    ids_N = torch.arange(sum(lengths)) * 10
    order_S = bag_order(features_M, [False] * len(features_M), [batch_size], CPU)
    bags = reorder_bags(ids_N, torch.tensor(lengths, dtype=torch.int64), order_S, keep_source=True)
    by_bag = list(ids_N.split(lengths)) if lengths else []
    expected, first = [], 0
    for num_features in features_M:
        for sample in range(batch_size):
            for feature in range(first, first + num_features):
                expected.append(by_bag[feature * batch_size + sample].tolist())
        first += num_features
    sizes = torch.diff(bags.offsets_S1).tolist()
    assert [part.tolist() for part in bags.ids_N.split(sizes)] == expected
    assert bags.source_N is not None
    assert torch.equal(ids_N[bags.source_N], bags.ids_N)


def test_a_batch_size_per_feature_keeps_the_order() -> None:
    ids_N = torch.tensor([7, 5, 7], dtype=torch.int32)
    bags = reorder_bags(ids_N, torch.tensor([2, 0, 1], dtype=torch.int32), None, keep_source=False)
    assert torch.equal(bags.ids_N, ids_N)
    assert bags.offsets_S1.tolist() == [0, 2, 2, 3]
    assert bags.source_N is None


def test_any_integer_type_of_rows() -> None:
    hot = torch.tensor([1])
    tables = [
        PackedTable(name=n, pack=0, dim=4, block_rows_W=(2, 1), hot_rows_H=hot, feature_names=(n,))
        for n in "ab"
    ]
    space = IdSpace.build(tables, CPU)
    for dtype in (torch.int32, torch.int64):
        rows_N = torch.tensor([2, torch.iinfo(dtype).max, torch.iinfo(dtype).min, 2], dtype=dtype)
        packed_N, num_outside = space.pack_ids(rows_N, torch.tensor([1, 3]))
        assert num_outside == 2
        assert packed_N.tolist() == [2, 0, 0, 5]
        inside_N, num_outside = space.pack_ids(rows_N[[0, 3]], torch.tensor([1, 1]))
        assert num_outside == 0
        assert inside_N.tolist() == [2, 5]


@PROPERTY
@given(batches())
def test_repeats_are_bit_equal(drawn: tuple[Laid, list[list[int]]]) -> None:
    laid, lookups = drawn
    packed_N, _ = _pack(laid.space, lookups)
    first, second = (
        [v for value in _locate(laid, packed_N) for v in vars(value).values()] for _ in range(2)
    )
    assert len(first) == 9
    assert all(map(torch.equal, first, second))
