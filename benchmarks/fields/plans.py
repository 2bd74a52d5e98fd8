"""Where tables go: TorchRec's own planner, tables dealt out by size, and this package's planner.

TorchRec's planner is told ids per sample, as its users tell it, and is not offered what trains
another model: cuts by columns, since row-wise Adagrad keeps a state per cut, and averaged fields
row-wise, since TorchRec then divides the outputs of table-wise tables, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.stats import NoopEmbeddingStats
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingPlan

from benchmarks.fields.workload import ModelTable
from torchrec_picasso import (
    CommCurves,
    FrequencyStats,
    hot_cold_planner,
)
from torchrec_picasso.app.runs.placements import (
    AnyTypeSharder,
    Placement,
    hot_cold_sharders,
    with_form,
)
from torchrec_picasso.planner.decision import Decision
from torchrec_picasso.planner.explain import summarize
from torchrec_picasso.planner.planner import HotColdPlanner


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A placement and what its planner says of it.

    Args:
        placement: Plan and sharders, the same on all ranks.
        says: One line of what is predicted, on the rank that planned; else empty.
    """

    placement: Placement
    says: str = ""


def plan_table_wise(
    tables: Sequence[ModelTable], model: nn.Module, pg: dist.ProcessGroup
) -> Planned:
    """Whole tables, the largest first, each to the rank that has the fewest bytes."""
    homes = deal_by_size([table.num_embeddings * table.dim for table in tables], pg.size())
    return _planned("table_wise", tables, [{"rank": rank} for rank in homes], model, pg)


def plan_in_parts(
    kind: str, tables: Sequence[ModelTable], model: nn.Module, pg: dist.ProcessGroup
) -> Planned:
    """Every table in a part per rank, of its rows or of its columns."""
    given = {"ranks": list(range(pg.size()))} if kind == "column_wise" else {}
    return _planned(kind, tables, [given] * len(tables), model, pg)


_KINDS = {"table_wise": table_wise, "row_wise": row_wise, "column_wise": column_wise}


def _planned(
    kind: str,
    tables: Sequence[ModelTable],
    given: Sequence[dict[str, Any]],
    model: nn.Module,
    pg: dist.ProcessGroup,
) -> Planned:
    """All tables of one stock kind; ``given`` are its arguments for each table."""
    sharders = _stock_sharders()
    plans = {}
    for path in dict.fromkeys(table.module for table in tables):
        module = model.get_submodule(path)
        (sharder,) = (s for s in sharders if s.module_type is type(module))
        plans[path] = construct_module_sharding_plan(
            module,
            {
                table.name: _KINDS[kind](**arguments, compute_kernel="fused")
                for table, arguments in zip(tables, given)
                if table.module == path
            },
            sharder,
            local_size=1,
            world_size=pg.size(),
            device_type="cpu",
        )
    placement = Placement(name=kind, plan=ShardingPlan(plans), sharders=sharders)
    return Planned(placement=placement)


def plan_bags(tables: Sequence[ModelTable], model: nn.Module, pg: dist.ProcessGroup) -> Planned:
    """The homes of :func:`plan_table_wise`; tables of pooled collections are hot/cold bags."""
    stock = plan_table_wise(tables, model, pg).placement
    return Planned(placement=with_form(stock, model, "bags"))


def _stock_sharders() -> list[Any]:
    return [AnyTypeSharder(), EmbeddingCollectionSharder()]


def deal_by_size(sizes: Sequence[int], num_ranks: int) -> list[int]:
    """The rank of each table when the largest is dealt first, always to the lightest rank."""
    held = [0] * num_ranks
    homes = [0] * len(sizes)
    for table in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        homes[table] = min(range(num_ranks), key=lambda rank: held[rank])
        held[homes[table]] += sizes[table]
    return homes


def plan_stock(
    tables: Sequence[ModelTable], model: nn.Module, pg: dist.ProcessGroup, batch_size: int
) -> Planned:
    """TorchRec's planner. Collective."""
    sharders = _stock_sharders()
    planner = EmbeddingShardingPlanner(
        topology=_topology(pg),
        batch_size=batch_size,
        constraints={
            table.name: ParameterConstraints(
                sharding_types=["table_wise"] if table.mean else ["table_wise", "row_wise"],
                compute_kernels=["fused"],
                pooling_factors=[table.ids_per_sample],
            )
            for table in tables
        },
        stats=NoopEmbeddingStats(),
        debug=False,
    )
    plan = planner.collective_plan(model, sharders, pg)
    return Planned(placement=Placement(name="planner", plan=plan, sharders=sharders))


def plan_hot_cold(
    model: nn.Module,
    pg: dist.ProcessGroup,
    batch_size: int,
    hot_rows: int | None,
    stats: FrequencyStats,
    curves: CommCurves,
) -> Planned:
    """This package's planner. Collective."""
    sharders = hot_cold_sharders()
    planner = _our_planner(pg, batch_size, hot_rows, stats, curves)
    plan = planner.collective_plan(model, sharders, pg)
    placement = Placement(name="hot_cold", plan=plan, sharders=sharders)
    return Planned(placement=placement, says=_in_words(planner) if dist.get_rank(pg) == 0 else "")


def decide_hot_cold(
    model: nn.Module,
    pg: dist.ProcessGroup,
    batch_size: int,
    stats: FrequencyStats,
    curves: CommCurves,
) -> Decision:
    """Decision of this package's planner, made on every rank by itself."""
    planner = _our_planner(pg, batch_size, None, stats, curves)
    planner.plan(model, hot_cold_sharders())
    return planner.decision


def _our_planner(
    pg: dist.ProcessGroup,
    batch_size: int,
    hot_rows: int | None,
    stats: FrequencyStats,
    curves: CommCurves,
) -> HotColdPlanner:
    return hot_cold_planner(
        _topology(pg),
        stats,
        hot_rows=hot_rows,
        curves=curves,
        batch_size=batch_size,
        debug=False,
    )


def _topology(pg: dist.ProcessGroup) -> Topology:
    return Topology(world_size=pg.size(), local_world_size=1, compute_device="cpu")


def _in_words(planner: HotColdPlanner) -> str:
    decision = summarize(planner.decision)
    stock = f"{decision['stock_ms']:.1f}" if decision["stock_ms"] is not None else "-"
    return (
        f"predicts {decision['step_ms']:.1f} ms and {decision['sent_bytes'] / 1e6:.2f} MB "
        f"per step, all stock {stock} ms"
    )
