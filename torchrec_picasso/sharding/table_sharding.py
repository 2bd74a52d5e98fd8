"""The hot/cold embedding sharding: TorchRec's row-wise metadata with this package's exchange.

A subclass of TorchRec's row-wise sharding keeps TorchRec's shards, names and state-dict metadata.
Only the three factories differ (input dist, lookup, output dist), and tables are grouped more
finely, by :func:`.pack_key`. Pooled and sequence tables differ only in the output dist. Tables of
one home rank have TorchRec's table-wise metadata; a rank lists all of these tables, those of other
home ranks with no rows.
"""

from __future__ import annotations

import copy
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import replace
from itertools import groupby
from typing import Any

import torch
from torchrec.distributed.embedding_types import GroupedEmbeddingConfig, ShardedEmbeddingTable
from torchrec.distributed.types import ShardingEnv, ShardingType
from torchrec.modules.embedding_configs import PoolingType

from torchrec_picasso._torchrec import (
    BaseRwEmbeddingSharding,
    BaseTwEmbeddingSharding,
    EmbeddingShardingInfo,
    QuantizedCommCodecs,
    ShardingEnv2D,
)
from torchrec_picasso.errors import CompatError, PlanError
from torchrec_picasso.exchange.all_to_all import Ranks, connect
from torchrec_picasso.ops.ids import PackedTable
from torchrec_picasso.placement import FORMS, Form, HotColdParams, pack_key
from torchrec_picasso.rows.group import ROUTES, RowGroup
from torchrec_picasso.sharding.in_backward import (
    HotColdPooledLookup,
    HotColdSequenceLookup,
    RequestDist,
)
from torchrec_picasso.sharding.output_dist import HotColdOutputDist
from torchrec_picasso.storage.row_storage import HotHomes, RowStorage


