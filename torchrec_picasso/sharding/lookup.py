"""TorchRec's lookups of one sharded module: they keep its storages and start a fetch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from torchrec_picasso.sharding.delta_tracker import RecordLookup, row_tracker
from torchrec_picasso.sharding.in_backward import InBackwardDriver, LaidOutFeatures, layout_of
from torchrec_picasso.storage.hot_homes import HotHomes
from torchrec_picasso.storage.row_storage import RowStorage
from torchrec_picasso.storage.torchrec_kernel import HotColdKernel

__all__ = ["HotColdPooledLookup", "HotColdSequenceLookup", "make_group"]


def make_group(
    configs: Sequence[GroupedEmbeddingConfig],
    tables: Sequence[PackedTable],
    ranks: Ranks,
    device: torch.device,
) -> RowGroup:
    """Allocates this rank's rows of all packs of one sharded module.

    ``configs`` has one config per pack with all its tables, ``tables`` the same tables as all ranks
    see them.
    """
    homes_P = [
        homes
        for _, same_route in groupby(tables, lambda table: table.route)
        for homes in HotHomes.for_packs(list(same_route), ranks.rank, device)
    ]
    storages = [RowStorage(config, homes, ranks, device) for config, homes in zip(configs, homes_P)]
    return RowGroup(tables, storages, ranks, device)


class _HotColdLookup:
    """Shared by pooled and sequence lookups: packs' kernels, and the driver without a schedule.

    TorchRec's lookup makes one kernel per pack with tables that this rank saves. A row-wise table
    is saved by every rank, with or without rows there; a table of one home rank only by that rank.
    """

    _emb_modules: Any
    optim_state_tracker_fn: Callable[[PartRows], None] | None

    def __init__(self, configs: Sequence[GroupedEmbeddingConfig], group: RowGroup) -> None:
        self._group = group
        table_wise = ShardingType.TABLE_WISE.value
        owned = {t.name for t in group.tables if SHARDING_TYPE_OF[t.route] == table_wise}
        saved_P = [
            [t for t in config.embedding_tables if t.local_rows or t.name not in owned]
            for config in configs
        ]
        # Kernels are numbered by this list, not by pack.
        self._storages = [rows for rows, saved in zip(group.storages, saved_P) if saved]
        super().__init__(  # type: ignore[call-arg]
            grouped_configs=[
                replace(config, embedding_tables=saved)
                for config, saved in zip(configs, saved_P)
                if saved
            ],
            device=group.device,
            pg=group.ranks.pg,
        )
        self._driver = InBackwardDriver(group)

    def _create_embedding_kernel(self, config: GroupedEmbeddingConfig, *_: object) -> BaseEmbedding:
        return HotColdKernel(config, self._storages[len(self._emb_modules)], self._group.ranks)

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
        self.optim_state_tracker_fn = row_tracker(record_fn, self._group, list(self._emb_modules))


class HotColdPooledLookup(_HotColdLookup, GroupedPooledEmbeddingsLookup):
    """This rank's part of a sharded EmbeddingBagCollection."""


class HotColdSequenceLookup(_HotColdLookup, GroupedEmbeddingsLookup):
    """This rank's part of a sharded EmbeddingCollection."""
