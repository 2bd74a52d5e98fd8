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
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.stats import NoopEmbeddingStats
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.types import ShardingPlan

from benchmarks.fields.field_specs import FieldSpec
from benchmarks.fields.model import FieldsModel
from torchrec_picasso import (
    CommCurves,
    FrequencyStats,
    HotColdEmbeddingBagCollectionSharder,
    hot_cold_planner,
)
from torchrec_picasso.decision.explain import summarize
from torchrec_picasso.runs.placements import AnyTypeSharder, Placement

__all__ = ["Planned", "deal_by_size", "plan_hot_cold", "plan_stock", "plan_table_wise"]


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
    fields: Sequence[FieldSpec], model: FieldsModel, pg: dist.ProcessGroup
) -> Planned:
    """Whole tables, the largest first, each to the rank that has the fewest bytes.

    Args:
        fields: Of the model.
        model: Before sharding.
        pg: The ranks.
    """
    homes = deal_by_size([of.num_embeddings * of.dim for of in fields], pg.size())
    sharder: Any = EmbeddingBagCollectionSharder()
    plan = construct_module_sharding_plan(
        model.collection,
        {
            of.table: table_wise(rank=rank, compute_kernel="fused")
            for of, rank in zip(fields, homes)
        },
        sharder,
        local_size=1,
        world_size=pg.size(),
        device_type="cpu",
    )
    placement = Placement(
        name="table_wise", plan=ShardingPlan({"collection": plan}), sharders=[sharder]
    )
    return Planned(placement=placement)


def deal_by_size(sizes: Sequence[int], num_ranks: int) -> list[int]:
    """The rank of each table when the largest is dealt first, always to the lightest rank.

    Args:
        sizes: Of the tables.
        num_ranks: Ranks.
    """
    held = [0] * num_ranks
    homes = [0] * len(sizes)
    for table in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        homes[table] = min(range(num_ranks), key=lambda rank: held[rank])
        held[homes[table]] += sizes[table]
    return homes


def plan_stock(
    fields: Sequence[FieldSpec], model: FieldsModel, pg: dist.ProcessGroup, batch_size: int
) -> Planned:
    """TorchRec's planner. Collective.

    Args:
        fields: Of the model.
        model: Before sharding.
        pg: The ranks, each on a host of its own.
        batch_size: Samples per rank and step.
    """
    sharder: Any = AnyTypeSharder()
    planner = EmbeddingShardingPlanner(
        topology=_topology(pg),
        batch_size=batch_size,
        constraints={
            of.table: ParameterConstraints(
                sharding_types=["table_wise"] if of.mean else ["table_wise", "row_wise"],
                compute_kernels=["fused"],
                pooling_factors=[float(of.pooling_factor)],
            )
            for of in fields
        },
        stats=NoopEmbeddingStats(),
        debug=False,
    )
    plan = planner.collective_plan(model, [sharder], pg)
    return Planned(placement=Placement(name="planner", plan=plan, sharders=[sharder]))


def plan_hot_cold(
    model: FieldsModel,
    pg: dist.ProcessGroup,
    batch_size: int,
    hot_rows: int | None,
    stats: FrequencyStats,
    curves: CommCurves,
) -> Planned:
    """This package's planner. Collective.

    Args:
        model: Before sharding.
        pg: The ranks, each on a host of its own.
        batch_size: Samples per rank and step.
        hot_rows: Of all tables; ``None`` = the planner chooses, tables and rows.
        stats: Of held-out batches.
        curves: Of these links.
    """
    sharder: Any = HotColdEmbeddingBagCollectionSharder()
    planner = hot_cold_planner(
        _topology(pg),
        stats,
        hot_rows=hot_rows,
        curves=curves,
        batch_size=batch_size,
        debug=False,
    )
    plan = planner.collective_plan(model, [sharder], pg)
    placement = Placement(name="hot_cold", plan=plan, sharders=[sharder])
    return Planned(placement=placement, says=_in_words(planner) if dist.get_rank(pg) == 0 else "")


def _topology(pg: dist.ProcessGroup) -> Topology:
    return Topology(world_size=pg.size(), local_world_size=1, compute_device="cpu")


def _in_words(planner: Any) -> str:
    of = summarize(planner.decision)
    stock = f"{of['stock_ms']:.1f}" if of["stock_ms"] is not None else "-"
    return (
        f"predicts {of['step_ms']:.1f} ms and {of['sent_bytes'] / 1e6:.2f} MB per step, "
        f"all stock {stock} ms"
    )
