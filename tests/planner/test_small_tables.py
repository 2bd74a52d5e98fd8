"""Tables with fewer rows than ranks: no plan cuts them by rows, which FBGEMM could not train."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import ShardingEnv
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from torchrec_picasso import HotColdEmbeddingBagCollectionSharder, hot_cold_planner
from torchrec_picasso.app.launch.run_ranks import run_ranks

ROWS = {"one": 1, "two": 2, "three": 3, "five": 5, "many": 400}


def _collection() -> EmbeddingBagCollection:
    tables = [
        EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=4, feature_names=[name])
        for name, rows in ROWS.items()
    ]
    collection = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
    apply_optimizer_in_backward(RowWiseAdagrad, collection.parameters(), {"lr": 0.1})
    return collection


def _planner(world_size: int, **of: Any) -> Any:
    topology = Topology(world_size=world_size, compute_device="cpu")
    return hot_cold_planner(topology, hot_rows=None, batch_size=8, debug=False, **of)


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_what_has_no_rows_for_a_rank_stays_whole(world_size: int) -> None:
    planner = _planner(world_size)
    plan = planner.plan(_collection(), [HotColdEmbeddingBagCollectionSharder()])
    for name, placed in plan.plan[""].items():
        if placed.sharding_type == "row_wise" and placed.cache_params is None:
            per_rank = -(-ROWS[name] // world_size)
            assert per_rank * (world_size - 1) < ROWS[name]


def test_it_is_cut_where_nothing_else_is_allowed() -> None:
    constraint = ParameterConstraints(sharding_types=["row_wise"], compute_kernels=["fused"])
    planner = _planner(4, constraints={"one": constraint})
    plan = planner.plan(_collection(), [HotColdEmbeddingBagCollectionSharder()])
    assert plan.plan[""]["one"].sharding_type == "row_wise"


def _train(rank: int, world_size: int) -> dict[str, str]:
    pg, sharder = dist.group.WORLD, HotColdEmbeddingBagCollectionSharder()
    plan = _planner(world_size).collective_plan(_collection(), [sharder], pg)
    model = DistributedModelParallel(
        _collection(), ShardingEnv.from_process_group(pg), torch.device("cpu"), plan, [sharder]
    )
    for step in range(3):
        ids = [torch.arange(8).add(step) % rows for rows in ROWS.values()]
        lengths = torch.ones(8 * len(ROWS), dtype=torch.int64)
        features = KeyedJaggedTensor(list(ROWS), torch.cat(ids), lengths=lengths)
        model(features).values().sum().backward()
    return {name: placed.sharding_type for name, placed in plan.plan[""].items()}


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_plan_trains(world_size: int) -> None:
    for types in run_ranks(_train, world_size, timeout_s=60):
        assert types["one"] == "table_wise"
