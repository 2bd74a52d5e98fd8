"""TorchRec's lookups of one sharded module: they keep its storages and start a fetch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import torch
from torchrec.distributed.embedding_types import GroupedEmbeddingConfig
from torchrec.distributed.types import ShardingType

from torchrec_picasso._torchrec import (
    BaseEmbedding,
    GroupedEmbeddingsLookup,
    GroupedPooledEmbeddingsLookup,
)
from torchrec_picasso.exchange.ranks import Ranks
from torchrec_picasso.ops.ids import PackedTable
from torchrec_picasso.placement import SHARDING_TYPE_OF
from torchrec_picasso.rows.batch_rows import PartRows
from torchrec_picasso.rows.group import RowGroup
from torchrec_picasso.sharding.delta_tracker import RecordLookup, state_tracker
from torchrec_picasso.sharding.in_backward import InBackwardDriver, LaidOutFeatures, layout_of
from torchrec_picasso.storage.hot_homes import HotHomes
from torchrec_picasso.storage.row_storage import RowStorage
from torchrec_picasso.storage.torchrec_kernel import HotColdKernel

__all__ = ["HotColdPooledLookup", "HotColdSequenceLookup", "Packs"]


class Packs:
    """All packs of one sharded module; TorchRec's lookup makes one kernel per pack.

    ``configs`` has one config per pack with all its tables, ``tables`` the same tables as all ranks
    see them.
    """

    def __init__(
        self,
        configs: list[GroupedEmbeddingConfig],
        tables: Sequence[PackedTable],
        ranks: Ranks,
        device: torch.device,
    ) -> None:
        self.ranks, self.device = ranks, device
        homes_P = [
            homes
            for _, same_route in groupby(tables, lambda table: table.route)
            for homes in HotHomes.for_packs(list(same_route), ranks.rank, device)
        ]
        storages = [
            RowStorage(config, homes, ranks, device) for config, homes in zip(configs, homes_P)
        ]
        self.group = RowGroup(tables, storages, ranks, device)
        # A rank saves only tables it keeps. Kernels are numbered by this list, not by pack.
        table_wise = ShardingType.TABLE_WISE.value
        owned = {table.name for table in tables if SHARDING_TYPE_OF[table.route] == table_wise}
        self._on_this_rank = [
            (own, storage)
            for config, storage in zip(configs, storages)
            if (own := _on_this_rank(config, owned)) is not None
        ]
        self.configs = [config for config, _ in self._on_this_rank]
        """One config per pack with tables on this rank, and with only these tables."""

    def kernel(self, number: int) -> HotColdKernel:
        """Makes TorchRec's view of the pack with this index in ``configs``."""
        return HotColdKernel(*self._on_this_rank[number], self.ranks)


def _on_this_rank(
    config: GroupedEmbeddingConfig, owned: Collection[str]
) -> GroupedEmbeddingConfig | None:
    """Keeps the tables of a pack that this rank saves; ``None`` = the rank saves none.

    A row-wise table is saved by every rank, with or without rows there; a table of one home rank
    (``owned``) only by that rank.
    """
    tables = [t for t in config.embedding_tables if t.local_rows or t.name not in owned]
    return replace(config, embedding_tables=tables) if tables else None


class _HotColdLookup:
    """Shared by pooled and sequence lookups: packs' kernels, and the driver without a schedule."""

    _emb_modules: Any
    optim_state_tracker_fn: Callable[[PartRows], None] | None

    def __init__(self, packs: Packs) -> None:
        self._packs = packs
        super().__init__(  # type: ignore[call-arg]
            grouped_configs=packs.configs, device=packs.device, pg=packs.ranks.pg
        )
        self._driver = InBackwardDriver(packs.group)

    def _create_embedding_kernel(self, config: GroupedEmbeddingConfig, *_: object) -> BaseEmbedding:
        return self._packs.kernel(len(self._emb_modules))

    def forward(self, sparse_features: LaidOutFeatures | PartRows) -> PartRows:
        """Starts to fetch the rows of a batch. Collective.

        Rows of a micro-batch that a schedule fetches are returned unchanged.
        """
        rows = sparse_features
        if not isinstance(rows, PartRows):
            # sequences have no use for weights
            rows = self._driver.fetch(layout_of(rows), rows.weights_or_none())
        if self.optim_state_tracker_fn is not None:
            self.optim_state_tracker_fn(rows)
        return rows

    def register_optim_state_tracker_fn(self, record_fn: RecordLookup) -> None:
        """Registers TorchRec's delta tracker, for its modes with optimizer state."""
        kernels = list(self._emb_modules)
        self.optim_state_tracker_fn = state_tracker(record_fn, self._packs.group, kernels)


class HotColdPooledLookup(_HotColdLookup, GroupedPooledEmbeddingsLookup):
    """This rank's part of a sharded EmbeddingBagCollection."""


class HotColdSequenceLookup(_HotColdLookup, GroupedEmbeddingsLookup):
    """This rank's part of a sharded EmbeddingCollection."""
