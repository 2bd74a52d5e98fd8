"""The hot/cold embedding sharding: TorchRec's row-wise metadata, our exchange.

Subclassing TorchRec's row-wise sharding keeps shards, names and state-dict metadata its own; only
the three factories (input dist, lookup, output dist) differ, and tables are grouped by dim and
compute kernel as well, because a pack is one FBGEMM table in one memory, and by wave, because a
pack travels in one. Pooled and sequence tables differ in the output dist alone. Tables whose bags
travel have TorchRec's table-wise metadata and packs of their own, the last ones; of these a rank
has the tables that are at home there, the others without rows.
"""

from __future__ import annotations

import copy
import sys
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torchrec.distributed.embedding_types import GroupedEmbeddingConfig, ShardedEmbeddingTable
from torchrec.distributed.types import ShardingEnv
from torchrec.modules.embedding_configs import PoolingType

from torchrec_picasso._torchrec import (
    BaseRwEmbeddingSharding,
    BaseTwEmbeddingSharding,
    EmbeddingShardingInfo,
    QuantizedCommCodecs,
    ShardingEnv2D,
)
from torchrec_picasso.errors import CompatError, PlanError
from torchrec_picasso.exchange.ranks import Ranks
from torchrec_picasso.ops.ids import PackedTable
from torchrec_picasso.placement import HotColdParams
from torchrec_picasso.rows.group import RowGroup
from torchrec_picasso.sharding.input_dist import RequestDist
from torchrec_picasso.sharding.lookup import HotColdPooledLookup, HotColdSequenceLookup, Packs
from torchrec_picasso.sharding.output_dist import HotColdOutputDist

__all__ = ["HotColdEmbeddingSharding"]

_LAST = sys.maxsize
"""Bags travel in no wave of their own."""


class HotColdEmbeddingSharding(BaseRwEmbeddingSharding):
    """Shards tables row-wise with hot replicas and one packed unique exchange.

    Args:
        sharding_infos: Tables whose ``cache_params`` is a :class:`HotColdParams`; all pooled, or
            all looked up as sequences.
        env: Sharding environment, one-dimensional.
        device: Where the tables go.
        qcomm_codecs_registry: Wire precision; rows and gradients use the codecs of
            ``SEQUENCE_EMBEDDINGS_ALL_TO_ALL`` (FP32, FP16 or BF16).

    Raises:
        PlanError: If a table cannot hold its hot set.
        CompatError: If the environment, kernel, optimizer or wire precision is not supported.
    """

    _grouped_embedding_configs_per_rank: list[list[GroupedEmbeddingConfig]]

    def __init__(
        self,
        sharding_infos: list[EmbeddingShardingInfo],
        env: ShardingEnv,
        device: torch.device | None = None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
    ) -> None:
        if isinstance(env, ShardingEnv2D):
            raise CompatError(
                "hot/cold tables do not support 2-D parallelism (DMPCollection); use "
                "DistributedModelParallel, or place these tables without HotColdParams"
            )
        params = {
            info.embedding_config.name: info.param_sharding.cache_params for info in sharding_infos
        }
        for info in sharding_infos:
            name = info.embedding_config.name
            params[name].check(name, info.embedding_config.num_embeddings)
        pooling = {info.embedding_config.pooling for info in sharding_infos}
        self._is_sequence = pooling == {PoolingType.NONE}
        super().__init__(sharding_infos, env, device, qcomm_codecs_registry=qcomm_codecs_registry)
        # TorchRec's grouping, made finer; its own methods read names and shards off these
        self._grouped_embedding_configs_per_rank = [
            _packs(groups, params) for groups in self._grouped_embedding_configs_per_rank
        ]
        self._grouped_embedding_configs = self._grouped_embedding_configs_per_rank[self._rank]
        means = {
            info.embedding_config.name
            for info in sharding_infos
            if info.embedding_config.pooling == PoolingType.MEAN
        }
        self._tables = self._packed_tables(params, means)
        self._ranks = Ranks(self._pg, qcomm_codecs_registry)
        self._packs: Packs | None = None
        self._request_dist: RequestDist | None = None

    @property
    def request_dist(self) -> RequestDist:
        """The request for a batch's rows; the same for all twins of the module."""
        if self._request_dist is None:
            self._request_dist = RequestDist(self.group)
        return self._request_dist

    @property
    def group(self) -> RowGroup:
        """The tables, once TorchRec has made the lookup."""
        assert self._packs is not None, "TorchRec creates lookups before input dists"
        return self._packs.group

    def create_lookup(
        self,
        device: torch.device | None = None,
        fused_params: dict[str, Any] | None = None,
        feature_processor: Any = None,
    ) -> HotColdPooledLookup | HotColdSequenceLookup:
        """Makes this rank's homes and replicas."""
        self._packs = Packs(
            self._grouped_embedding_configs,
            self._tables,
            self._ranks,
            device or self._device,
        )
        lookup = HotColdSequenceLookup if self._is_sequence else HotColdPooledLookup
        return lookup(self._packs)

    def create_input_dist(self, device: torch.device | None = None) -> RequestDist:
        """Gives the request for a batch's rows."""
        return self.request_dist

    def create_output_dist(self, device: torch.device | None = None) -> HotColdOutputDist:
        """Makes what turns fetched rows into the module's output."""
        return HotColdOutputDist(self.group.plan, device or self._device)

    def _shard(
        self, sharding_infos: list[EmbeddingShardingInfo]
    ) -> list[list[ShardedEmbeddingTable]]:
        of_rows = [info for info in sharding_infos if not _travels_as_bags(info)]
        of_bags = [info for info in sharding_infos if _travels_as_bags(info)]
        if of_bags and self._is_sequence:
            raise PlanError(
                f"table {of_bags[0].embedding_config.name!r} is looked up as sequences, so it has "
                "no bags that could travel; use HotColdParams(form='rows')"
            )
        tables_per_rank = super()._shard(of_rows)
        # they need nothing of table-wise sharding but its ranks
        at_home = BaseTwEmbeddingSharding._shard(self, of_bags)
        for home, homed in enumerate(at_home):
            for rank, tables in enumerate(tables_per_rank):
                tables += homed if rank == home else [replace(of, local_rows=0) for of in homed]
        for tables in tables_per_rank:
            for table in tables:
                # means are weighted sums here, so tables of both kinds share a pack
                if not self._is_sequence:
                    table.pooling = PoolingType.SUM
        return tables_per_rank

    def _packed_tables(
        self, params: dict[str, HotColdParams], means: set[str]
    ) -> list[PackedTable]:
        return [
            PackedTable(
                name=table.name,
                pack=pack,
                dim=table.embedding_dim,
                block_rows_W=self._block_rows(table),
                hot_rows_H=params[table.name].hot_rows,
                feature_names=tuple(table.feature_names),
                mean=table.name in means,
                is_sequence=self._is_sequence,
                wave=params[table.name].wave,
                as_bags=params[table.name].form == "bags",
            )
            for pack, config in enumerate(self._grouped_embedding_configs)
            for table in config.embedding_tables
        ]

    def _block_rows(self, table: ShardedEmbeddingTable) -> tuple[int, ...]:
        """Rows of a table at home on each rank."""
        rows_W = [0] * self._world_size
        for shard in table.global_metadata.shards_metadata:
            rows_W[shard.placement.rank()] += shard.shard_sizes[0]
        return tuple(rows_W)


