"""TorchRec's lookup of one sharded module: its storages, and the start of a fetch."""

from __future__ import annotations

import torch
from torchrec.distributed.embedding_types import GroupedEmbeddingConfig

from torchrec_picasso._torchrec import BaseEmbedding, GroupedPooledEmbeddingsLookup
from torchrec_picasso.exchange.ranks import Ranks
from torchrec_picasso.ops.hot_slots import HotSlots
from torchrec_picasso.ops.ids import IdSpace
from torchrec_picasso.ops.pack_plan import PackPlan
from torchrec_picasso.rows.batch_rows import PartRows
from torchrec_picasso.rows.group import RowGroup
from torchrec_picasso.sharding.features import LaidOutFeatures, layout_of
from torchrec_picasso.sharding.in_backward import InBackwardDriver
from torchrec_picasso.storage.hot_homes import HotHomes
from torchrec_picasso.storage.row_storage import RowStorage
from torchrec_picasso.storage.torchrec_kernel import HotColdKernel

__all__ = ["HotColdLookup"]


class HotColdLookup(GroupedPooledEmbeddingsLookup):
    """All packs of one sharded module on this rank.

    Args:
        configs: One per pack.
        space: The packed id space of the module.
        hot: Its hot rows.
        plan: Which packs travel and are pooled together.
        ranks: Who exchanges.
        device: Where the rows are.
    """

    def __init__(
        self,
        configs: list[GroupedEmbeddingConfig],
        space: IdSpace,
        hot: HotSlots,
        plan: PackPlan,
        ranks: Ranks,
        device: torch.device,
    ) -> None:
        self._ranks = ranks
        self._hot_homes_P = list(HotHomes.of_packs(space, hot, ranks.rank))
        super().__init__(grouped_configs=configs, device=device, pg=ranks.pg)
        self._storages = [kernel.rows for kernel in self._emb_modules]
        self.group = RowGroup(space, hot, plan, self._storages, ranks, device)
        self._driver = InBackwardDriver(self.group)

    def _create_embedding_kernel(
        self, config: GroupedEmbeddingConfig, device: torch.device | None, *_: object
    ) -> BaseEmbedding:
        hot_homes = self._hot_homes_P[len(self._emb_modules)]
        rows = RowStorage(config, hot_homes, self._ranks, device or torch.device("cpu"))
        return HotColdKernel(config, rows, self._ranks)

    def forward(self, sparse_features: LaidOutFeatures | PartRows) -> PartRows:
        """Starts fetching the rows of a batch. Collective.

        A part whose rows a schedule fetches is passed on.
        """
        if isinstance(sparse_features, PartRows):
            return sparse_features
        weights_N = sparse_features.weights_or_none()
        return self._driver.fetch(layout_of(sparse_features), weights_N)
