"""TorchRec's own sharding harness, run on our gloo ranks with any sharder.

The harness builds an unsharded TestSparseNN on every rank, trains both for a step on the same global
batch, and compares predictions; it also compares state-dict keys with parameters and buffers. The wheel
leaves out ``torchrec.distributed.tests``, which the harness imports one class from, so a stand-in
module takes its place before the import, in every process.
"""

from __future__ import annotations

import sys
import types
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import ParameterConstraints
from torchrec.distributed.types import ShardingType
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType

from torchrec_picasso import HotColdEmbeddingBagCollectionSharder, HotColdParams

__all__ = ["Case", "run_case"]


@dataclass(frozen=True)
class Case:
    """One run of the harness.

    ``hot_rows`` is the number of hot rows per table, ``None`` for TorchRec's own sharder, table-wise.
    """

    hot_rows: int | None
    mean: bool = False
    weighted: bool = True
    variable_batch: bool = False
    batch_per_feature: bool = False


def run_case(rank: int, world_size: int, case: Case) -> bool:
    """Runs the harness on this rank; raises where sharded and unsharded differ."""
    _stand_in_for_missing_tests()
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec.distributed.test_utils.test_model import TestSparseNN
    from torchrec.distributed.test_utils.test_sharding import (
        sharding_single_rank_test_single_process,
    )

    tables, weighted_tables = _tables(case)
    ours = case.hot_rows is not None
    sharder_class = HotColdEmbeddingBagCollectionSharder if ours else EmbeddingBagCollectionSharder
    sharding_type = ShardingType.ROW_WISE if ours else ShardingType.TABLE_WISE
    optim = EmbOptimType.EXACT_SGD  # the only one the harness compares
    constraints = {
        table.name: ParameterConstraints(
            sharding_types=[sharding_type.value],
            compute_kernels=["fused"],
            cache_params=HotColdParams(hot_rows=range(min(case.hot_rows, table.num_embeddings)))
            if case.hot_rows is not None
            else None,
        )
        for table in [*tables, *weighted_tables]
    }
    sharding_single_rank_test_single_process(
        pg=dist.group.WORLD,
        device=torch.device("cpu"),
        rank=rank,
        world_size=world_size,
        model_class=TestSparseNN,
        embedding_groups={"group_0": [f"feature_{i}" for i in range(4)]},
        tables=tables,
        weighted_tables=weighted_tables or None,
        sharders=[sharder_class(fused_params={"optimizer": optim, "learning_rate": 0.1})],
        optim=optim,
        constraints=constraints,
        variable_batch_size=case.variable_batch,
        variable_batch_per_feature=case.batch_per_feature,
        random_seed=7,
    )
    return True


def _tables(case: Case) -> tuple[list[EmbeddingBagConfig], list[EmbeddingBagConfig]]:
    pooling = PoolingType.MEAN if case.mean else PoolingType.SUM
    tables = [
        EmbeddingBagConfig(
            num_embeddings=(i + 1) * 10,
            embedding_dim=(i % 2 + 1) * 8,
            name=f"table_{i}",
            feature_names=[f"feature_{i}"],
            pooling=pooling,
        )
        for i in range(4)
    ]
    weighted = [
        EmbeddingBagConfig(
            num_embeddings=(i + 1) * 10,
            embedding_dim=8,
            name=f"weighted_table_{i}",
            feature_names=[f"weighted_feature_{i}"],
        )
        for i in range(2)
    ]
    return tables, weighted if case.weighted else []


def _stand_in_for_missing_tests() -> None:
    missing = "torchrec.distributed.tests"
    if f"{missing}.test_sequence_model" in sys.modules:
        return
    package: Any = types.ModuleType(missing)
    module: Any = types.ModuleType(f"{missing}.test_sequence_model")
    module.TestEmbeddingCollectionSharder = type("TestEmbeddingCollectionSharder", (nn.Module,), {})
    package.test_sequence_model = module
    sys.modules[missing] = package
    sys.modules[module.__name__] = module
