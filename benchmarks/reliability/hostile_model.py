"""The model of a hostile case, under our plan or under stock TorchRec's.

The loss is a mean over a rank's samples, 0 where it has none. There is no ReLU in the model, since
an input near 0 would make a difference of rounding a larger one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torchrec
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    PoolingType,
)
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import (
    construct_module_sharding_plan,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from benchmarks.reliability.hostile_cases import Case, TableSpec
from benchmarks.reliability.hostile_data import HostileBatch
from torchrec_picasso import HotColdParams
from torchrec_picasso.app.runs.placements import hot_cold_sharders

__all__ = ["HostileTrainer"]

_CPU = torch.device("cpu")
_OPTIMIZERS: dict[str, tuple[Any, dict[str, float]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1, "eps": 1e-2}),
    "rowwise_adagrad": (torchrec.optim.RowWiseAdagrad, {"lr": 0.1, "eps": 1e-2}),
}


class HostileModel(nn.Module):
    """Returns (loss, prediction); bags and sequences are divided by their lengths."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.case = case
        self.ebc = EmbeddingBagCollection(
            device=_CPU,
            is_weighted=case.weighted,
            tables=[
                EmbeddingBagConfig(
                    name=table.name,
                    num_embeddings=table.rows,
                    embedding_dim=table.dim,
                    feature_names=table.features,
                    # of weighted means TorchRec's table-wise divides by the count
                    pooling=PoolingType.MEAN
                    if table.mean and not case.weighted
                    else PoolingType.SUM,
                )
                for table in case.bags
            ],
        )
        self.ec = EmbeddingCollection(
            device=_CPU,
            tables=[
                EmbeddingConfig(
                    name=table.name,
                    num_embeddings=table.rows,
                    embedding_dim=table.dim,
                    feature_names=table.features,
                )
                for table in case.sequences
            ],
        )
        width = sum(table.dim * table.num_features for table in case.tables)
        self.over = nn.Sequential(nn.Linear(width, 4), nn.Tanh(), nn.Linear(4, 1))

    def forward(self, batch: HostileBatch) -> tuple[Tensor, Tensor]:
        """Gives the mean squared error and the predictions, shape ``(B,)``."""
        pooled, found = self.ebc(batch.bags), self.ec(batch.sequences)
        out = self.over(_columns(self.case, pooled, found, batch.bags)).squeeze(1)
        loss = _loss(out, batch.labels, batch.counts)
        return loss, out.detach()


@torch.fx.wrap
def _columns(case: Case, pooled: Any, found: Any, bags: KeyedJaggedTensor) -> Tensor:
    """All features side by side, shape ``(B, width)``; pipelines trace models, but not this."""
    names = [name for table in case.bags for name in table.features]
    lengths_FB = bags.lengths().reshape(len(names), bags.stride()).clamp(min=1)
    columns = [pooled[name] / lengths_B[:, None] for name, lengths_B in zip(names, lengths_FB)]
    for table in case.sequences:
        columns += [_mean_of(found[name]) for name in table.features]
    return torch.cat(columns, dim=1)


@torch.fx.wrap
def _loss(out_B: Tensor, labels_B: Tensor, counts_B: Tensor) -> Tensor:
    """The mean square of the samples that count; 0 of none."""
    return ((out_B - labels_B) ** 2 * counts_B).sum() / max(1.0, float(counts_B.sum()))


def _mean_of(sequence: Any) -> Tensor:
    """Mean of each sample's vectors, shape ``(B, D)``; 0 of none."""
    lengths_B, values_ND = sequence.lengths().long(), sequence.values()
    sample_N = torch.repeat_interleave(torch.arange(lengths_B.numel()), lengths_B)
    sums = values_ND.new_zeros(lengths_B.numel(), values_ND.shape[1])
    return sums.index_add(0, sample_N, values_ND) / lengths_B.clamp(min=1)[:, None]


class HostileTrainer:
    """A case's model, sharded. Collective: every rank of the default process group makes one.

    Args:
        case: Which.
        is_ours: Whether by the case's plan; else by stock's sharders, all tables table-wise.
    """

    def __init__(self, case: Case, is_ours: bool) -> None:
        pg = dist.group.WORLD
        assert pg is not None, "init_process_group comes first"
        model = HostileModel(case)
        start = {name: value.detach().clone() for name, value in model.state_dict().items()}
        self.case = case
        kind, settings = _OPTIMIZERS[case.optimizer]
        sharders: list[Any] = [EmbeddingBagCollectionSharder(), EmbeddingCollectionSharder()]
        sharders = hot_cold_sharders() if is_ours else sharders
        plans = {}
        for path, tables, sharder in zip(("ebc", "ec"), (case.bags, case.sequences), sharders):
            module = model.get_submodule(path)
            apply_optimizer_in_backward(kind, module.parameters(), dict(settings))
            plans[path] = _plan(tables, module, sharder, pg.size(), is_ours)
        self.model = DistributedModelParallel(
            model,
            env=ShardingEnv.from_process_group(pg),
            device=_CPU,
            plan=ShardingPlan(plan=plans),
            sharders=sharders,
        )
        _write(self.model, start)
        dense = KeyedOptimizerWrapper(
            dict(in_backward_optimizer_filter(self.model.named_parameters())),
            lambda parameters: torch.optim.SGD(parameters, lr=0.05),
        )
        self.optimizer = CombinedOptimizer([self.model.fused_optimizer, dense])

    def step(self, batch: HostileBatch) -> Tensor:
        """One step of the plain loop; gives the predictions."""
        self.optimizer.zero_grad()
        loss, output = self.model(batch)
        loss.backward()
        self.optimizer.step()
        assert isinstance(output, Tensor)
        return output


def _plan(
    tables: Sequence[TableSpec], module: nn.Module, sharder: Any, world_size: int, is_ours: bool
) -> Any:
    plan = construct_module_sharding_plan(
        module,
        {
            table.name: row_wise()
            if is_ours and table.form == "rows"
            else table_wise(rank=table.rank)
            for table in tables
        },
        sharder=sharder,
        local_size=world_size,
        world_size=world_size,
        device_type="cpu",
    )
    for table in tables if is_ours else ():
        if table.form == "bags":
            plan[table.name].cache_params = HotColdParams(form="bags")
        elif table.form == "rows":
            plan[table.name].cache_params = HotColdParams(hot_rows=table.hot_rows, wave=table.wave)
            start = 0
            for shard, size in zip(
                plan[table.name].sharding_spec.shards, table.blocks_W, strict=True
            ):
                shard.shard_sizes[0], shard.shard_offsets = size, [start, 0]
                start += size
    return plan


def _write(model: nn.Module, state: dict[str, Tensor]) -> None:
    """Writes unsharded weights into a sharded model, in place."""
    for name, value in model.state_dict().items():
        if not hasattr(value, "local_shards"):
            value.detach().copy_(state[name])
            continue
        for shard in value.local_shards():
            start, size = shard.metadata.shard_offsets[0], shard.metadata.shard_sizes[0]
            shard.tensor.detach().copy_(state[name][start : start + size])
