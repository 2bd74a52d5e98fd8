"""The planner's list of choices, with the hot/cold decision made in it.

The hot sets are chosen here, because only here are the model's tables and their sharders known. A
table that is to be hot/cold keeps no other option: the proposers then place the remaining tables
around it. Weighing hot/cold against stock options is the work of a cost model, not of this file.

Source: TorchRec ``planner/enumerators.py`` ``EmbeddingEnumerator``, extended by ``enumerate`` and
``populate_estimates`` only.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch import nn
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.types import ShardingOption, Topology
from torchrec.distributed.types import ModuleSharder

from torchrec_picasso.errors import PlanError
from torchrec_picasso.frequency import FrequencyStats, select_hot_rows
from torchrec_picasso.planner.hot_options import add_replica_storage, hot_cold_options

__all__ = ["HotColdEnumerator"]


class HotColdEnumerator(EmbeddingEnumerator):
    """Enumerates sharding options, and gives chosen tables hot/cold ones only.

    Tables can be hot/cold in modules whose sharder has the class attribute
    ``supports_hot_cold = True``; all others keep TorchRec's options.

    Args:
        topology: Devices to plan for.
        batch_size: Samples per rank and step.
        hot_rows: A total over all tables that can be hot/cold, or a number of rows for each table
            that shall be.
        stats: Lookup counts; needed for a total above 0.
        kwargs: Further arguments of TorchRec's ``EmbeddingEnumerator``.
    """

    def __init__(
        self,
        topology: Topology,
        batch_size: int,
        hot_rows: int | Mapping[str, int],
        stats: FrequencyStats | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(topology, batch_size, **kwargs)
        self._hot_rows = hot_rows
        self._frequency_stats = stats
        self._hot_cold_space: list[ShardingOption] | None = None

    def enumerate(
        self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]
    ) -> list[ShardingOption]:
        """Lists the options of every table, in an order that is the same in every process.

        Args:
            module: The model before sharding.
            sharders: Sharders of its embedding modules.

        Returns:
            TorchRec's options, with those of the chosen tables replaced by hot/cold ones.

        Raises:
            PlanError: If the hot rows asked for cannot be placed; the message says why.
        """
        options_by_path: dict[tuple[str, str], list[ShardingOption]] = {}
        for option in super().enumerate(module, sharders):
            options_by_path.setdefault((option.path, option.name), []).append(option)

        rows_by_path = self._hot_cold_candidates(options_by_path)
        hot_sets = select_hot_rows(rows_by_path, self._hot_rows, self._frequency_stats)
        space: list[ShardingOption] = []
        for (_, table), options in options_by_path.items():
            # TorchRec builds its lists from sets of strings, whose order varies between processes
            options.sort(key=lambda option: (option.sharding_type, option.compute_kernel))
            if table in hot_sets and self._can_be_hot_cold(options[0]):
                options = hot_cold_options(options, hot_sets[table])
                self.populate_estimates(options)
            space.extend(options)
        self._hot_cold_space = copy.deepcopy(space)
        return space

    @property
    def last_stored_search_space(self) -> list[ShardingOption] | None:
        """The options of the last call of ``enumerate``, hot/cold ones included."""
        return self._hot_cold_space

    def populate_estimates(self, sharding_options: list[ShardingOption]) -> None:
        """Estimates time and memory, replicas included.

        Args:
            sharding_options: Options to fill in; earlier estimates are replaced.
        """
        super().populate_estimates(sharding_options)
        add_replica_storage(sharding_options, self._compute_device)

    def _can_be_hot_cold(self, option: ShardingOption) -> bool:
        sharder = self.sharder_map[option.module_type_key]
        return getattr(type(sharder), "supports_hot_cold", False) is True

    def _hot_cold_candidates(
        self, options_by_path: Mapping[tuple[str, str], list[ShardingOption]]
    ) -> dict[str, int]:
        """Number of rows of each table that can be hot/cold, refusing what cannot be meant."""
        named = set(self._hot_rows) if isinstance(self._hot_rows, Mapping) else None
        rows: dict[str, int] = {}
        paths: dict[str, str] = {}
        elsewhere: dict[str, ShardingOption] = {}
        for (path, table), options in options_by_path.items():
            if not self._can_be_hot_cold(options[0]):
                elsewhere[table] = options[0]
                continue
            if table in rows and (table in named if named is not None else self._hot_rows):
                raise PlanError(
                    f"table {table!r} exists in module {paths[table]!r} and in module {path!r}, "
                    "but hot rows are chosen by table name; give each table its own name"
                )
            rows[table], paths[table] = options[0].tensor.shape[0], path

        for table in sorted((named or set()) & elsewhere.keys() - rows.keys()):
            module_path, module = elsewhere[table].module
            sharder = self.sharder_map[elsewhere[table].module_type_key]
            raise PlanError(
                f"hot_rows names table {table!r} of module {module_path!r} "
                f"({type(module).__name__}), whose sharder {type(sharder).__name__} cannot place "
                "hot rows; leave the table out, or pass a sharder that can, such as "
                "HotColdEmbeddingBagCollectionSharder"
            )
        if options_by_path and not rows and named != set():
            raise PlanError(
                "no table can be hot/cold: none of the sharders "
                f"{sorted({type(s).__name__ for s in self.sharder_map.values()})} supports it for "
                "a module of this model; pass HotColdEmbeddingBagCollectionSharder() in sharders"
            )
        return rows
