"""``hot_cold_planner``: TorchRec's planner with the hot/cold enumerator in it.

Partitioner, performance model and validation are TorchRec's, and so are the proposers of the plans
that are tried where the decided one does not fit (:mod:`torchrec_picasso.planner.decided_plan`).
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import nn
from torchrec.distributed.planner import EmbeddingShardingPlanner
from torchrec.distributed.planner.constants import BATCH_SIZE
from torchrec.distributed.planner.proposers import (
    GreedyProposer,
    GridSearchProposer,
    UniformProposer,
)
from torchrec.distributed.planner.types import (
    ParameterConstraints,
    PlannerError,
    Proposer,
    Topology,
)
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.distributed.types import ModuleSharder, ShardingPlan

from torchrec_picasso.cost import CommCurves
from torchrec_picasso.decision.decision import Decision
from torchrec_picasso.decision.explain import explain, summarize, why_nothing_is_hot_cold
from torchrec_picasso.errors import PlanError
from torchrec_picasso.frequency import FrequencyStats
from torchrec_picasso.planner.capacity import explain_shortage
from torchrec_picasso.planner.decided_plan import DecidedPlan
from torchrec_picasso.planner.enumerator import HotColdEnumerator

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["HotColdPlanner", "hot_cold_planner"]

_LOGGER = logging.getLogger("torchrec_picasso.planner")


def hot_cold_planner(
    topology: Topology,
    stats: FrequencyStats | None = None,
    *,
    hot_rows: int | Mapping[str, int] | None = None,
    curves: CommCurves | None = None,
    constraints: dict[str, ParameterConstraints] | None = None,
    batch_size: int | None = None,
    num_waves: int = 1,
    dense_ms: float | None = None,
    **planner_kwargs: Any,
) -> HotColdPlanner:
    """Makes a TorchRec planner that decides which tables are hot/cold and which rows are hot.

    The decision is made when ``plan`` or ``collective_plan`` sees the model; ``planner.explain()``
    shows it afterwards. Same inputs, same plan, in every process.

    Args:
        topology: Devices to plan for.
        stats: Lookup counts of the model's tables; needed for a total above 0. They also balance
            the homes. Without them every row counts as looked up equally often.
        hot_rows: ``None`` lets the cost model choose, for each table, between hot/cold and stock
            and how many rows are hot, possibly none. A number is a total over all tables, spent on
            the rows looked up most; ``0`` is the packed unique exchange without replicas. A mapping
            ``{table: rows}`` is exactly that, and leaves tables it does not name to TorchRec.
        curves: Measured costs, see :class:`torchrec_picasso.CommCurves`; ``None`` takes the
            bandwidths of ``topology`` where the cost model has to choose.
        constraints: TorchRec's constraints by table name. A ``HotColdParams`` as ``cache_params``
            makes its table hot/cold in that form; where the model chooses, with those hot rows.
        batch_size: Samples per rank and step; TorchRec's default if ``None``.
        num_waves: Waves of about equal volume that the hot/cold tables of a module travel in,
            staggered by :class:`torchrec_picasso.InterleavedTrainPipeline`. They pay where batches
            are not cut, as with BatchNorm; the figures are in docs/dev/log.md.
        dense_ms: Forward and backward of the model without its tables, per rank and step: what the
            exchange is hidden under. ``None`` = what ``curves`` know of it (``torchrec-picasso
            calibrate --config``), else 0, by which little is hidden.
        planner_kwargs: Further arguments of TorchRec's ``EmbeddingShardingPlanner``.

    Returns:
        An ``EmbeddingShardingPlanner``; where it fails, every rank of ``collective_plan`` raises.

    Raises:
        PlanError: If an argument is not of its kind, or the curves are of a single rank.

    Warns:
        UserWarning: If the curves are of another world size or device.
    """
    if curves is not None and not isinstance(curves, CommCurves):
        raise PlanError(
            f"curves is a {type(curves).__name__}, expected CommCurves; make them with "
            "CommCurves.measure or CommCurves.from_json"
        )
    if curves is not None:
        mismatch = curves.mismatch(world_size=topology.world_size, device=topology.compute_device)
        if mismatch is not None:
            warnings.warn(
                f"{mismatch}: times are extrapolated; calibrate where you train", stacklevel=2
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
    if num_waves < 1:
        raise PlanError(f"num_waves is {num_waves}, expected at least 1")
    if dense_ms is not None and not dense_ms >= 0:
        raise PlanError(f"dense_ms is {dense_ms}, expected a number of milliseconds from 0 on")
    batch_size = batch_size or BATCH_SIZE
    if planner_kwargs.get("proposer") is None:
        planner_kwargs["proposer"] = DecidedPlan(_torchrec_proposers(topology.compute_device))
    return HotColdPlanner(
        topology=topology,
        batch_size=batch_size,
        enumerator=HotColdEnumerator(
            topology,
            batch_size,
            hot_rows,
            stats,
            curves,
            num_waves,
            dense_ms,
            constraints=constraints,
        ),
        constraints=constraints,
        **planner_kwargs,
    )


def _torchrec_proposers(device_type: str) -> list[Proposer]:
    """TorchRec's own; on CPU without grid search, which is slow there and finds nothing more."""
    greedy = [GreedyProposer(), GreedyProposer(use_depth=False), UniformProposer()]
    return greedy if device_type == "cpu" else [GridSearchProposer(), *greedy]


class HotColdPlanner(EmbeddingShardingPlanner):
    """TorchRec's planner that can explain itself; made by :func:`hot_cold_planner`.

    It reports a failure of rank 0 to every rank, where TorchRec leaves the others in a broadcast.
    """

    _enumerator: HotColdEnumerator

    @property
    def decision(self) -> Decision:
        """What the last plan decided, on the rank that made it.

        Raises:
            PlanError: If there is no plan yet.
        """
        decision = self._enumerator.decision
        if decision is None:
            raise PlanError(
                "there is no decision to show: plan(model, sharders) comes first, on this rank "
                "(collective_plan decides on rank 0), with statistics, curves or hot_rows=None"
            )
        return decision

    def explain(self) -> pd.DataFrame:
        """One line per table: what was chosen, what it costs, and why.

        Returns:
            See :func:`torchrec_picasso.decision.explain.explain` for the columns.

        Raises:
            PlanError: If there is no plan yet.
        """
        return explain(self.decision)

    def plan(self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]) -> ShardingPlan:
        """Plans without a process group.

        Args:
            module: The model before sharding.
            sharders: Sharders of its embedding modules.

        Raises:
            PlanError: If the tables do not fit; names the largest and the memory that would do.
        """
        try:
            plan = super().plan(module, sharders)
        except PlannerError as error:
            space = self._enumerator.last_stored_search_space or []
            raise (explain_shortage(space, self._topology) or error) from error
        if self._enumerator.decision is not None:
            _log(self._enumerator.decision)
        return plan

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


def _log(decision: Decision) -> None:
    """Says what was planned; a plan without a hot/cold table is a warning with its reason."""
    reason = why_nothing_is_hot_cold(decision)
    if reason is not None:
        _LOGGER.warning("no table is hot/cold, so this package changes nothing: %s", reason)
        return
    summary = summarize(decision)
    _LOGGER.info(
        "%d tables hot/cold (%d as bags) with %d hot rows, %d stock; predicted step %.1f ms",
        summary["hot_cold_tables"],
        summary["bag_tables"],
        summary["hot_rows"],
        summary["stock_tables"],
        summary["step_ms"],
    )
