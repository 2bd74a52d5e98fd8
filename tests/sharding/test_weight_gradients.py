"""Per-sample weights get the gradients that stock TorchRec gives them: through feature processors.

Stock TorchRec sends per-sample weights with the ids, outside the autograd graph; only a
FeatureProcessedEmbeddingBagCollection makes weights after the exchange, and trains what made them.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torchrec
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import (
    construct_module_sharding_plan,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

from tests.sharding.jobs import CPU, load_whole
from torchrec_picasso import HotColdEmbeddingBagCollectionSharder, HotColdParams
from torchrec_picasso.app.launch.run_ranks import run_ranks

FEATURES = ("f0", "f1", "f2")
ROWS = {"a": 40, "b": 9}
MAX_LENGTH = 4


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        tables = [
            EmbeddingBagConfig(name="a", embedding_dim=8, num_embeddings=40, feature_names=["f0"]),
            EmbeddingBagConfig(
                name="b", embedding_dim=8, num_embeddings=9, feature_names=["f1", "f2"]
            ),
        ]
        self.fp_ebc = FeatureProcessedEmbeddingBagCollection(
            EmbeddingBagCollection(tables=tables, is_weighted=True, device=CPU),
            PositionWeightedModuleCollection(dict.fromkeys(FEATURES, MAX_LENGTH), device=CPU),
        )

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        pooled = self.fp_ebc(features)
        return torch.cat([pooled[f] for f in FEATURES], dim=1)


def _features(rank: int, step: int) -> KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    lengths = torch.randint(0, MAX_LENGTH + 1, (3, 5), generator=generator)
    rows = (40, 9, 9)
    values = [
        torch.randint(0, n, (int(length.sum()),), generator=generator)
        for n, length in zip(rows, lengths)
    ]
    return KeyedJaggedTensor(
        keys=list(FEATURES), values=torch.cat(values), lengths=lengths.flatten()
    )


def _train(rank: int, world_size: int, hot_rows: int | None) -> tuple[list[float], list[Tensor]]:
    model = Model()
    start = {name: value.clone() for name, value in model.state_dict().items()}
    ebc = model.fp_ebc._embedding_bag_collection
    apply_optimizer_in_backward(torchrec.optim.RowWiseAdagrad, ebc.parameters(), {"lr": 0.1})
    ours = hot_rows is not None
    inner = HotColdEmbeddingBagCollectionSharder() if ours else EmbeddingBagCollectionSharder()
    plan = construct_module_sharding_plan(
        ebc,
        {name: row_wise() if ours else table_wise(rank=i) for i, name in enumerate(ROWS)},
        sharder=inner,
        local_size=world_size,
        world_size=world_size,
        device_type="cpu",
    )
    if hot_rows is not None:
        for name in ROWS:
            plan[name].cache_params = HotColdParams(hot_rows=range(hot_rows))
    sharded = DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=CPU,
        plan=ShardingPlan(plan={"fp_ebc": plan}),
        sharders=[FeatureProcessedEmbeddingBagCollectionSharder(inner)],
    )
    load_whole(sharded, start)
    positions = [p for name, p in sharded.named_parameters() if "position_weights" in name]
    optimizer = torch.optim.SGD(positions, lr=0.1)
    losses = []
    for step in range(6):
        optimizer.zero_grad()
        loss = ((sharded(_features(rank, step)) - 1) ** 2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [p.detach().clone() for p in positions]


@pytest.mark.parametrize("hot_rows", [0, 5])
def test_position_weights_train_as_in_stock(hot_rows: int) -> None:
    stock = run_ranks(_train, 2, None, timeout_s=60)
    ours = run_ranks(_train, 2, hot_rows, timeout_s=60)
    for (losses, positions), (stock_losses, stock_positions) in zip(ours, stock):
        torch.testing.assert_close(losses, stock_losses, rtol=1e-5, atol=1e-6)
        assert len(positions) == len(FEATURES)
        assert any((p != 1).any() for p in positions)
        torch.testing.assert_close(positions, stock_positions, rtol=1e-5, atol=1e-6)
