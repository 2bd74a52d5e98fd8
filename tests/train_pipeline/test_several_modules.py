"""Two interleaved modules in one model, in different numbers of waves, against the plain loop."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torchrec
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.datasets.utils import Batch
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingEnv, ShardingPlan

from tests.sharding.jobs import CPU, local_shards
from tests.train_pipeline.runs import ATOL, RTOL, pipeline_of, plain_steps, run_to_the_end
from torchrec_picasso import HotColdEmbeddingBagCollectionSharder, HotColdParams
from torchrec_picasso.app.launch.run_ranks import run_ranks

NUM_STEPS = 5
TABLES = {"user": {"u": (8, 30, 0)}, "item": {"i": (8, 20, 0), "j": (4, 10, 1), "k": (8, 5, 7)}}
"""By module and table: dim, rows and wave."""
FEATURES = {name: rows for tables in TABLES.values() for name, (_, rows, _) in tables.items()}


class Towers(nn.Module):
    """A user and an item tower over the same batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.user, self.item = (_collection(tables) for tables in TABLES.values())
        width = sum(dim for tables in TABLES.values() for dim, _, _ in tables.values())
        self.over = nn.Linear(width, 1)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        user, item = self.user(batch.sparse_features), self.item(batch.sparse_features)
        values = [user["u"], item["i"], item["j"], item["k"]]
        out = self.over(torch.cat(values, dim=1)).squeeze(1)
        return ((out - batch.labels) ** 2).sum() / 6, out.detach()


def _collection(tables: dict[str, tuple[int, int, int]]) -> EmbeddingBagCollection:
    return EmbeddingBagCollection(
        device=CPU,
        tables=[
            EmbeddingBagConfig(
                name=name, embedding_dim=dim, num_embeddings=rows, feature_names=[name]
            )
            for name, (dim, rows, _) in tables.items()
        ],
    )


def _build(world_size: int) -> DistributedModelParallel:
    model = Towers()
    apply_optimizer_in_backward(
        torchrec.optim.RowWiseAdagrad,
        [*model.user.parameters(), *model.item.parameters()],
        {"lr": 0.1},
    )
    sharder = HotColdEmbeddingBagCollectionSharder()
    plans = {}
    for path, tables in TABLES.items():
        plans[path] = construct_module_sharding_plan(
            getattr(model, path),
            {name: row_wise() for name in tables},
            sharder=sharder,
            local_size=world_size,
            world_size=world_size,
            device_type="cpu",
        )
        for name, (_, _, wave) in tables.items():
            plans[path][name].cache_params = HotColdParams(hot_rows=[0, 3], wave=wave)
    torch.manual_seed(0)  # tables start alike in every model
    return DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=CPU,
        plan=ShardingPlan(plan=plans),
        sharders=[sharder],
    )


def _batch(rank: int, step: int) -> Batch:
    generator = torch.Generator().manual_seed(10 * step + rank)
    lengths = torch.randint(0, 4, (len(FEATURES), 6), generator=generator)
    values = [
        torch.randint(0, rows, (int(length.sum()),), generator=generator)
        for rows, length in zip(FEATURES.values(), lengths)
    ]
    features = KeyedJaggedTensor([*FEATURES], torch.cat(values), lengths=lengths.flatten())
    labels = torch.rand(6, generator=generator)
    return Batch(dense_features=torch.zeros(6, 1), sparse_features=features, labels=labels)


def _left_behind(model: DistributedModelParallel, outputs: list[Tensor]) -> dict[str, Any]:
    """A rank's outputs, weights and optimizer state."""
    values = dict(model.state_dict())
    for name, states in model.fused_optimizer.state_dict()["state"].items():
        values |= {f"{name}/{key}": value for key, value in states.items()}
    found: dict[str, Any] = {"outputs": outputs}
    for name, value in values.items():
        found[name] = [tensor for _, tensor in local_shards(value)]
    return found


def _run(rank: int, world_size: int) -> dict[Any, dict[str, Any]]:
    batches = [_batch(rank, step) for step in range(NUM_STEPS)]
    model = _build(world_size)
    results: dict[Any, dict[str, Any]] = {
        "plain": _left_behind(model, plain_steps(model, batches)),
    }
    for num_micro_batches in (1, 3):
        model = _build(world_size)
        pipeline = pipeline_of(model, num_micro_batches=num_micro_batches)
        outputs = run_to_the_end(pipeline, iter(batches))
        assert {op.wave for op in pipeline.schedule} == {None, 0, 1, 2}
        summary = pipeline.summary().splitlines()
        assert set(summary[:2]) == {"user: interleaved", "item: interleaved in 3 waves"}
        results[num_micro_batches] = _left_behind(model, outputs)
    return results


@cache
def _by_rank(world_size: int) -> list[dict[Any, dict[str, Any]]]:
    return run_ranks(_run, world_size, timeout_s=100)


@pytest.mark.parametrize("num_micro_batches", [1, 3])
@pytest.mark.parametrize("world_size", [2, 3])
def test_trains_as_the_plain_loop(world_size: int, num_micro_batches: int) -> None:
    for results in _by_rank(world_size):
        assert len(results["plain"]) == 1 + 2 * 4 + 2  # outputs, tables and states, dense
        torch.testing.assert_close(
            results[num_micro_batches], results["plain"], rtol=RTOL, atol=ATOL
        )
