"""``hot_cold_planner``: TorchRec's planner with the hot/cold enumerator.

The proposers, the partitioner, the performance model and the validation are TorchRec's. They get
only the options of the decided plan, and all options if that plan does not fit into memory.
"""

from __future__ import annotations

import logging
import math
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
from torchrec.distributed.planner.types import ParameterConstraints, PlannerError, Topology
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.distributed.types import ModuleSharder, ShardingPlan

from torchrec_picasso.cost import CommCurves
from torchrec_picasso.errors import PlanError
from torchrec_picasso.exchange.by_host import launched_place, why_no_hosts
from torchrec_picasso.frequency import FrequencyStats
from torchrec_picasso.planner.decision import Decision
from torchrec_picasso.planner.enumerator import HotColdEnumerator
from torchrec_picasso.planner.explain import explain, summarize, why_nothing_is_hot_cold
from torchrec_picasso.planner.hot_options import explain_shortage

if TYPE_CHECKING:
    import pandas as pd

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
    """Creates a TorchRec planner that chooses hot/cold tables and hot rows.

    The choice is made in ``plan`` or ``collective_plan``; ``planner.explain()`` shows it
    afterwards. Equal inputs give equal plans, in every process.

    Args:
        topology: Devices to plan for.
        stats: Lookup counts of the model's tables; required for a total above 0. They also balance
            home blocks. Without them all rows count as looked up equally often.
        hot_rows: ``None``: the cost model chooses hot/cold or stock for each table, and the number
            of hot rows, possibly 0. A number: a total over all tables, for the most frequent rows;
            ``0`` is the packed unique exchange without replicas. A mapping ``{table: rows}``: these
            tables are hot/cold with these numbers of hot rows, others stock if they can.
            With either, rows go by host only if ``constraints`` ask for it.
        curves: Measured costs, see :class:`torchrec_picasso.CommCurves`; ``None`` = the bandwidths
            of ``topology``, if the cost model chooses.
        constraints: TorchRec's constraints by table name. A ``HotColdParams`` as ``cache_params``
            makes its table hot/cold with that form, and with those hot rows if the cost model
            chooses.
        batch_size: Samples per rank and step; ``None`` = TorchRec's default.
        num_waves: Number of waves of about equal volume for the hot/cold tables of a module,
            staggered by :class:`torchrec_picasso.InterleavedTrainPipeline`. Several waves are
            faster if batches are not split, as with BatchNorm; figures are in docs/dev/log.md.
        dense_ms: Forward and backward of the model without tables, milliseconds per rank and step,
            which hide the exchange. ``None`` = the times in ``curves`` (``torchrec-picasso
            calibrate --config``), else 0.
        planner_kwargs: Other arguments of TorchRec's ``EmbeddingShardingPlanner``.

    Returns:
        An ``EmbeddingShardingPlanner``; if planning fails, all ranks of ``collective_plan`` raise.

    Raises:
        PlanError: If an argument has the wrong type or range, or the curves are of a single rank.

    Warns:
        UserWarning: If the curves are of another world size or device.
    """
    for name, value, kind, source in (
        ("curves", curves, CommCurves, "CommCurves.measure or CommCurves.from_json"),
        ("stats", stats, FrequencyStats, "FrequencyStats.collect or FrequencyStats.from_parquet"),
    ):
        if value is not None and not isinstance(value, kind):
            raise PlanError(
                f"{name} is a {type(value).__name__}, expected {kind.__name__}; create it with "
                f"{source}"
            )
    device, world_size = topology.compute_device, topology.world_size
    mismatch = curves.mismatch(world_size=world_size, device=device) if curves is not None else None
    if mismatch is not None:
        message = f"{mismatch}: times are extrapolated; calibrate on the training hardware"
        warnings.warn(message, stacklevel=2)
    if "enumerator" in planner_kwargs:
        raise PlanError(
            "enumerator was given, but hot_cold_planner creates its own; leave it out, or create "
            "an EmbeddingShardingPlanner with a HotColdEnumerator"
        )
    if num_waves < 1:
        raise PlanError(f"num_waves is {num_waves}, expected at least 1")
    if dense_ms is not None and not 0 <= dense_ms < math.inf:
        raise PlanError(f"dense_ms is {dense_ms}, expected milliseconds of at least 0")
    batch_size = batch_size or BATCH_SIZE
    # a proposer of the caller searches all options; ours follow if the decided plan does not fit
    only_decided = planner_kwargs.get("proposer") is None
    if only_decided:
        # TorchRec's proposers; on the CPU its grid search is slow and finds no better plan
        greedy = [GreedyProposer(), GreedyProposer(use_depth=False), UniformProposer()]
        planner_kwargs["proposer"] = greedy if device == "cpu" else [GridSearchProposer(), *greedy]
    enumerator = HotColdEnumerator(
        topology, batch_size, hot_rows, stats, curves, num_waves, dense_ms, constraints=constraints
    )
    enumerator.only_decided = only_decided
    planner_kwargs |= {"batch_size": batch_size, "constraints": constraints}
    return HotColdPlanner(topology=topology, enumerator=enumerator, **planner_kwargs)


