"""A row group on every one of some fake ranks, and the training that it is compared with."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor
from torchrec import KeyedJaggedTensor
from torchrec.distributed.embedding_types import (
    EmbeddingComputeKernel,
    GroupedEmbeddingConfig,
    ShardedEmbeddingTable,
)

from tests.support.fake_ranks import FakeRanks, fake_ranks
from tests.support.tables import pack_of
from torchrec_picasso._torchrec import EmbOptimType
from torchrec_picasso.ops.ids import PackedTable
from torchrec_picasso.rows.group import RowGroup
from torchrec_picasso.storage.row_storage import HotHomes, RowStorage

CPU = torch.device("cpu")
LEARNING_RATE = 0.5


def table_of(
    name: str, pack: int, dim: int, blocks: Sequence[int], hot: Sequence[int], features: int = 1
) -> PackedTable:
    return PackedTable(
        name=name,
        pack=pack,
        dim=dim,
        block_rows_W=tuple(blocks),
        hot_rows_H=torch.tensor(hot, dtype=torch.int64),
        feature_names=tuple(f"{name}{i}" for i in range(features)),
        wave=pack,
    )


TABLES = {
    1: [table_of("a", 0, 4, [7], [1, 3]), table_of("b", 1, 8, [5], [], 2)],
    2: [
        table_of("a", 0, 4, [3, 4], [1, 5], 2),
        table_of("b", 0, 4, [2, 0], [0, 1]),
        table_of("c", 1, 4, [1, 5], [2]),
        table_of("d", 2, 8, [2, 2], []),
    ],
    3: [table_of("a", 0, 4, [3, 0, 4], [0, 6], 2), table_of("b", 1, 8, [1, 1, 1], [1])],
    4: [
        table_of("a", 0, 4, [9, 90, 0, 1], [0, *range(9, 99)]),
        table_of("b", 1, 8, [80, 80, 80, 3], [*range(2, 240)]),
    ],
}
"""By number of ranks: uneven and empty blocks, packs that share a matrix, a feature more; so many
hot rows that ranks unite the bits of their slots in parts."""


@dataclass(frozen=True)
class World:
    ranks: list[FakeRanks]
    groups: list[RowGroup]
    tables: list[PackedTable]


def make_world(
    size: int, tables: Sequence[PackedTable] | None = None, weights: Sequence[Tensor] | None = None
) -> World:
    """Row groups with SGD, and weights that no two rows share unless they are given."""
    tables = TABLES[size] if tables is None else tables
    ranks = fake_ranks(size)
    groups = []
    for rank in ranks:
        storages = [
            RowStorage(_config(own, pack, rank.rank), homes, rank, CPU)
            for own in _by_route(tables)
            for pack, homes in enumerate(HotHomes.for_packs(own, rank.rank, CPU))
        ]
        groups.append(RowGroup(tables, storages, rank, CPU))
    for table, whole in zip(tables, weights or _first_weights(tables)):
        _write(table, tables, groups, whole)
    return World(ranks, groups, list(tables))


def _by_route(tables: Sequence[PackedTable]) -> list[list[PackedTable]]:
    return [list(own) for _, own in groupby(tables, lambda table: table.route)]


def _config(tables: Sequence[PackedTable], pack: int, rank: int) -> GroupedEmbeddingConfig:
    blocks = [
        ShardedEmbeddingTable(
            num_embeddings=table.num_embeddings,
            embedding_dim=table.dim,
            name=table.name,
            local_rows=table.block_rows_W[rank],
            local_cols=table.dim,
            compute_kernel=EmbeddingComputeKernel.FUSED,
            feature_names=list(table.feature_names),
            embedding_names=list(table.feature_names),
        )
        for table in tables
        if table.pack == pack
    ]
    updates = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": LEARNING_RATE}
    return pack_of(blocks, fused_params=updates)


def _first_weights(tables: Sequence[PackedTable]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(t.num_embeddings, t.dim, generator=generator) for t in tables]


def _homes_of(
    table: PackedTable, tables: Sequence[PackedTable], groups: Sequence[RowGroup]
) -> list[Tensor]:
    """The table's home rows on each rank, views."""
    (route,) = (own for own in _by_route(tables) if table in own)
    before = [t for t in route[: route.index(table)] if t.pack == table.pack]
    homes = []
    for rank, group in enumerate(groups):
        start = sum(t.block_rows_W[rank] for t in before)
        (own,) = (own for own in group.routes if own.name == table.route)
        whole = own.storages[table.pack].tables.weights.homes
        homes.append(whole[start : start + table.block_rows_W[rank]])
    return homes


def _write(
    table: PackedTable, tables: Sequence[PackedTable], groups: Sequence[RowGroup], whole: Tensor
) -> None:
    for home, rows in zip(_homes_of(table, tables, groups), whole.split(table.block_rows_W)):
        home.copy_(rows)


def fill_replicas(world: World) -> None:
    """Copies hot rows from their homes to all ranks: fake ranks cannot wait within a call."""
    for pack in range(len(world.groups[0].storages)):
        storages = [group.storages[pack] for group in world.groups]
        hot = {}
        for storage in storages:
            homes = storage.hot_homes
            (slots,) = (homes.own_row_H >= 0).nonzero(as_tuple=True)
            own = storage.tables.weights.homes[homes.own_row_H[slots]]
            hot |= dict(zip(slots.tolist(), own))
        for storage in storages:
            for slot, row in hot.items():
                storage.tables.weights.replicas[slot] = row
            storage._known_versions, storage._was_written = storage._versions(), False


def whole_tables(world: World) -> list[Tensor]:
    """Every table put together."""
    return [torch.cat(_homes_of(t, world.tables, world.groups)) for t in world.tables]


def features_of(
    world: World, bags: Sequence[Sequence[Sequence[int]]], weights: Sequence[float] | None = None
) -> KeyedJaggedTensor:
    """One rank's features; bags by feature and sample."""
    return KeyedJaggedTensor(
        keys=[f for table in world.tables for f in table.feature_names],
        values=torch.tensor(
            [i for lengths_f in bags for bag in lengths_f for i in bag], dtype=torch.int64
        ),
        lengths=torch.tensor(
            [len(bag) for lengths_f in bags for bag in lengths_f], dtype=torch.int32
        ),
        weights=None if weights is None else torch.tensor(weights),
        stride=len(bags[0]),
    )
