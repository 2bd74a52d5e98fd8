"""The same tensors on CUDA: plan of a batch, pooling, and training at world size 1.

Skipped where there is no GPU. World size 1 over NCCL is what one GPU can show; that collectives of
several ranks agree is shown on gloo.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torchrec
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingEnv, ShardingPlan

from tests.support.dense_updates import OPTIMIZERS, DenseUpdate
from torchrec_picasso import HotColdEmbeddingBagCollectionSharder, HotColdParams
from torchrec_picasso._torchrec import (
    ComputeDevice,
    EmbeddingLocation,
    EmbOptimType,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torchrec_picasso.ops.ids import HotSlots, IdSpace, PackedTable
from torchrec_picasso.ops.row_order import RowRanges, locate_rows, unique_rows
from torchrec_picasso.ops.segment_reduction import PoolingIndex, gradient_of_rows, pool_rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda")
TABLES = (
    PackedTable(
        name="a", pack=0, dim=4, block_rows_W=(30, 20), hot_rows_H=torch.tensor([0, 7, 31]),
        feature_names=("f0", "f1"),
    ),
    PackedTable(
        name="b", pack=1, dim=8, block_rows_W=(1, 0), hot_rows_H=torch.empty(0, dtype=torch.int64),
        feature_names=("f2",),
    ),
)  # fmt: skip


def test_partition_is_the_same_as_on_cpu() -> None:
    rows_N, end_F = torch.randint(0, 50, (40,)), torch.tensor([20, 40, 40])
    parts = []
    for device in (torch.device("cpu"), CUDA):
        space, hot = IdSpace.build(TABLES, device), HotSlots.build(TABLES, device)
        linear_N, num_outside = space.linearize(rows_N.to(device), end_F.to(device))
        assert num_outside == 0
        located = locate_rows(unique_rows(linear_N).ids_U, RowRanges.build(space, hot))
        located = located.first(int(located.counts_PQ.sum()))
        parts.append(
            (located.storage_row_U.cpu(), located.counts_PQ.cpu(), located.used_bits_X.cpu())
        )
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
    dist.init_process_group("nccl", f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


TABLE = EmbeddingBagConfig(name="t", embedding_dim=8, num_embeddings=20, feature_names=["f"])
FEATURES = (
    ([1, 3, 3, 9], [2, 0, 2]),
    ([19, 1, 7, 19, 3], [1, 3, 1]),
    ([5, 6, 5], [0, 1, 2]),
    ([3], [0, 0, 1]),
)
"""Ids and lengths of batches: hot rows 1 and 3 beside others, none of them, alone."""


def _features(step: int) -> KeyedJaggedTensor:
    values, lengths = FEATURES[step % len(FEATURES)]
    return KeyedJaggedTensor(
        keys=["f"],
        values=torch.tensor(values, device=CUDA),
        lengths=torch.tensor(lengths, device=CUDA),
    )


def _sharded(
    start: Tensor,
    optimizer: type[torch.optim.Optimizer] = torch.optim.SGD,
    hot_rows: list[int] | None = None,
    kernel: str = "fused",
) -> DistributedModelParallel:
    """A row-wise table that starts from these weights; stock without ``hot_rows``."""
    module = nn.Sequential(EmbeddingBagCollection(tables=[TABLE], device=CUDA))
    apply_optimizer_in_backward(optimizer, module.parameters(), {"lr": 0.1})
    ours = hot_rows is not None
    sharder = HotColdEmbeddingBagCollectionSharder() if ours else EmbeddingBagCollectionSharder()
    plan = construct_module_sharding_plan(
        module[0], {"t": row_wise()}, sharder=sharder, local_size=1, world_size=1,
        device_type=CUDA.type,
    )  # fmt: skip
    plan["t"].compute_kernel = kernel
    if hot_rows is not None:
        plan["t"].cache_params = HotColdParams(hot_rows=hot_rows)
    model = DistributedModelParallel(
        module,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=CUDA,
        plan=ShardingPlan(plan={"0": plan}),
        sharders=[sharder],
    )
    (weights,) = model.state_dict().values()
    weights.local_shards()[0].tensor.copy_(start.detach())
    return model


def _state(model: DistributedModelParallel) -> list[Tensor]:
    """The table's weights, then its optimizer state."""
    tensors = [*model.state_dict().values()]
    for states in model.fused_optimizer.state_dict()["state"].values():
        tensors += states.values()
    return [value.local_shards()[0].tensor.clone() for value in tensors]


