"""``hot_cold_planner``: TorchRec's planner with the hot/cold enumerator in it.

Proposers, partitioner, performance model and validation are TorchRec's. On CPU only proposers that
work there by construction are used: Greedy and Uniform, since grid search is slow for nothing and
dynamic programming divides HBM into bins that a CPU does not have.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import nn
from torchrec.distributed.planner import EmbeddingShardingPlanner
from torchrec.distributed.planner.constants import BATCH_SIZE
from torchrec.distributed.planner.proposers import GreedyProposer, UniformProposer
from torchrec.distributed.planner.types import ParameterConstraints, Topology
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.distributed.types import ModuleSharder, ShardingPlan

from torchrec_picasso.errors import PlanError
from torchrec_picasso.frequency import FrequencyStats
from torchrec_picasso.planner.enumerator import HotColdEnumerator

__all__ = ["hot_cold_planner"]


def hot_cold_planner(
    topology: Topology,
    stats: FrequencyStats | None = None,
    *,
    hot_rows: int | Mapping[str, int] | None = None,
    curves: object | None = None,
    constraints: dict[str, ParameterConstraints] | None = None,
    batch_size: int | None = None,
    **planner_kwargs: Any,
) -> EmbeddingShardingPlanner:
    """Makes a TorchRec planner that gives tables hot rows.

    The hot sets are chosen when ``plan`` or ``collective_plan`` sees the model. Same inputs, same
    plan, in every process.

    Args:
        topology: Devices to plan for.
        stats: Lookup counts of the model's tables; needed for a total above 0.
        hot_rows: A number is a total over all tables, spent on the rows looked up most; ``0`` is
            the packed unique exchange without replicas. A mapping ``{table: rows}`` is exactly
            that, and leaves tables it does not name to TorchRec.
        curves: Measured communication times; not used in this release.
        constraints: TorchRec's constraints by table name.
        batch_size: Samples per rank and step; TorchRec's default if ``None``.
        planner_kwargs: Further arguments of TorchRec's ``EmbeddingShardingPlanner``.

    Returns:
        An ``EmbeddingShardingPlanner``; where it fails, every rank of ``collective_plan`` raises.

    Raises:
        PlanError: If ``hot_rows`` is ``None``, or an argument is not of its kind.
    """
    if hot_rows is None:
        raise PlanError(
            "hot_rows is None, which leaves the choice to a cost model that is not part of this "
            "release; pass a total over all tables (an int), a dict {table: rows}, or 0 for the "
            "packed unique exchange without replicas"
        )
    if curves is not None:
        raise PlanError(
            "curves was given, but the cost model that reads it is not part of this release; leave "
            "curves out and pass hot_rows as an int or a dict"
        )
    if stats is not None and not isinstance(stats, FrequencyStats):
        raise PlanError(
            f"stats is a {type(stats).__name__}, expected FrequencyStats; make it with "
            "FrequencyStats.collect or FrequencyStats.from_parquet"
        )
    if "enumerator" in planner_kwargs:
        raise PlanError(
            "enumerator was given, but hot_cold_planner brings its own; leave it out, or build an "
            "EmbeddingShardingPlanner around a HotColdEnumerator yourself"
        )
    batch_size = batch_size or BATCH_SIZE
    if topology.compute_device == "cpu":
        cpu_proposers = [GreedyProposer(), GreedyProposer(use_depth=False), UniformProposer()]
        planner_kwargs.setdefault("proposer", cpu_proposers)
    return _HotColdPlanner(
        topology=topology,
        batch_size=batch_size,
        enumerator=HotColdEnumerator(
            topology, batch_size, hot_rows, stats, constraints=constraints
        ),
        constraints=constraints,
        **planner_kwargs,
    )


class _HotColdPlanner(EmbeddingShardingPlanner):
    """Reports a failure of rank 0 to every rank: TorchRec leaves the others in a broadcast."""

    def collective_plan(
        self,
        module: nn.Module,
        sharders: list[ModuleSharder[nn.Module]] | None = None,
        pg: dist.ProcessGroup | None = None,
    ) -> ShardingPlan:
        """Plans on the first rank of ``pg`` and broadcasts the plan.

        Collective: every rank of ``pg`` calls this, in the same order.

        Args:
            module: The model before sharding.
            sharders: Sharders of its embedding modules; TorchRec's own if ``None``.
            pg: Process group; the default one if ``None``.

        Returns:
            The same plan on every rank.

        Raises:
            PlanError: On the other ranks, with the first rank's message, if planning failed there;
                the first rank raises its own error.
        """
        failure: Exception | None = None
        outcome: list[Any] = [None, None]
        if dist.get_rank(pg) == 0:
            try:
                outcome[0] = self.plan(module, sharders or get_default_sharders())
            except Exception as error:
                failure = error
                outcome[1] = f"{type(error).__name__}: {error}"
        dist.broadcast_object_list(outcome, group_src=0, group=pg)
        if failure is not None:
            raise failure
        if outcome[1] is not None:
            raise PlanError(f"rank 0 could not make the plan: {outcome[1]}")
        return outcome[0]