def _travels_as_bags(info: EmbeddingShardingInfo) -> bool:
    return bool(info.param_sharding.cache_params.form == "bags")


def _packs(
    groups: list[GroupedEmbeddingConfig], params: Mapping[str, HotColdParams]
) -> list[GroupedEmbeddingConfig]:
    """Splits groups of tables by form, wave, dim and compute kernel; packs of bags come last.

    TorchRec counts ``fused`` and ``fused_uvm`` as one kernel. Packs of a wave are side by side.
    Packs of one dim share a matrix where they are neighbours, so a wave has its packs by dim, and
    every other wave in the opposite order. Tables of a pack of bags are by home.
    """
    dims = list(dict.fromkeys(t.embedding_dim for g in groups for t in g.embedding_tables))
    packs_of: dict[int, list[GroupedEmbeddingConfig]] = defaultdict(list)
    for group in groups:
        alike = defaultdict(list)
        for table in group.embedding_tables:
            of_table = params[table.name]
            wave = _LAST if of_table.form == "bags" else of_table.wave
            alike[wave, table.embedding_dim, table.compute_kernel].append(table)
        for (wave, *_), tables in alike.items():
            pack = copy.copy(group)
            pack.embedding_tables = sorted(tables, key=_home) if wave == _LAST else tables
            packs_of[wave].append(pack)

    def place_of_dim(pack: GroupedEmbeddingConfig) -> int:
        return dims.index(pack.embedding_tables[0].embedding_dim)

    return [
        pack
        for place, wave in enumerate(sorted(packs_of))
        for pack in sorted(packs_of[wave], key=place_of_dim, reverse=place % 2 == 1)
    ]


def _home(table: ShardedEmbeddingTable) -> int:
    (shard,) = table.global_metadata.shards_metadata
    return int(shard.placement.rank())
