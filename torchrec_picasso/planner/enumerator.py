"""The sharding options of a model, restricted by the hot/cold decision.

The enumerator makes the decision, because it knows the model's tables and their sharders. A
hot/cold table keeps only hot/cold options, any other table its stock options. Options have the
times of the cost model if there are curves, else TorchRec's estimates.

Source: TorchRec ``planner/enumerators.py`` ``EmbeddingEnumerator``; only ``enumerate`` and
``populate_estimates`` are overridden.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import nn
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.shard_estimators import EmbeddingStorageEstimator
from torchrec.distributed.planner.types import ShardEstimator, ShardingOption, Topology
from torchrec.distributed.types import ModuleSharder

from torchrec_picasso.cost import CommCurves
from torchrec_picasso.cost.local import DenseTimes
from torchrec_picasso.errors import PlanError
from torchrec_picasso.frequency import FrequencyStats, select_hot_rows
from torchrec_picasso.placement import Form, HotColdParams
from torchrec_picasso.planner import hot_options, refusals, table_info
from torchrec_picasso.planner.decision import Decision, decide
from torchrec_picasso.planner.hot_options import by_table
from torchrec_picasso.planner.refusals import TablePath

__all__ = ["HotColdEnumerator"]


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
        self._topology = topology
        self._hot_rows = hot_rows
        self._num_waves = num_waves
        self._dense_ms = dense_ms
        self._frequency_stats = stats
        self._has_prices = curves is not None or hot_rows is None
        self._curves = curves if curves is not None else table_info.assumed_curves(topology)
        self._decision: Decision | None = None
        self._refusals: dict[TablePath, refusals.TableRefusals] = {}
        self._listed: list[ShardingOption] | None = None  # a list while options are collected
        self._estimators: list[ShardEstimator]
        self._hot_cold_space: list[ShardingOption] | None = None

    @property
    def decision(self) -> Decision | None:
        """The decision of the last call of ``enumerate``; ``None`` if two tables have equal names,
        or no sharder supports hot/cold tables."""
        return self._decision

    def enumerate(
        self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]
    ) -> list[ShardingOption]:
        """Lists the options of all tables, in the same order in every process.

        A hot/cold table has only hot/cold options, another table TorchRec's.

        Raises:
            PlanError: If requested hot rows cannot be placed, with the reason.
        """
        self._decision = None
        options_by_path = self._list_options(module, sharders)
        self._refusals = self._refusals_of(options_by_path)
        rows = refusals.hot_cold_candidates(
            options_by_path, self._refusals, self._hot_rows, list(self.sharder_map.values())
        )
        decision = self._decision = self._decide(options_by_path, table_info.dense_bytes_of(module))
        if decision is not None:
            hot_sets, blocks, waves = decision.hot_sets, decision.block_rows, decision.waves
            forms: Mapping[str, Form] = decision.form_of
            num_micro_batches = decision.num_micro_batches if self._has_prices else None
        else:
            # no decision by table name: the caller's hot rows, TorchRec's home blocks
            assert self._hot_rows is not None
            without = {name for (_, name), found in self._refusals.items() if found.hot_rows}
            hot_sets = select_hot_rows(rows, self._hot_rows, self._frequency_stats, without=without)
            blocks, waves, num_micro_batches = {}, {}, None
            required = {name: refusals.required_form(o) for (_, name), o in options_by_path.items()}
            forms = {name: form or "rows" for name, form in required.items()}
        space: list[ShardingOption] = []
        for key, options in options_by_path.items():
            table, is_able = key[1], key in self._refusals and self._refusals[key].hot_cold is None
            if is_able and table in hot_sets:
                hot_set, fixed = hot_sets[table], options[0].cache_params
                if self._hot_rows is None and isinstance(fixed, HotColdParams):
                    hot_set = fixed.hot_rows  # of the user's constraints
                options = hot_options.hot_cold_options(
                    options,
                    hot_set,
                    waves.get(table, 0),
                    form=forms[table],
                    num_micro_batches=num_micro_batches,
                )
                hot_options.cut_home_blocks(options, blocks.get(table))
            elif key in self._refusals and not isinstance(self._hot_rows, Mapping):
                # without types that train another model
                kept = table_info.stock_types_of(options, self._constrained_types(table))
                options = [option for option in options if option.sharding_type in kept] or options
            space.extend(options)
        self.populate_estimates(space)
        self._hot_cold_space = hot_options.copy_options(space)
        return space

    def decided_options(self, space: list[ShardingOption]) -> list[ShardingOption]:
        """Selects one option per table of a result of ``enumerate``: the decided one, or the one
        with TorchRec's best rating."""
        stock_types: dict[str, str | None] = {}
        decision = self._decision
        if decision is not None and self._has_prices and not isinstance(self._hot_rows, Mapping):
            names = (table.load.name for table in decision.tables)
            stock_types = dict(zip(names, decision.stock_types))

        def rank(option: ShardingOption) -> tuple[bool, float]:
            # a hot/cold table has only hot/cold options; among several kernels, the fastest
            is_other = option.sharding_type != stock_types.get(option.name)
            slowest_ms = max(shard.perf.total if shard.perf else 0.0 for shard in option.shards)
            return is_other and (option.path, option.name) in self._refusals, slowest_ms

        return [min(options, key=rank) for options in by_table(space).values()]

    @property
    def last_stored_search_space(self) -> list[ShardingOption] | None:
        """The options of the last call of ``enumerate``, including hot/cold ones."""
        return self._hot_cold_space

    def populate_estimates(self, sharding_options: list[ShardingOption]) -> None:
        """Estimates time and memory, including replicas, in place."""
        if self._listed is not None:
            # Called by TorchRec's enumerate: collect its options, and leave it none to estimate.
            self._listed.extend(sharding_options)
            sharding_options.clear()
            return
        self._estimate(sharding_options, only_memory=True)
        hot_options.add_replica_storage(sharding_options, self._compute_device)
        unpriced, decision = sharding_options, self._decision
        if decision is not None and self._has_prices:
            names = (table.load.name for table in decision.tables)
            added = dict(zip(names, decision.stock_costs))
            unpriced = hot_options.price_options(sharding_options, added, decision.world_size)
        self._estimate(unpriced, only_memory=False)

    def _list_options(
        self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]
    ) -> dict[TablePath, list[ShardingOption]]:
        """Lists TorchRec's options by module and table, without the cost of estimates."""
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

    def _estimate(self, options: list[ShardingOption], *, only_memory: bool) -> None:
        """Runs TorchRec's memory estimators, or all its other estimators."""
        estimators = self._estimators
        self._estimators = [
            estimator
            for estimator in estimators
            if isinstance(estimator, EmbeddingStorageEstimator) == only_memory
        ]
        try:
            super().populate_estimates(options)
        finally:
            self._estimators = estimators

    def _decide(
        self, options_by_path: Mapping[TablePath, list[ShardingOption]], dense_bytes: int
    ) -> Decision | None:
        """Makes the decision; ``None`` if no table can be hot/cold, or table names are equal."""
        if not self._refusals:
            return None
        if len({table for _, table in options_by_path}) < len(options_by_path):
            if self._num_waves > 1:
                raise PlanError(
                    f"num_waves is {self._num_waves}, but waves are assigned by table name and "
                    "some tables have equal names; give each table its own name"
                )
            return None
        dense = dataclasses.replace(self._curves.dense or DenseTimes(), parameter_bytes=dense_bytes)
        if self._dense_ms is not None:
            dense = DenseTimes.from_total(self._dense_ms, dense_bytes)
        budget_bytes = float("inf")
        if self._hot_rows is None:  # the cost model chooses: memory that is free for replicas
            all_options = list(options_by_path.values())
            self._estimate([o for options in all_options for o in options], only_memory=True)
            budget_bytes = hot_options.replica_budget_bytes(all_options, self._topology)
        return decide(
            [
                table_info.table_info(
                    options_by_path[key],
                    self._frequency_stats,
                    batch_size=self._batch_size,
                    refusals=found,
                    constrained_types=self._constrained_types(key[1]),
                )
                for key, found in self._refusals.items()
            ],
            self._frequency_stats,
            self._curves,
            world_size=self._topology.world_size,
            batch_size=self._batch_size,
            hot_rows=self._hot_rows,
            replica_budget_bytes=budget_bytes,
            num_waves=self._num_waves,
            dense=dense,
        )

    def _constrained_types(self, table: str) -> list[str] | None:
        constraint = (self._constraints or {}).get(table)
        return constraint.sharding_types if constraint is not None else None

    def _refusals_of(
        self, options_by_path: Mapping[TablePath, list[ShardingOption]]
    ) -> dict[TablePath, refusals.TableRefusals]:
        """Collects the refusals of each table whose sharder supports hot/cold tables."""
        found = {}
        for key, options in options_by_path.items():
            sharder = self.sharder_map[options[0].module_type_key]
            if getattr(type(sharder), "supports_hot_cold", False) is True:
                found[key] = refusals.refusals_of(
                    options,
                    table_info.config_of(options[0]),
                    getattr(sharder, "fused_params", None),
                    self._compute_device,
                )
        return found
