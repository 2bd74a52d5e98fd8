"""Models that TorchRec's pipeline trains, by TorchRec alone and with hot/cold tables, from equal
weights on equal batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
)
from torchrec.datasets.utils import Batch
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DataParallelWrapper
from torchrec.distributed.sharding_plan import (
    construct_module_sharding_plan,
    row_wise,
    table_wise,
)
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.modules.feature_processor_ import PositionWeightedModule
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

from tests.sharding.jobs import CPU, load_whole, local_shards
from tests.train_pipeline.runs import run_to_the_end
from torchrec_picasso import (
    HotColdEmbeddingBagCollectionSharder,
    HotColdParams,
    InterleavedTrainPipeline,
)

DIM, ROWS, MAX_LENGTH = 4, 30, 4
FEATURES = ("f", "g", "h")
SAMPLES = 6

Make = Callable[[], nn.Module]


@dataclass(frozen=True)
class Stock:
    """A module's name in the model, and which tables are not hot/cold; ``None`` = all of them."""

    name: str
    tables: frozenset[str] | None = None


def ebc(*features: str, weighted: bool = False) -> EmbeddingBagCollection:
    return EmbeddingBagCollection(
        device=CPU,
        is_weighted=weighted,
        tables=[
            EmbeddingBagConfig(
                name=f"t_{name}", embedding_dim=DIM, num_embeddings=ROWS, feature_names=[name]
            )
            for name in features
        ],
    )


def processed(*features: str) -> FeatureProcessedEmbeddingBagCollection:
    processors = {name: PositionWeightedModule(max_feature_length=MAX_LENGTH) for name in features}
    return FeatureProcessedEmbeddingBagCollection(
        ebc(*features, weighted=True), nn.ModuleDict(processors)
    )


def sequences(*features: str) -> EmbeddingCollection:
    return EmbeddingCollection(
        device=CPU,
        tables=[
            EmbeddingConfig(
                name=f"t_{name}", embedding_dim=DIM, num_embeddings=ROWS, feature_names=[name]
            )
            for name in features
        ],
    )


def build(
    model: nn.Module,
    stock: Sequence[Stock] | None,
    optimizer: Any = torchrec.optim.RowWiseAdagrad,
    optimizer_kwargs: Any = None,
    is_wrapped: bool = True,
    wrapper: DataParallelWrapper | None = None,
    stock_is_row_wise: bool = True,
    planned: int | None = None,
) -> DistributedModelParallel:
    """Shards a model, with what is listed as TorchRec does it; ``None`` = all of it.

    ``planned``: micro-batches that the plan was priced for.
    """
    world_size = dist.get_world_size()
    hot_cold = HotColdEmbeddingBagCollectionSharder()
    sharders = {
        EmbeddingBagCollection: EmbeddingBagCollectionSharder() if stock is None else hot_cold,
        FeatureProcessedEmbeddingBagCollection: FeatureProcessedEmbeddingBagCollectionSharder(),
        EmbeddingCollection: EmbeddingCollectionSharder(),
    }
    start = {name: value.clone() for name, value in model.state_dict().items()}
    plans: dict[str, Any] = {}
    listed = {each.name: each.tables for each in stock or ()}
    for name, module in model.named_children():
        if type(module) not in sharders:
            continue
        tables = [
            parts[-2]
            for parts in (p.split(".") for p, _ in module.named_parameters())
            if parts[-2].startswith("t_")
        ]
        apply_optimizer_in_backward(
            optimizer,
            [p for n, p in module.named_parameters() if "t_" in n],
            optimizer_kwargs or {"lr": 0.1},
        )
        may_be_hot = type(module) is EmbeddingBagCollection
        is_row_wise = may_be_hot and (stock_is_row_wise or stock is not None)
        plans[name] = construct_module_sharding_plan(
            module,
            {t: row_wise() if is_row_wise else table_wise(rank=0) for t in tables},
            sharder=HotColdEmbeddingBagCollectionSharder()
            if may_be_hot
            else sharders[type(module)],
            local_size=world_size,
            world_size=world_size,
            device_type="cpu",
        )
        of_stock = listed.get(name, frozenset()) if name in listed else frozenset()
        for table in tables:
            is_stock = stock is None or not may_be_hot or of_stock is None or table in of_stock
            if not is_stock:
                plans[name][table].cache_params = HotColdParams(
                    hot_rows=[0, 3], num_micro_batches=planned
                )
    sharded = DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=CPU,
        plan=ShardingPlan(plan=plans),
        sharders=list(sharders.values()),
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
        if isinstance(value, (Tensor, torch.distributed._shard.sharded_tensor.ShardedTensor))
    }


def train_stock(
    model: DistributedModelParallel, batches: Sequence[Any], inside: bool = False, **options: Any
) -> list[Any]:
    """By TorchRec's own pipeline."""
    trained = model.module if inside else model
    pipeline = TrainPipelineSparseDist(trained, dense_optimizer(model), CPU, **options)
    return run_to_the_end(pipeline, iter(batches))


def train_ours(
    model: DistributedModelParallel, batches: Sequence[Any], inside: bool = False, **options: Any
) -> tuple[list[Any], str]:
    """By the interleaved pipeline; also its summary."""
    trained = model.module if inside else model
    pipeline = InterleavedTrainPipeline(trained, dense_optimizer(model), CPU, **options)
    outputs = run_to_the_end(pipeline, iter(batches))
    return outputs, pipeline.summary()
