"""Two EmbeddingBagCollections in one model: two exchanges in one order, stock's result."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torchrec
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import (
    construct_module_sharding_plan,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingEnv, ShardingPlan

from tests.sharding.jobs import CPU, load_whole
from torchrec_picasso import HotColdEmbeddingBagCollectionSharder, HotColdParams
from torchrec_picasso.app.launch.run_ranks import run_ranks


class Towers(nn.Module):
    """A user and an item tower that share a batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.user = EmbeddingBagCollection(device=CPU, tables=[_table("u", 30, ["f0", "f1"])])
        self.item = EmbeddingBagCollection(device=CPU, tables=[_table("i", 20, ["f2"])])

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        user = self.user(_select(features, ["f0", "f1"]))
        item = self.item(_select(features, ["f2"]))
        return ((user["f0"] + user["f1"]) * item["f2"]).sum(1)


def _table(name: str, rows: int, features: list[str]) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(
        name=name, embedding_dim=8, num_embeddings=rows, feature_names=features
    )


def _select(features: KeyedJaggedTensor, keys: list[str]) -> KeyedJaggedTensor:
    return features.permute([features.keys().index(key) for key in keys])


def _features(rank: int, step: int) -> KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    lengths = torch.randint(0, 4, (3, 5), generator=generator)
    values = [
        torch.randint(0, rows, (int(length.sum()),), generator=generator)
        for rows, length in zip((30, 30, 20), lengths)
    ]
    return KeyedJaggedTensor(["f0", "f1", "f2"], torch.cat(values), lengths=lengths.flatten())


def _train(rank: int, world_size: int, ours: bool) -> list[float]:
    model = Towers()
    start = {name: value.clone() for name, value in model.state_dict().items()}
    apply_optimizer_in_backward(torchrec.optim.RowWiseAdagrad, model.parameters(), {"lr": 0.1})
    sharder = HotColdEmbeddingBagCollectionSharder() if ours else EmbeddingBagCollectionSharder()
    plans = {}
    for i, (fqn, table) in enumerate({"user": "u", "item": "i"}.items()):
        plans[fqn] = construct_module_sharding_plan(
            getattr(model, fqn),
            {table: row_wise() if ours else table_wise(rank=i)},
            sharder=sharder,
            local_size=world_size,
            world_size=world_size,
            device_type="cpu",
        )
        if ours:
            plans[fqn][table].cache_params = HotColdParams(hot_rows=range(3 * i))
    sharded = DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=CPU,
        plan=ShardingPlan(plan=plans),
        sharders=[sharder],
    )
    load_whole(sharded, start)
    losses = []
    for step in range(8):
        loss = ((sharded(_features(rank, step)) - 1) ** 2).mean()
        loss.backward()
        losses.append(loss.item())
    return losses


def test_equals_stock() -> None:
    stock = run_ranks(_train, 2, False, timeout_s=60)
    ours = run_ranks(_train, 2, True, timeout_s=60)
    assert stock[0][-1] != stock[0][0]
    for mine, its in zip(ours, stock):
        torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-6)
