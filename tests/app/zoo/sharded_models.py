"""A published model sharded by stock TorchRec or by this package, from equal weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import ShardingEnv
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from tests.app.zoo.model_cases import batch_of, build
from torchrec_picasso import (
    FrequencyStats,
    HotColdEmbeddingBagCollectionSharder,
    HotColdEmbeddingCollectionSharder,
    hot_cold_planner,
)
from torchrec_picasso.app.zoo.initial_tables import write_initial_tables
from torchrec_picasso.app.zoo.tables import tables_of

CPU = torch.device("cpu")
BATCH, HOT_ROWS = 24, 20


def sharded(
    name: str,
    *,
    is_stock: bool,
    before: Callable[[nn.Module], None] = lambda model: None,
    after: Callable[[nn.Module], None] | None = None,
) -> tuple[DistributedModelParallel, Any]:
    """A model and its optimizers. Collective.

    Args:
        name: Of a case.
        is_stock: Whole tables of stock TorchRec; else hot/cold ones.
        before: Changes the model before it is sharded.
        after: Wraps its dense part once it is, instead of DDP.
    """
    model, pg = build(name), dist.group.WORLD
    before(model)
    apply_optimizer_in_backward(RowWiseAdagrad, model.embeddings.parameters(), {"lr": 0.1})
    topology = Topology(world_size=dist.get_world_size(), compute_device="cpu")
    sharders: list[Any]
    if is_stock:
        sharders = [EmbeddingBagCollectionSharder(), EmbeddingCollectionSharder()]
        whole = ParameterConstraints(sharding_types=["table_wise"])
        planner: Any = EmbeddingShardingPlanner(
            topology=topology,
            batch_size=BATCH,
            constraints={table.name: whole for table in tables_of(model)},
            debug=False,
        )
    else:
        sharders = [HotColdEmbeddingBagCollectionSharder(), HotColdEmbeddingCollectionSharder()]
        stats = FrequencyStats.collect([batch_of(name, step) for step in range(8)], model)
        planner = hot_cold_planner(
            topology, stats, hot_rows=HOT_ROWS, batch_size=BATCH, debug=False
        )
    plan, tables = planner.collective_plan(model, sharders, pg), tables_of(model)
    env = ShardingEnv.from_process_group(pg)
    sharded = DistributedModelParallel(
        model, env, CPU, plan, sharders, init_data_parallel=after is None
    )
    write_initial_tables(sharded, tables, seed=0)
    if after is not None:
        after(sharded.module)
    dense = dict(in_backward_optimizer_filter(sharded.named_parameters()))
    wrapped = KeyedOptimizerWrapper(dense, lambda of: torch.optim.SGD(of, lr=0.1))
    return sharded, CombinedOptimizer([sharded.fused_optimizer, wrapped])
