"""The same tensors on CUDA: plan of a batch, pooling, and a training step at world size 1.

Skipped where there is no GPU. World size 1 over NCCL is what one GPU can show; that collectives of
several ranks agree is shown on gloo.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from torchrec_picasso.ops.packed_ids import PackedIdSpace, PackedTable
from torchrec_picasso.ops.partition import partition_rows
from torchrec_picasso.ops.segment_reduction import (
    PoolingIndex,
    gradient_of_rows,
    pool_rows,
)
from torchrec_picasso.ops.unique import unique_rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda")
TABLES = (
    PackedTable(
        name="a", pack=0, block_rows_W=(30, 20), hot_rows_H=torch.tensor([0, 7, 31]),
        feature_names=("f0", "f1"),
    ),
    PackedTable(
        name="b", pack=1, block_rows_W=(1, 0), hot_rows_H=torch.empty(0, dtype=torch.int64),
        feature_names=("f2",),
    ),
)  # fmt: skip


def test_partition_is_the_same_as_on_cpu() -> None:
    rows_N, lookups_F = torch.randint(0, 50, (40,)), torch.tensor([20, 20, 0])
    parts = []
    for device in (torch.device("cpu"), CUDA):
        space = PackedIdSpace.build(TABLES, device)
        packed_N, outside_N = space.pack_ids(rows_N.to(device), lookups_F.to(device))
        assert not outside_N.any()
        located = partition_rows(unique_rows(packed_N), space).located
        parts.append((located.target_U.cpu(), located.counts_PB.cpu(), located.touched_H.cpu()))
    torch.testing.assert_close(parts[1], parts[0], rtol=0, atol=0)


def test_pooling_and_its_gradient_are_the_same_as_on_cpu() -> None:
    results = []
    rows_UD = torch.randn(3, 8)
    for device in (torch.device("cpu"), CUDA):
        index = PoolingIndex(
            row_of_lookup_N=torch.tensor([0, 2, 2, 1], device=device),
            bag_offsets_S1=torch.tensor([0, 2, 2, 4], device=device),
            bags_by_row_N=torch.tensor([0, 2, 0, 2], device=device),
            lookups_by_row_N=torch.tensor([0, 3, 1, 2], device=device),
            row_offsets_U1=torch.tensor([0, 1, 2, 4], device=device),
            mean_S=None,
        )
        pooled = pool_rows(rows_UD.to(device), None, index)
        results.append((pooled.cpu(), gradient_of_rows(pooled, None, index).cpu()))
    torch.testing.assert_close(results[1], results[0])


@pytest.fixture
def nccl(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group(
        "nccl", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("nccl")
def test_trains_as_an_unsharded_module() -> None:
    from torch.distributed.optim import _apply_optimizer_in_backward
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
    from torchrec.distributed import DistributedModelParallel
    from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
    from torchrec.distributed.types import ShardingEnv, ShardingPlan

    from torchrec_picasso import HotColdEmbeddingBagCollectionSharder, HotColdParams

    config = EmbeddingBagConfig(name="t", embedding_dim=8, num_embeddings=20, feature_names=["f"])
    plain = EmbeddingBagCollection(tables=[config], device=CUDA)
    module = torch.nn.Sequential(EmbeddingBagCollection(tables=[config], device=CUDA))
    module[0].load_state_dict(plain.state_dict())
    _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.1})
    sharder = HotColdEmbeddingBagCollectionSharder()
    plan = construct_module_sharding_plan(
        module[0], {"t": row_wise()}, sharder=sharder, local_size=1, world_size=1,
        device_type="cuda",
    )  # fmt: skip
    plan["t"].cache_params = HotColdParams(hot_rows=[1, 3])
    sharded = DistributedModelParallel(
        module,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=CUDA,
        plan=ShardingPlan(plan={"0": plan}),
        sharders=[sharder],
    )
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    features = KeyedJaggedTensor(
        keys=["f"],
        values=torch.tensor([1, 3, 3, 9], device=CUDA),
        lengths=torch.tensor([2, 0, 2], device=CUDA),
    )
    for _ in range(5):
        optimizer.zero_grad()
        expected = plain(features).values()
        actual = sharded(features).values()
        torch.testing.assert_close(actual, expected)
        expected.square().sum().backward()
        optimizer.step()
        actual.square().sum().backward()