class HotColdPlanner(EmbeddingShardingPlanner):
    """TorchRec's planner with an explanation of the plan; created by :func:`hot_cold_planner`.

    A failure of rank 0 is raised on all ranks; with TorchRec's planner the others wait in a
    broadcast.
    """

    _enumerator: HotColdEnumerator

    @property
    def decision(self) -> Decision:
        """The decision of the last plan, on the rank that made it; ``PlanError`` without one."""
        decision = self._enumerator.decision
        if decision is None:
            raise PlanError(
                "there is no decision yet: call plan(model, sharders) first, on this rank "
                "(collective_plan decides on rank 0)"
            )
        return decision

    def explain(self) -> pd.DataFrame:
        """Returns the placement of each table, and the reason, see :func:`.explain.explain`;
        ``PlanError`` if there is no plan yet, or nothing was decided."""
        return explain(self.decision)

    def plan(self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]) -> ShardingPlan:
        """Plans an unsharded model without a process group. Raises PlanError if the tables do not
        fit; it names the rank, the largest table and the memory that is sufficient."""
        only_decided = self._enumerator.only_decided
        try:
            try:
                plan = super().plan(module, sharders)
            except PlannerError as error:
                _LOGGER.warning(
                    "the plan with the shortest predicted step does not fit into memory, so "
                    "TorchRec's proposers search for another plan: %s",
                    self._shortage(error),
                )
                self._enumerator.only_decided = self._enumerator.has_spare_memory = False
                plan = super().plan(module, sharders)
        except PlannerError as error:
            raise self._shortage(error) from error
        finally:
            self._enumerator.only_decided = only_decided
            self._enumerator.has_spare_memory = True
        if self._enumerator.decision is not None:
            _log(self._enumerator.decision)
        return plan

    def _shortage(self, error: PlannerError) -> Exception:
        """Returns the error that names the rank, the need and what would fit, else TorchRec's."""
        space = self._enumerator.last_stored_search_space or []
        left = self._storage_reservation.last_reserved_topology
        return explain_shortage(space, self._topology, left or self._topology) or error

    def collective_plan(
        self,
        module: nn.Module,
        sharders: list[ModuleSharder[nn.Module]] | None = None,
        pg: dist.ProcessGroup | None = None,
    ) -> ShardingPlan:
        """Plans on the first rank of ``pg`` and broadcasts the plan. Collective. If planning fails,
        the first rank raises the error, the others PlanError with its message."""
        # rows go by host unasked only where all ranks can, not the one that plans alone
        places_W: list[Any] = [None] * dist.get_world_size(pg)
        dist.all_gather_object(places_W, launched_place(), group=pg)
        self._enumerator.no_launched_hosts = why_no_hosts(places_W)
        failure: Exception | None = None
        outcome: list[Any] = [None, None]  # plan, error message
        if dist.get_rank(pg) == 0:
            try:
                outcome[0] = self.plan(module, sharders or get_default_sharders())
            except Exception as error:
                failure = error
                outcome[1] = f"{type(error).__name__}: {error}"
        # a failure is broadcast as well: otherwise the other ranks would wait until the timeout
        dist.broadcast_object_list(outcome, group_src=0, group=pg)
        if failure is not None:
            raise failure
        if outcome[1] is not None:
            raise PlanError(f"planning failed on rank 0: {outcome[1]}")
        return outcome[0]


def _log(decision: Decision) -> None:
    """Logs a summary of the plan; without hot/cold tables, a warning with the reason."""
    reason = why_nothing_is_hot_cold(decision)
    if reason is not None:
        _LOGGER.warning("no table is hot/cold, so this package has no effect: %s", reason)
        return
    names = ("hot_cold_tables", "bag_tables", "hot_rows", "stock_tables", "step_ms")
    _LOGGER.info(
        "%d tables hot/cold (%d owner-pooled) with %d hot rows, %d stock; predicted step %.1f ms",
        *map(summarize(decision).__getitem__, names),
    )
