"""Plans made by hand, and models that are sharded by them on the ranks that run."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.fbgemm_qcomm_codec import (
    CommType,
    QCommsConfig,
    get_qcomm_codecs_registry,
)
from torchrec.distributed.sharding_plan import construct_module_sharding_plan
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ShardingEnv, ShardingPlan

from torchrec_picasso import HotColdParams

CPU = torch.device("cpu")


def place(
    module: nn.Module,
    sharder: Any,
    ways: Mapping[str, Any],
    hot_cold: Mapping[str, HotColdParams] | None = None,
    pg: dist.ProcessGroup | None = None,
) -> EmbeddingModuleShardingPlan:
    """Places a collection's tables, by name; those in ``hot_cold`` are hot/cold ones."""
    world_size = dist.get_world_size(pg)
    plan = construct_module_sharding_plan(
        module,
        dict(ways),
        sharder=sharder,
        local_size=world_size,
        world_size=world_size,
        device_type="cpu",
    )
    for table, params in (hot_cold or {}).items():
        plan[table].cache_params = params
    return plan


def world_env() -> ShardingEnv:
    return ShardingEnv.from_process_group(dist.group.WORLD)


def distribute(
    model: nn.Module,
    plans: Mapping[str, Any],
    sharders: Iterable[Any],
    pg: dist.ProcessGroup | None = None,
    **options: Any,
) -> DistributedModelParallel:
    """Shards a model, over all ranks by default; plans are by path of the collection."""
    return DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(pg or dist.group.WORLD),
        device=CPU,
        plan=ShardingPlan(plan=dict(plans)),
        sharders=list(sharders),
        **options,
    )


def wire_codecs(precision: str | None) -> Any:
    """Returns what a sharder takes for a precision on the wire, both ways."""
    if precision is None:
        return None
    kind = CommType(precision)
    config = QCommsConfig(forward_precision=kind, backward_precision=kind)
    return get_qcomm_codecs_registry(config, device=CPU)
