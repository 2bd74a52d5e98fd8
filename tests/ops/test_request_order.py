"""From ids to request order and back: every lookup finds its row, every row its home or replica."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from torchrec_picasso.ops.bags import bag_order, reorder_bags
from torchrec_picasso.ops.packed_ids import PackedIdSpace, PackedTable
from torchrec_picasso.ops.partition import partition_rows
from torchrec_picasso.ops.unique import unique_rows

CPU = torch.device("cpu")
PROPERTY = settings(max_examples=150, deadline=None, derandomize=True, database=None)


@st.composite
def spaces(draw: st.DrawFn) -> PackedIdSpace:
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
    return PackedIdSpace.build(tables, CPU)


@st.composite
def batches(draw: st.DrawFn) -> tuple[PackedIdSpace, list[list[int]]]:
    """A space and, feature by feature, the rows a batch looks up."""
    space = draw(spaces())
    lookups = [
        draw(st.lists(st.integers(0, rows - 1), max_size=8))
        for rows in space.feature_rows_F.tolist()
    ]
    return space, lookups


def _pack(space: PackedIdSpace, lookups: list[list[int]]) -> tuple[Tensor, Tensor]:
    rows_N = torch.tensor([row for rows in lookups for row in rows], dtype=torch.int64)
    return space.pack_ids(rows_N, torch.tensor([len(rows) for rows in lookups]))


def _home(block_rows_W: tuple[int, ...], row: int) -> tuple[int, int]:
    """Rank and row on it of a table's row, counted by hand."""
    for rank, rows in enumerate(block_rows_W):
        if row < rows:
            return rank, row
        row -= rows
    raise AssertionError("row outside its table")


@PROPERTY
@given(batches())
def test_every_lookup_finds_its_row(drawn: tuple[PackedIdSpace, list[list[int]]]) -> None:
    space, lookups = drawn
    packed_N, outside_N = _pack(space, lookups)
    assert not outside_N.any()
    partition = partition_rows(unique_rows(packed_N), space)
    # where each matrix row is served from: (pack, replica or home), in the order of the counts
    served = [
        (pack, bucket)
        for pack, counts_B in enumerate(partition.located.counts_PB.tolist())
        for bucket, count in enumerate(counts_B)
        for _ in range(count)
    ]
    tables = [t for t in space.tables for _ in t.feature_names]
    looked_up = [(t, row) for t, rows in zip(tables, lookups) for row in rows]
    touched = set()
    for (table, row), place in zip(looked_up, partition.row_of_lookup_N.tolist()):
        pack, bucket = served[place]
        target = int(partition.located.target_U[place])
        assert pack == table.pack
        if row in table.hot_rows_H.tolist():
            base = sum(t.num_embeddings for t in space.tables[: space.tables.index(table)])
            assert bucket == 0
            assert int(space.hot_ids_H[target]) == base + row
            touched.add(target)
        else:
            rank, local_row = _home(table.block_rows_W, row)
            before = [t for t in space.tables[: space.tables.index(table)] if t.pack == pack]
            assert bucket == 1 + rank
            assert target == sum(t.block_rows_W[rank] for t in before) + local_row
    assert len(served) == len({(t.name, row) for t, row in looked_up})
    assert set(partition.located.touched_H.nonzero().flatten().tolist()) == touched


@PROPERTY
@given(batches())
def test_lookups_of_a_row_are_grouped(drawn: tuple[PackedIdSpace, list[list[int]]]) -> None:
    space, lookups = drawn
    partition = partition_rows(unique_rows(_pack(space, lookups)[0]), space)
    start = 0
    for place, end in enumerate(partition.lookup_end_U.tolist()):
        group = partition.lookups_by_row_N[start:end]
        assert group.numel() > 0
        assert (partition.row_of_lookup_N[group] == place).all()
        start = end
    assert start == partition.row_of_lookup_N.numel()


@PROPERTY
@given(batches(), st.sampled_from([-1, -(2**40), 0, 2**31, 2**62]))
def test_rows_outside_their_table_are_flagged(
    drawn: tuple[PackedIdSpace, list[list[int]]], offset: int
) -> None:
    space, lookups = drawn
    bad = offset if offset < 0 else int(space.feature_rows_F[0]) + offset
    packed_N, outside_N = _pack(space, [[*lookups[0], bad], *lookups[1:]])
    assert outside_N.nonzero().flatten().tolist() == [len(lookups[0])]
    assert ((packed_N >= 0) & (packed_N < space.num_rows)).all()


def test_ids_widen_when_the_space_does() -> None:
    hot = torch.empty(0, dtype=torch.int64)
    for rows, dtype in ((2**31 - 1, torch.int32), (2**31, torch.int64)):
        table = PackedTable(
            name="t", pack=0, dim=4, block_rows_W=(rows,), hot_rows_H=hot, feature_names=("f",)
        )
        space = PackedIdSpace.build([table], CPU)
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
    assert torch.equal(rows.lookups_U, counts_U)
    assert torch.equal(inverse_N[rows.lookups_by_row_N], inverse_N.sort().values)


@PROPERTY
@given(st.data())
def test_bags_come_sample_by_sample(data: st.DataObject) -> None:
    features_M = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=2))
    batch_size = data.draw(st.integers(0, 4))
    num_bags = sum(features_M) * batch_size
    lengths = data.draw(st.lists(st.integers(0, 3), min_size=num_bags, max_size=num_bags))
    ids_N = torch.arange(sum(lengths)) * 10
    order_S = bag_order(features_M, batch_size, CPU)
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
    space = PackedIdSpace.build(tables, CPU)
    for dtype in (torch.int32, torch.int64):
        rows_N = torch.tensor([2, torch.iinfo(dtype).max, torch.iinfo(dtype).min, 2], dtype=dtype)
        packed_N, outside_N = space.pack_ids(rows_N, torch.tensor([1, 3]))
        assert outside_N.tolist() == [False, True, True, False]
        assert packed_N[[0, 3]].tolist() == [2, 5]


@PROPERTY
@given(batches())
def test_repeats_are_bit_equal(drawn: tuple[PackedIdSpace, list[list[int]]]) -> None:
    space, lookups = drawn
    first, second = (
        [v for v in (vars(p) | vars(p.located)).values() if isinstance(v, torch.Tensor)]
        for p in (partition_rows(unique_rows(_pack(space, lookups)[0]), space) for _ in range(2))
    )
    assert len(first) == 8
    assert all(map(torch.equal, first, second))
