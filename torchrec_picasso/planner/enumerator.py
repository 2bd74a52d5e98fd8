"""The sharding options of a model, restricted by the hot/cold decision.

The enumerator makes the decision, because it knows the model's tables and their sharders. A
hot/cold table keeps only hot/cold options, any other table its stock options. Options have the
times of the cost model if it chooses or there are curves, else TorchRec's estimates.

Source: TorchRec ``planner/enumerators.py`` ``EmbeddingEnumerator``; only ``enumerate`` and
``populate_estimates`` are overridden.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from itertools import chain
from typing import Any

from torch import nn
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.shard_estimators import EmbeddingStorageEstimator
from torchrec.distributed.planner.types import ShardingOption, Topology
from torchrec.distributed.types import ModuleSharder, ShardingType

from torchrec_picasso.cost import CommCurves
from torchrec_picasso.cost.local import DenseTimes
from torchrec_picasso.frequency import FrequencyStats
from torchrec_picasso.planner import hot_options
from torchrec_picasso.planner.choice import TableInfo
from torchrec_picasso.planner.decision import Decision, decide
from torchrec_picasso.planner.hot_options import TablePath, by_table
from torchrec_picasso.planner.refusals import check_request
from torchrec_picasso.planner.table_info import assumed_curves, dense_bytes_of, table_info


class HotColdEnumerator(EmbeddingEnumerator):
    """Enumerates sharding options; hot/cold tables get only hot/cold options.

    Tables can be hot/cold if the class of their module's sharder has the attribute
    ``supports_hot_cold = True``; all other tables keep TorchRec's options. Arguments as for
    :func:`.hot_cold_planner`; others go to TorchRec's ``EmbeddingEnumerator``.
    """

    def __init__(
        self,
        topology: Topology,
        batch_size: int,
        hot_rows: int | Mapping[str, int] | None,
        stats: FrequencyStats | None = None,
        curves: CommCurves | None = None,
        num_waves: int = 1,
        dense_ms: float | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(topology, batch_size, **kwargs)
        self.only_decided = False
        """Whether a table has only the option of the decided plan, not all options."""
        self.has_spare_memory = True
        """Whether the decision may take memory beyond the tables spread evenly."""
        self.no_launched_hosts: str | None = None
        """Reason why the ranks of this launch cannot exchange by host; ``None`` = they can, or they
        are not launched yet."""
        self._topology, self._frequency_stats = topology, stats
        self._hot_rows, self._num_waves, self._dense_ms = hot_rows, num_waves, dense_ms
        self._has_prices = curves is not None or hot_rows is None
        self._curves = curves if curves is not None else assumed_curves(topology)
        self.decision: Decision | None = None
        """The decision of the last call of ``enumerate``; ``None`` if no sharder supports hot/cold
        tables."""
        self._tables: dict[TablePath, TableInfo] = {}  # those that the decision is about
        self._listed: list[ShardingOption] | None = None  # a list while options are collected

    def enumerate(
        self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]
    ) -> list[ShardingOption]:
        """Lists the options of all tables, in the same order in every process.

        A hot/cold table has only hot/cold options, another one those of its allowed stock types, or
        all without any; if ``only_decided``, each table has one option. Raises PlanError if
        requested hot rows cannot be placed, with the reason.
        """
        self.decision = None
        options_by_path = self._list_options(module, sharders)
        self._tables = self._table_infos(options_by_path)
        check_request(options_by_path, self._tables, self._hot_rows, [*self.sharder_map.values()])
        if self._tables:
            decision = self.decision = self._decide(options_by_path, dense_bytes_of(module))
            for index, key in enumerate(self._tables):
                options_by_path[key] = self._decided_options(decision, index, options_by_path[key])
        space = list(chain.from_iterable(options_by_path.values()))
        self.populate_estimates(space)
        if self.only_decided:  # by TorchRec's rating, where several kernels or types are left
            space = [min(options, key=_slowest_ms) for options in by_table(space).values()]
        self._last_stored_search_space = copy.deepcopy(space)
        return space

    def _decided_options(
        self, decision: Decision, index: int, options: list[ShardingOption]
    ) -> list[ShardingOption]:
        """Keeps a table's options that the decision allows, hot/cold ones in its placement."""
        placement = decision.placements[index]
        if placement is not None:
            if not self._has_prices:
                placement = dataclasses.replace(placement, num_micro_batches=None)
            rows_W = decision.block_rows.get(index)
            return hot_options.hot_cold_options(options, placement, rows_W)
        decided, kinds = decision.stock_types[index], decision.tables[index].stock_types
        if self.only_decided and self._has_prices and decided is not None:
            kinds = (decided,)
        # none: a mapping leaves out a table that only hot/cold suits, or no named type has a price
        kinds = kinds or (ShardingType.ROW_WISE.value,)
        # other types have no price, or train another model
        return [option for option in options if option.sharding_type in kinds] or options

    def populate_estimates(self, sharding_options: list[ShardingOption]) -> None:
        """Estimates time and memory, including replicas, in place."""
        if self._listed is not None:
            # Called by TorchRec's enumerate: collect its options, and leave it none to estimate.
            self._listed.extend(sharding_options)
            sharding_options.clear()
            return
        super().populate_estimates(sharding_options)
        hot_options.add_replica_storage(sharding_options, self._compute_device)
        decision = self.decision
        if decision is not None and self._has_prices:
            # the prices of the cost model replace TorchRec's estimates of times
            added = dict(zip(self._tables, decision.stock_costs))
            hot_options.price_options(sharding_options, added, decision.world_size)

    def _list_options(
        self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]
    ) -> dict[TablePath, list[ShardingOption]]:
        """Lists TorchRec's options by module and table, without estimates."""
        self._listed = []
        try:
            super().enumerate(module, sharders)
            listed = self._listed
        finally:
            self._listed = self._last_stored_module = None
        by_path = by_table(listed)
        for options in by_path.values():
            # TorchRec builds its lists from sets of strings, whose order varies between processes
            options.sort(key=lambda option: (option.sharding_type, option.compute_kernel))
        return by_path

    def _decide(
        self, options_by_path: Mapping[TablePath, list[ShardingOption]], dense_bytes: int
    ) -> Decision:
        """Makes the decision for the tables whose sharders support hot/cold tables."""
        dense = dataclasses.replace(self._curves.dense or DenseTimes(), parameter_bytes=dense_bytes)
        if self._dense_ms is not None:
            dense = DenseTimes.from_total(self._dense_ms, dense_bytes)
        by_path, budget_bytes = list(options_by_path.values()), 0.0
        if self.has_spare_memory:
            for estimator in self._estimators:
                if isinstance(estimator, EmbeddingStorageEstimator):
                    options = list(chain.from_iterable(by_path))
                    estimator.estimate(options, sharder_data_map=self._sharder_data_map)
            budget_bytes = hot_options.replica_budget_bytes(by_path, self._topology)
        return decide(
            list(self._tables.values()),
            self._frequency_stats,
            self._curves,
            world_size=self._topology.world_size,
            batch_size=self._batch_size,
            hot_rows=self._hot_rows,
            replica_budget_bytes=budget_bytes,
            num_waves=self._num_waves,
            dense=dense,
        )

    def _table_infos(
        self, options_by_path: Mapping[TablePath, list[ShardingOption]]
    ) -> dict[TablePath, TableInfo]:
        """Collects the information about each table whose sharder supports hot/cold tables."""
        found = {}
        for key, options in options_by_path.items():
            sharder = self.sharder_map[options[0].module_type_key]
            constraint = (self._constraints or {}).get(key[1])
            if getattr(type(sharder), "supports_hot_cold", False) is True:
                found[key] = table_info(
                    options,
                    self._frequency_stats,
                    batch_size=self._batch_size,
                    sharder=sharder,
                    curves=self._curves,
                    topology=self._topology,
                    constraint=constraint,
                    no_launched_hosts=self.no_launched_hosts,
                )
        return found


def _slowest_ms(option: ShardingOption) -> float:
    return max(shard.perf.total if shard.perf else 0.0 for shard in option.shards)
