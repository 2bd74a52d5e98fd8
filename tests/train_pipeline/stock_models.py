"""Models that TorchRec's pipeline trains, by TorchRec alone and with hot/cold tables, from equal
weights on equal batches."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
import torchrec
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
)
from torchrec.datasets.utils import Batch
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DataParallelWrapper
from torchrec.distributed.sharding_plan import row_wise, table_wise
from torchrec.modules.feature_processor_ import PositionWeightedModule
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

from tests.sharding.jobs import Table, configs_of, load_whole, local_shards
from tests.support.placing import CPU, distribute, place
from torchrec_picasso import HotColdEmbeddingBagCollectionSharder, HotColdParams

DIM, ROWS, MAX_LENGTH = 4, 30, 4
FEATURES = ("f", "g", "h")
SAMPLES = 6


def _tables(config: type, features: Sequence[str]) -> list[Any]:
    """A table for each feature."""
    return configs_of(config, [Table(f"t_{name}", DIM, ROWS, (name,)) for name in features])


def ebc(*features: str, weighted: bool = False) -> EmbeddingBagCollection:
    return EmbeddingBagCollection(
        device=CPU, is_weighted=weighted, tables=_tables(EmbeddingBagConfig, features)
    )


def processed(*features: str) -> FeatureProcessedEmbeddingBagCollection:
    processors = {name: PositionWeightedModule(max_feature_length=MAX_LENGTH) for name in features}
    return FeatureProcessedEmbeddingBagCollection(
        ebc(*features, weighted=True), nn.ModuleDict(processors)
    )


def sequences(*features: str) -> EmbeddingCollection:
    return EmbeddingCollection(device=CPU, tables=_tables(EmbeddingConfig, features))


def build(
    model: nn.Module,
    stock: Collection[str] | None,
    optimizer: Any = torchrec.optim.RowWiseAdagrad,
    optimizer_kwargs: Any = None,
    is_wrapped: bool = True,
    wrapper: DataParallelWrapper | None = None,
    stock_is_row_wise: bool = True,
    planned: int | None = None,
) -> DistributedModelParallel:
    """Shards a model; bags are hot/cold but for the listed tables, or all TorchRec's (``None``).

    ``planned``: micro-batches that the plan was priced for.
    """
    hot_cold = HotColdEmbeddingBagCollectionSharder()
    sharders = {
        EmbeddingBagCollection: EmbeddingBagCollectionSharder() if stock is None else hot_cold,
        FeatureProcessedEmbeddingBagCollection: FeatureProcessedEmbeddingBagCollectionSharder(),
        EmbeddingCollection: EmbeddingCollectionSharder(),
    }
    params = HotColdParams(hot_rows=[0, 3], num_micro_batches=planned)
    start = {name: value.clone() for name, value in model.state_dict().items()}
    plans: dict[str, Any] = {}
    for name, module in model.named_children():
        if type(module) not in sharders:
            continue
        named = {n: p for n, p in module.named_parameters() if ".t_" in n}
        tables = [n.split(".")[-2] for n in named]
        apply_optimizer_in_backward(optimizer, named.values(), optimizer_kwargs or {"lr": 0.1})
        may_be_hot = type(module) is EmbeddingBagCollection
        is_row_wise = may_be_hot and (stock_is_row_wise or stock is not None)
        plans[name] = place(
            module,
            hot_cold if may_be_hot else sharders[type(module)],
            {t: row_wise() if is_row_wise else table_wise(rank=0) for t in tables},
            {t: params for t in tables if stock is not None and may_be_hot and t not in stock},
        )
    sharded = distribute(
        model,
        plans,
        sharders.values(),
        init_data_parallel=is_wrapped,
        data_parallel_wrapper=wrapper,
    )
    load_whole(sharded, start)
    return sharded


def batch_of(
    rank: int, step: int, num_samples: int = SAMPLES, features: Sequence[str] = FEATURES
) -> Batch:
    generator = torch.Generator().manual_seed(100 * step + rank)
    lengths = torch.randint(0, MAX_LENGTH, (len(features), num_samples), generator=generator)
    total = int(lengths.sum())
    values = (torch.rand(total, generator=generator) ** 2 * ROWS).long()
    return Batch(
        dense_features=torch.rand(num_samples, DIM, generator=generator),
        sparse_features=KeyedJaggedTensor(
            keys=list(features), values=values, lengths=lengths.flatten()
        ),
        labels=torch.rand(num_samples, generator=generator),
    )


def dense_optimizer(model: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    parameters = [p for name, p in model.named_parameters() if "t_" not in name]
    return torch.optim.SGD(parameters, lr=lr)


def left_behind(model: nn.Module) -> dict[str, Any]:
    """Weights and optimizer state by name, as local shards."""
    values = dict(model.state_dict())
    for name, states in model.fused_optimizer.state_dict()["state"].items():
        values |= {f"{name}/{key}": value for key, value in states.items()}
    return {
        name: [tensor for _, tensor in local_shards(value) if tensor.numel()]
        for name, value in values.items()
        if isinstance(value, (Tensor, ShardedTensor))
    }
