"""Any jagged batches: hot/cold training on 2 ranks equals an unsharded model on the global batch.

Compared are each rank's outputs in every step and the weights at the end. Both sides sum a row's
gradient in another order, nothing else differs; three Adagrad steps at learning rate 0.1 turn one
float32 rounding (6e-8 relative) into far less than the tolerance.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, PoolingType
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingEnv, ShardingPlan

from tests.support.strategies import Bags, steps_of_ranks, to_kjt
from torchrec_picasso import HotColdEmbeddingBagCollectionSharder, HotColdParams
from torchrec_picasso.app.launch.run_ranks import run_ranks

WORLD_SIZE = 2
NUM_STEPS = 3
RTOL, ATOL = 1e-4, 1e-5
ADAGRAD = {"lr": 0.1, "eps": 1e-8}

ROWS = {"a": 7, "b": 3, "c": 1}
"""Rows by table; feature ``f_x`` looks up table ``x``. Table c lies on one rank alone."""

HOT_ROWS = {"a": (0, 3), "b": (), "c": (0,)}
"""Some rows, none and all."""


def make_model() -> EmbeddingBagCollection:
    torch.manual_seed(0)
    return EmbeddingBagCollection(
        device=torch.device("cpu"),
        tables=[
            EmbeddingBagConfig(
                name=name,
                embedding_dim=4 * (i + 1),
                num_embeddings=num_rows,
                feature_names=[f"f_{name}"],
                pooling=PoolingType.MEAN if name == "b" else PoolingType.SUM,
            )
            for i, (name, num_rows) in enumerate(ROWS.items())
        ],
    )


def loss_of(outputs_BD: Tensor) -> Tensor:
    return ((outputs_BD - 1.0) ** 2).sum()


def outputs_of(model: Any, bags: Bags) -> Tensor:
    pooled = model(to_kjt(bags))
    return torch.cat([pooled[f"f_{name}"] for name in ROWS], dim=1)


def train_unsharded(steps: list[list[Bags]]) -> tuple[list[list[Tensor]], dict[str, Tensor]]:
    """Outputs by step and rank, and final weights, of one process that sees every rank's batch."""
    model = make_model()
    optimizer = torch.optim.Adagrad(model.parameters(), **ADAGRAD)
    seen = []
    for of_ranks in steps:
        batch_sizes = [len(bags["f_a"]) for bags in of_ranks]
        whole = {
            feature: [bag for bags in of_ranks for bag in bags[feature]] for feature in of_ranks[0]
        }
        outputs_BD = torch.zeros(0, sum(bag.embedding_dim for bag in model.embedding_bag_configs()))
        if sum(batch_sizes):  # TorchRec's unsharded model refuses a batch without samples
            optimizer.zero_grad()
            outputs_BD = outputs_of(model, whole)
            (loss_of(outputs_BD) / WORLD_SIZE).backward()
            optimizer.step()
        seen.append(list(outputs_BD.detach().split(batch_sizes)))
    return seen, {name: bag.weight.detach() for name, bag in model.embedding_bags.items()}


def train_hot_cold(
    rank: int, world_size: int, steps: list[list[Bags]]
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """This rank's outputs by step, and the rows that are at home here."""
    model = make_model()
    start = {name: bag.weight.detach().clone() for name, bag in model.embedding_bags.items()}
    apply_optimizer_in_backward(torch.optim.Adagrad, model.parameters(), ADAGRAD)
    sharder = HotColdEmbeddingBagCollectionSharder()
    plan = construct_module_sharding_plan(
        model,
        {name: row_wise() for name in ROWS},
        sharder=sharder,
        local_size=world_size,
        world_size=world_size,
        device_type="cpu",
    )
    for name, hot_rows in HOT_ROWS.items():
        plan[name].cache_params = HotColdParams(hot_rows=hot_rows)
    sharded = DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=torch.device("cpu"),
        plan=ShardingPlan(plan={"": plan}),
        sharders=[sharder],
    )
    for name, shard in _home_shards(sharded):
        first = shard.metadata.shard_offsets[0]
        shard.tensor.detach().copy_(start[name][first : first + shard.tensor.size(0)])
    seen = []
    for of_ranks in steps:
        outputs_BD = outputs_of(sharded, of_ranks[rank])
        loss_of(outputs_BD).backward()
        seen.append(outputs_BD.detach())
    return seen, {name: shard.tensor.detach() for name, shard in _home_shards(sharded)}


def _home_shards(model: DistributedModelParallel) -> list[tuple[str, Any]]:
    return [
        (key.split(".")[-2], shard)
        for key, value in model.state_dict().items()
        for shard in value.local_shards()
    ]


@settings(max_examples=8, deadline=None, derandomize=True, database=None)
@given(steps=steps_of_ranks({f"f_{n}": rows for n, rows in ROWS.items()}, WORLD_SIZE, NUM_STEPS))
def test_hot_cold_equals_unsharded(steps: list[list[Bags]]) -> None:
    expected_outputs, expected_weights = train_unsharded(steps)
    by_rank = run_ranks(train_hot_cold, WORLD_SIZE, steps, timeout_s=60)
    for rank, (outputs, _) in enumerate(by_rank):
        expected = [of_ranks[rank] for of_ranks in expected_outputs]
        torch.testing.assert_close(outputs, expected, rtol=RTOL, atol=ATOL)
    for name, expected_RD in expected_weights.items():
        homes = [weights[name] for _, weights in by_rank if name in weights]
        torch.testing.assert_close(torch.cat(homes), expected_RD, rtol=RTOL, atol=ATOL)


@settings(max_examples=50, deadline=None, derandomize=True, database=None)
@given(data=st.data())
def test_batches_are_whole(data: st.DataObject) -> None:
    """The strategy itself: ids inside their tables, one bag per sample and feature."""
    rows_of_feature = {"x": 5, "y": 1}
    for of_ranks in data.draw(steps_of_ranks(rows_of_feature, 3, 2)):
        assert len(of_ranks) == 3
        for bags in of_ranks:
            kjt = to_kjt(bags)
            assert kjt.stride() == len(bags["x"]) == len(bags["y"])
            for feature, num_rows in rows_of_feature.items():
                ids = kjt[feature].values().tolist()
                assert all(0 <= row < num_rows for row in ids)
