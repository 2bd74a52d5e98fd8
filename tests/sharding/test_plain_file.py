"""torch makes one file of a sharded model's checkpoint; the unsharded model takes and serves it.

Predictions of the unsharded model are the sharded one's to the rounding of its sums; those of
TorchRec's quantized modules are near, as 8 bits a value allow.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torch.distributed.tensor import DTensor
from torchrec import EmbeddingBagCollection, EmbeddingCollection
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.sharding_plan import column_wise, data_parallel, row_wise, table_wise
from torchrec.distributed.types import ShardedTensor, ShardingEnv, ShardingPlan
from torchrec.inference.modules import quantize_embeddings
from torchrec.modules.embedding_configs import DataType
from torchrec.quant.embedding_modules import EmbeddingCollection as QuantizedEmbeddingCollection

from benchmarks.reliability.small_model import SmallModel, rank_batch
from benchmarks.reliability.small_trainer import SmallTrainer
from benchmarks.reliability.whole_state import differences, join_state
from tests.sharding.jobs import shards_of
from tests.support.placing import CPU, place
from tests.support.tables import Table, bags_of
from torchrec_picasso import HotColdEmbeddingBagCollectionSharder, HotColdParams
from torchrec_picasso.app.checkpoints.plain_file import read_plain
from torchrec_picasso.app.checkpoints.write import save_checkpoint
from torchrec_picasso.app.launch.run_ranks import run_ranks

PLANS = ("rows", "bags", "uneven", "column_wise")
BATCH = rank_batch(50, 0, 1)


def save_every_plan(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """Per plan: the checkpoint, the whole weights, and predictions."""
    found: dict[str, Any] = {}
    for plan in PLANS:
        trainer = SmallTrainer(plan, "rowwise_adagrad")
        trainer.train(range(3))
        path = save_checkpoint(Path(folder, plan), 3, trainer.state())
        trainer.model.eval()
        found[plan] = path, join_state(trainer.model.state_dict()), trainer.model(BATCH)[1]
    return found


def test_an_unsharded_model_loads_and_serves_what_was_trained(tmp_path: Path) -> None:
    start = SmallModel().state_dict()
    first, *_ = run_ranks(save_every_plan, 3, str(tmp_path), timeout_s=120)
    for plan, (path, whole, predicted_B) in first.items():
        plain = _one_file(path, tmp_path / f"{plan}.pt")["model"]
        assert not differences(plain, whole), plan
        assert not any(torch.equal(tensor, start[name]) for name, tensor in plain.items())
        model = SmallModel(seed=7)
        model.load_state_dict(plain, strict=True)
        model.eval()
        # 5e-7: float32 sums of up to 4 rows and 72 columns, in another order
        torch.testing.assert_close(model(BATCH)[1], predicted_B, rtol=5e-7, atol=5e-7)
        assert not differences(read_plain(path), plain)
    quantized = _quantized(model)
    with torch.no_grad():
        near_B = quantized(BATCH)[1]
    # a value is within 1/510 of its row's range of values, here 0.5 to 1.5, and up to 20 are summed
    torch.testing.assert_close(near_B, model(BATCH)[1], rtol=0, atol=5e-3)
    assert not torch.equal(near_B, model(BATCH)[1])


def _one_file(folder: Path, file: Path) -> dict[str, Any]:
    dcp_to_torch_save(folder, file)
    found: dict[str, Any] = torch.load(file, weights_only=True)
    return found


def _quantized(model: nn.Module) -> nn.Module:
    """TorchRec's quantized inference of bags and, as it has to be asked for, of sequences."""
    quantized: nn.Module = quantize_embeddings(
        model,
        dtype=torch.qint8,
        inplace=False,
        additional_qconfig_spec_keys=[EmbeddingCollection],
        additional_mapping={EmbeddingCollection: QuantizedEmbeddingCollection},
    )
    assert isinstance(quantized.ec, QuantizedEmbeddingCollection)
    return quantized


def _tables(dtype: DataType = DataType.FP32) -> EmbeddingBagCollection:
    torch.manual_seed(3)
    rows = {"ours": 40, "bags": 7, "cut": 9, "one": 5, "same": 6}
    tables = [Table(name, 16, number, ("user",)) for name, number in rows.items()]
    return bags_of(tables, data_type=dtype)


def save_mixed_tables(rank: int, world_size: int, kind: str, folder: str) -> None:
    """Tables of five placements in one module, every one filled with its own numbers."""
    tables = _tables(DataType.FP16 if kind == "fp16" else DataType.FP32)
    for name, parameter in tables.named_parameters():
        if ".same." not in name:
            apply_optimizer_in_backward(torch.optim.SGD, [parameter], {"lr": 0.1})
    sharder = HotColdEmbeddingBagCollectionSharder()
    ways = {
        "ours": row_wise(),
        "bags": table_wise(rank=1),
        "cut": column_wise(ranks=[1, 0]),
        "one": table_wise(rank=0),
        "same": table_wise(rank=1) if kind == "dtensor" else data_parallel(),
    }
    hot_cold = {
        "ours": HotColdParams(hot_rows=[] if kind == "fp16" else [0, 39]),
        "bags": HotColdParams(form="bags"),
    }
    model = DistributedModelParallel(
        nn.ModuleDict({"tables": tables}),
        env=ShardingEnv(world_size, rank, dist.group.WORLD, output_dtensor=kind == "dtensor"),
        device=CPU,
        plan=ShardingPlan(plan={"tables": place(tables, sharder, ways, hot_cold)}),
        sharders=[sharder],
    )
    for name, value in model.state_dict().items():
        is_sharded = isinstance(value, ShardedTensor | DTensor)
        for (top, left), shard in shards_of(value) if is_sharded else [((0, 0), value)]:
            rows, columns = (torch.arange(n) for n in shard.shape)
            numbers = 100.0 * len(name) + (top + rows).unsqueeze(1) + (left + columns) / 16
            with torch.no_grad():
                shard.copy_(numbers)
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)


@pytest.mark.parametrize("kind", ["fp32", "fp16", "dtensor"])
def test_every_placement_beside_the_others(kind: str, tmp_path: Path) -> None:
    run_ranks(save_mixed_tables, 2, kind, str(tmp_path / "saved"), timeout_s=60)
    plain: dict[str, Tensor] = _one_file(tmp_path / "saved", tmp_path / "plain.pt")["model"]
    unsharded = nn.ModuleDict({"tables": _tables()})
    unsharded.load_state_dict(plain, strict=True)
    for name, tensor in plain.items():
        assert tensor.dtype == (torch.float16 if kind == "fp16" else torch.float32)
        rows, columns = (torch.arange(n) for n in tensor.shape)
        expected = (100.0 * len(name) + rows.unsqueeze(1) + columns / 16).to(tensor.dtype)
        assert torch.equal(tensor, expected), name