class HotColdEmbeddingSharding(BaseRwEmbeddingSharding):
    """Shards tables row-wise with hot replicas and one packed unique exchange.

    The tables' ``cache_params`` are :class:`HotColdParams`; all are pooled, or all are looked up as
    sequences. Rows and gradients use the wire codecs of ``SEQUENCE_EMBEDDINGS_ALL_TO_ALL`` (FP32,
    FP16 or BF16). Raises PlanError if a table cannot hold its hot set, CompatError if the
    environment (one-dimensional), kernel, optimizer or wire precision is not supported.
    """

    _grouped_embedding_configs_per_rank: list[list[GroupedEmbeddingConfig]]
    group: RowGroup
    """The tables; TorchRec makes the lookup, and with it this group, before input dists."""
    request_dist: RequestDist
    """The request for a batch's rows; shared by all copies of the module."""

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
        configs = {info.embedding_config.name: info.embedding_config for info in sharding_infos}
        shardings = [info.param_sharding for info in sharding_infos]
        params = {name: sharding.cache_params for name, sharding in zip(configs, shardings)}
        for name, config in configs.items():
            params[name].check(name, config.num_embeddings)
        self._is_sequence = all(c.pooling == PoolingType.NONE for c in configs.values())
        super().__init__(sharding_infos, env, device, qcomm_codecs_registry=qcomm_codecs_registry)
        # Regroups TorchRec's groups; TorchRec's own methods read names and shards from these.
        self._grouped_embedding_configs_per_rank = [
            _packs(groups, params) for groups in self._grouped_embedding_configs_per_rank
        ]
        self._grouped_embedding_configs = self._grouped_embedding_configs_per_rank[self._rank]
        means = {name for name, c in configs.items() if c.pooling == PoolingType.MEAN}
        self._tables = self._packed_tables(params, means)
        self._ranks = Ranks(self._pg, qcomm_codecs_registry)
        if device is not None and device.type == "cpu":
            connect(self._pg)
        # the first table of each form
        self._connect_routes({params[name].form: name for name in reversed(params)}, device)

    def _connect_routes(self, tables: Mapping[Form, str], device: torch.device | None) -> None:
        """Connects this rank for the exchanges of each form, with one of its tables. Collective."""
        for form, table in tables.items():
            others = [other for other in tables if other != form]
            if FORMS[form].by_module and others:
                raise CompatError(
                    f"table {table!r} has {form=}, table {tables[others[0]]!r} of the same module "
                    f"form={others[0]!r}; give all hot/cold tables of a module {form=}, or none"
                )
        for form in sorted(tables):
            ROUTES[form].connect(tables[form], self._ranks, device)

    def create_lookup(
        self,
        device: torch.device | None = None,
        fused_params: dict[str, Any] | None = None,
        feature_processor: Any = None,
    ) -> HotColdPooledLookup | HotColdSequenceLookup:
        """Allocates this rank's home rows and replicas."""
        configs, device = self._grouped_embedding_configs, device or self._device
        tables, ranks = self._tables, self._ranks
        homes_P: list[HotHomes] = []
        for _, same_route in groupby(tables, lambda table: table.route):
            homes_P += HotHomes.for_packs(list(same_route), ranks.rank, device)
        pairs = zip(configs, homes_P)
        storages = [RowStorage(config, homes, ranks, device) for config, homes in pairs]
        self.group = RowGroup(tables, storages, ranks, device)
        self.request_dist = RequestDist(self.group)
        lookup = HotColdSequenceLookup if self._is_sequence else HotColdPooledLookup
        return lookup(configs, self.group)

    def create_input_dist(self, device: torch.device | None = None) -> RequestDist:
        """Returns the request for a batch's rows."""
        return self.request_dist

    def create_output_dist(self, device: torch.device | None = None) -> HotColdOutputDist:
        """Makes the module that turns fetched rows into the output."""
        return HotColdOutputDist(self.group.plan, device or self._device)

    def _shard(
        self, sharding_infos: list[EmbeddingShardingInfo]
    ) -> list[list[ShardedEmbeddingTable]]:
        """Assigns shards to ranks as TorchRec does, row-wise or, by home rank, table-wise."""
        table_wise = ShardingType.TABLE_WISE.value
        whole = [i for i in sharding_infos if i.param_sharding.sharding_type == table_wise]
        shared = [i for i in sharding_infos if i.param_sharding.sharding_type != table_wise]
        if whole and self._is_sequence:
            raise PlanError(
                f"table {whole[0].embedding_config.name!r} is looked up as sequences, so it has "
                "no bags that could travel; use HotColdParams(form='rows')"
            )
        tables_per_rank = super()._shard(shared)
        # only the home ranks are taken from table-wise sharding
        owned_by_rank = BaseTwEmbeddingSharding._shard(self, whole)
        # every rank lists every table, so that all ranks number tables and packs alike
        for owner, owned in enumerate(owned_by_rank):
            for rank, tables in enumerate(tables_per_rank):
                tables += owned if rank == owner else [replace(t, local_rows=0) for t in owned]
        for tables in tables_per_rank:
            for table in tables:
                # means are weighted sums here, so summed and mean-pooled tables share a pack
                if not self._is_sequence:
                    table.pooling = PoolingType.SUM
        return tables_per_rank

    def _packed_tables(
        self, params: dict[str, HotColdParams], means: set[str]
    ) -> list[PackedTable]:
        """Describes all tables in pack order, equal on all ranks."""
        packed: list[PackedTable] = []
        num_packs: Counter[str] = Counter()
        for config in self._grouped_embedding_configs:
            route = params[config.embedding_tables[0].name].form
            packed += [
                PackedTable(
                    name=table.name,
                    pack=num_packs[route],
                    dim=table.embedding_dim,
                    block_rows_W=self._block_rows(table),
                    hot_rows_H=params[table.name].hot_rows,
                    feature_names=tuple(table.feature_names),
                    mean=table.name in means,
                    is_sequence=self._is_sequence,
                    wave=params[table.name].wave,
                    route=route,
                )
                for table in config.embedding_tables
            ]
            num_packs[route] += 1
        return packed

    def _block_rows(self, table: ShardedEmbeddingTable) -> tuple[int, ...]:
        """Rows of a table that each rank owns, ``(W,)``."""
        rows_W = [0] * self._world_size
        for shard in table.global_metadata.shards_metadata:
            rows_W[shard.placement.rank()] += shard.shard_sizes[0]
        return tuple(rows_W)


def _packs(
    groups: list[GroupedEmbeddingConfig], params: Mapping[str, HotColdParams]
) -> list[GroupedEmbeddingConfig]:
    """Splits one rank's groups of tables into packs.

    TorchRec puts ``fused`` and ``fused_uvm`` tables into one group. Packs of a wave are neighbours.
    Neighbouring packs of one dim share a row matrix, so a wave has its packs ordered by dim, and
    every other wave in the opposite order, so that a dim continues over the boundary. Tables of one
    home rank are neighbours.
    """
    dims = list(dict.fromkeys(t.embedding_dim for g in groups for t in g.embedding_tables))
    packs_by_wave: dict[Any, list[GroupedEmbeddingConfig]] = defaultdict(list)
    for group in groups:
        alike = defaultdict(list)
        for table in group.embedding_tables:
            form, wave = params[table.name].form, params[table.name].wave
            alike[pack_key(form, wave, table.embedding_dim, table.compute_kernel)].append(table)
        for (route, wave, *_), tables in alike.items():
            pack = copy.copy(group)
            pack.embedding_tables = sorted(tables, key=_owner)
            packs_by_wave[route, wave].append(pack)

    def index_of_dim(pack: GroupedEmbeddingConfig) -> int:
        return dims.index(pack.embedding_tables[0].embedding_dim)

    return [
        pack
        for index, wave in enumerate(sorted(packs_by_wave))
        for pack in sorted(packs_by_wave[wave], key=index_of_dim, reverse=index % 2 == 1)
    ]


def _owner(table: ShardedEmbeddingTable) -> int:
    """Rank of a table's only shard; 0 for a table that all ranks share."""
    shards = table.global_metadata.shards_metadata
    return int(shards[0].placement.rank()) if len(shards) == 1 else 0
