"""Plans and sharders by name: this package's planner, or TorchRec's with stock sharding types."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.proposers import GreedyProposer, UniformProposer
from torchrec.distributed.planner.stats import NoopEmbeddingStats
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    ModuleSharder,
    ShardingPlan,
    ShardingType,
)
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from torchrec_picasso.app.config import PLACEMENTS
from torchrec_picasso.app.zoo.tables import tables_of
from torchrec_picasso.cost import CommCurves
from torchrec_picasso.errors import PlanError
from torchrec_picasso.frequency import FrequencyStats
from torchrec_picasso.placement import FORMS, Form, HotColdParams
from torchrec_picasso.planner import hot_cold_planner
from torchrec_picasso.sharding.sharder import (
    HotColdEmbeddingBagCollectionSharder,
    HotColdEmbeddingCollectionSharder,
)

STOCK_PLACEMENTS = ("table_wise", "row_wise", "column_wise")
"""Placements of one stock sharding type, for all tables that support it."""

_MIN_COLUMNS = 4  # FBGEMM's narrowest shard


@dataclass(frozen=True, kw_only=True)
class Placement:
    """A plan, the same on all ranks, and the sharders that follow it.

    ``hot_rows`` has the replicated row ids by table, ascending; it is empty for stock placements.
    """

    name: str
    plan: ShardingPlan
    sharders: list[ModuleSharder[nn.Module]]
    hot_rows: Mapping[str, Tensor] = field(default_factory=dict)


class AnyTypeSharder(EmbeddingBagCollectionSharder):
    """TorchRec's sharder with the row-wise type on the CPU too, where stock leaves it out."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Table-wise, column-wise and row-wise."""
        kinds = (ShardingType.TABLE_WISE, ShardingType.COLUMN_WISE, ShardingType.ROW_WISE)
        return [kind.value for kind in kinds]


def hot_cold_sharders() -> list[Any]:
    """This package's sharders, for pooled and for sequence embeddings."""
    return [HotColdEmbeddingBagCollectionSharder(), HotColdEmbeddingCollectionSharder()]


def make_placement(
    name: str,
    model: nn.Module,
    pg: dist.ProcessGroup,
    *,
    device_type: str,
    batch_size: int,
    hot_rows: int | Mapping[str, int] | None = 0,
    stats: FrequencyStats | None = None,
    curves: CommCurves | None = None,
    num_waves: int = 1,
) -> Placement:
    """Plans a model. Collective: every rank of ``pg`` calls this, in the same order.

    Args:
        name: One of :data:`torchrec_picasso.app.config.PLACEMENTS`.
        model: Unsharded model; tables may be on the meta device.
        pg: Ranks that train.
        device_type: ``"cpu"`` or ``"cuda"``.
        batch_size: Samples per rank and step.
        hot_rows: Rows to replicate, in total or by table; ``None`` = the planner chooses. This and
            the following are for ``hot_cold``.
        stats: Access statistics.
        curves: Measured costs.
        num_waves: Groups of packs that are exchanged one by one.

    Raises:
        PlanError: If ``name`` is unknown, or the hot rows cannot be placed.
    """
    if name not in PLACEMENTS:
        raise PlanError(f"placement: expected one of {', '.join(PLACEMENTS)}; got {name!r}")
    topology = Topology(world_size=pg.size(), compute_device=device_type)
    if name == "hot_cold":
        sharders = hot_cold_sharders()
        planner = hot_cold_planner(
            topology,
            stats,
            hot_rows=dict(hot_rows) if isinstance(hot_rows, Mapping) else hot_rows,
            curves=curves,
            batch_size=batch_size,
            num_waves=num_waves,
            debug=False,
        )
    else:
        sharders = [AnyTypeSharder(), EmbeddingCollectionSharder()]
        planner = EmbeddingShardingPlanner(
            topology=topology,
            batch_size=batch_size,
            proposer=[GreedyProposer(), UniformProposer()],
            stats=NoopEmbeddingStats(),
            constraints=_stock_constraints(name, model, pg.size()),
            debug=False,
        )
    plan = planner.collective_plan(model, sharders, pg)
    return Placement(name=name, plan=plan, sharders=sharders, hot_rows=_hot_rows_of(plan))


def with_form(stock: Placement, model: nn.Module, form: Form) -> Placement:
    """Makes the tables of a plan of the form's sharding type hot/cold, with the same homes and
    without hot rows, in place; sequences are never bags."""
    for path, module_plan in stock.plan.plan.items():
        is_pooled = isinstance(model.get_submodule(path), EmbeddingBagCollection)
        if is_pooled or not FORMS[form].sends_bags:
            for sharding in module_plan.values():
                sharding.cache_params = HotColdParams(form=form)
    return Placement(name=form, plan=stock.plan, sharders=hot_cold_sharders())


def _stock_constraints(
    name: str, model: nn.Module, world_size: int
) -> dict[str, ParameterConstraints]:
    kinds = STOCK_PLACEMENTS if name == "planner" else (name,)
    return {
        table.name: ParameterConstraints(
            sharding_types=_trainable(kinds, table.num_embeddings, world_size),
            compute_kernels=["fused"],
            min_partition=_column_width(table.embedding_dim, world_size),
        )
        for table in tables_of(model)
    }


def _trainable(kinds: Sequence[str], num_embeddings: int, world_size: int) -> list[str]:
    """The sharding types that stock can train for a table of ``num_embeddings`` rows.

    Row-wise shards are equal, so the last ranks of a small table may get no rows, and FBGEMM's CPU
    backward reads out of bounds if the last table of a rank is empty. Such tables are table-wise.
    """
    shard_rows = -(-num_embeddings // world_size)
    if shard_rows * (world_size - 1) < num_embeddings:
        return list(kinds)
    return [kind for kind in kinds if kind != "row_wise"] or ["table_wise"]


def _column_width(embedding_dim: int, world_size: int) -> int:
    """Columns per rank of a table that is sharded column-wise over all ranks, as FBGEMM allows."""
    even = embedding_dim // world_size // _MIN_COLUMNS * _MIN_COLUMNS
    return even if even and embedding_dim % even == 0 else embedding_dim


def _hot_rows_of(plan: ShardingPlan) -> dict[str, Tensor]:
    return {
        table: sharding.cache_params.hot_rows
        for module_plan in plan.plan.values()
        if isinstance(module_plan, EmbeddingModuleShardingPlan)
        for table, sharding in module_plan.items()
        if isinstance(sharding.cache_params, HotColdParams)
    }