@pytest.mark.usefixtures("nccl")
@pytest.mark.parametrize("kernel", ["fused", "fused_uvm"])
def test_trains_as_an_unsharded_module(kernel: str) -> None:
    plain = EmbeddingBagCollection(tables=[TABLE], device=CUDA)
    sharded = _sharded(plain.embedding_bags["t"].weight, hot_rows=[1, 3], kernel=kernel)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(8):
        optimizer.zero_grad()
        expected = plain(_features(step)).values()
        actual = sharded(_features(step)).values()
        torch.testing.assert_close(actual, expected)
        expected.square().sum().backward()
        optimizer.step()
        actual.square().sum().backward()


@pytest.mark.usefixtures("nccl")
@pytest.mark.parametrize("kernel", ["fused", "fused_uvm"])
@pytest.mark.parametrize(
    "optimizer",
    [torch.optim.SGD, torch.optim.Adagrad, torchrec.optim.RowWiseAdagrad, torch.optim.Adam],
)
def test_trains_as_stock(optimizer: type[torch.optim.Optimizer], kernel: str) -> None:
    torch.manual_seed(0)
    start = torch.randn(20, 8, device=CUDA)
    models = [
        _sharded(start, optimizer),
        _sharded(start, optimizer, hot_rows=[], kernel=kernel),
        _sharded(start, optimizer, hot_rows=[1, 3], kernel=kernel),
        _sharded(start, optimizer, hot_rows=list(range(20)), kernel=kernel),
    ]
    for step in range(8):
        losses = [model(_features(step)).values().square().sum() for model in models]
        for loss in losses:
            loss.backward()
        torch.testing.assert_close(losses, [losses[0]] * len(models))
    expected, *others = map(_state, models)
    assert not torch.equal(expected[0], start)
    for actual in others:
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fbgemm_updates_as_the_formulas_that_witness_for_cpus(name: str) -> None:
    numbers = {"eps": 1e-2, "beta1": 0.8, "beta2": 0.99, "weight_decay": 0.1}
    tbe = SplitTableBatchedEmbeddingBagsCodegen(
        [(20, 8, EmbeddingLocation.DEVICE, ComputeDevice.CUDA)],
        optimizer=EmbOptimType[name.upper()],
        learning_rate=0.1,
        device=CUDA,
        **numbers,
    )
    (weights,) = tbe.split_embedding_weights()
    weights.normal_()
    expected, update = weights.cpu(), DenseUpdate(name=name, lr=0.1, **numbers)
    for _ in range(8):
        rows_n, grads_nD = torch.randint(20, (30,)), torch.randn(30, 8)
        tbe(rows_n.to(CUDA), torch.arange(31, device=CUDA)).backward(grads_nD.to(CUDA))
        summed = torch.zeros(20, 8).index_add_(0, rows_n, grads_nD)
        update.step(expected, summed, torch.bincount(rows_n, minlength=20) > 0)
    (states,) = tbe.get_optimizer_state()
    found = [weights.cpu(), *(state.cpu() for state in states.values())]
    torch.testing.assert_close(
        found, [expected, update.exp_avg, update.exp_avg_sq], rtol=1e-4, atol=1e-5
    )


# not row-wise Adagrad: FBGEMM keeps row-wise state of managed tables in device memory
@pytest.mark.usefixtures("nccl")
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adagrad])
def test_replicas_are_in_device_memory_and_homes_in_managed(
    optimizer: type[torch.optim.Optimizer],
) -> None:
    start = torch.randn(20, 8, device=CUDA)
    model = _sharded(start, optimizer, hot_rows=[1, 3], kernel="fused_uvm")
    model(_features(0)).values().square().sum().backward()
    (lookup,) = model.module[0]._lookups
    (kernel,) = lookup._emb_modules
    storage = kernel.rows
    placed = storage.tables.tbe.weights_physical_placements
    assert placed == [EmbeddingLocation.MANAGED, EmbeddingLocation.DEVICE]
    for rows in storage.tables.per_row():
        assert (len(rows.homes), len(rows.replicas)) == (20, 2)
        assert torch.ops.fbgemm.is_uvm_tensor(rows.homes)
        assert not torch.ops.fbgemm.is_uvm_tensor(rows.replicas)
        assert rows.replicas.device.type == "cuda"
    assert not storage.was_written()
    with torch.no_grad():
        kernel.split_embedding_weights()[0][5] = 0.0
    assert storage.was_written(), "a write into a home shows, though replicas lie elsewhere"
