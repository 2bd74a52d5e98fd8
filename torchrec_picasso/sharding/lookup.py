"""TorchRec's lookups of one sharded module: its storages, and the start of a fetch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torchrec.distributed.embedding_types import GroupedEmbeddingConfig

from torchrec_picasso._torchrec import (
    BaseEmbedding,
    GroupedEmbeddingsLookup,
    GroupedPooledEmbeddingsLookup,
)
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

__all__ = ["HotColdPooledLookup", "HotColdSequenceLookup", "Packs"]


class Packs:
    """All packs of one sharded module, which TorchRec's lookup makes one kernel each of.

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
        self.configs, self.ranks, self.device = configs, ranks, device
        homes_P = HotHomes.of_packs(space, hot, ranks.rank)
        storages = [
            RowStorage(config, homes, ranks, device) for config, homes in zip(configs, homes_P)
        ]
        self.group = RowGroup(space, hot, plan, storages, ranks, device)

    def kernel(self, pack: int) -> HotColdKernel:
        """Homes and replicas of one as TorchRec sees them."""
        return HotColdKernel(self.configs[pack], self.group.storages[pack], self.ranks)


class HotColdPooledLookup(GroupedPooledEmbeddingsLookup):
    """This rank's part of a sharded EmbeddingBagCollection.

    Args:
        packs: Its packs.
    """

    def __init__(self, packs: Packs) -> None:
        self._packs = packs
        super().__init__(grouped_configs=packs.configs, device=packs.device, pg=packs.ranks.pg)
        self._driver = InBackwardDriver(packs.group)

    def _create_embedding_kernel(self, config: GroupedEmbeddingConfig, *_: object) -> BaseEmbedding:
        return self._packs.kernel(len(self._emb_modules))

    def forward(self, sparse_features: LaidOutFeatures | PartRows) -> PartRows:
        """Starts fetching the rows of a batch. Collective.

        A part whose rows a schedule fetches is passed on.
        """
        if isinstance(sparse_features, PartRows):
            return sparse_features
        weights_N = sparse_features.weights_or_none()
        return self._driver.fetch(layout_of(sparse_features), weights_N)


@dataclass(frozen=True)
class _UnshapedRows:
    """Rows on their way, where TorchRec shapes what a lookup gives into a matrix."""

    rows: PartRows

    def view(self, *_: int) -> PartRows:
        """The rows; they are a matrix when they arrive."""
        return self.rows


class HotColdSequenceLookup(GroupedEmbeddingsLookup):
    """This rank's part of a sharded EmbeddingCollection.

    Args:
        packs: Its packs.
    """

    def __init__(self, packs: Packs) -> None:
        self._packs = packs
        super().__init__(grouped_configs=packs.configs, device=packs.device, pg=packs.ranks.pg)
        self._driver = InBackwardDriver(packs.group)

    def _create_embedding_kernel(self, config: GroupedEmbeddingConfig, *_: object) -> BaseEmbedding:
        return self._packs.kernel(len(self._emb_modules))

    def forward(self, sparse_features: LaidOutFeatures) -> _UnshapedRows:
        """Starts fetching the rows of a batch. Collective."""
        return _UnshapedRows(self._driver.fetch(layout_of(sparse_features), None))
