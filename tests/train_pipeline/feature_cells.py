"""A feature of tables, batches or models, trained by TorchRec alone and with hot/cold tables.

A feature is data. On every rank a cell's run is: build the model from equal weights, train it on
equal batches through a pipeline, then evaluate. What is compared is all that it leaves behind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torchrec
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec import EmbeddingBagCollection, EmbeddingCollection, KeyedJaggedTensor
from torchrec.datasets.utils import Batch
from torchrec.distributed import DistributedModelParallel, model_parallel
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs
from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DMPCollection
from torchrec.distributed.sharding_plan import row_wise, table_wise
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import CommOp, ShardingEnv, ShardingPlan
from torchrec.modules.feature_processor_ import (
    PositionWeightedModule,
    PositionWeightedModuleCollection,
)
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

from tests.sharding.jobs import Result, Table, keys_of, load_whole, result_of_module
from tests.support.placing import CPU, place
from tests.support.tables import bags_of, sequences_of
from tests.train_pipeline.runs import run_to_the_end
from torchrec_picasso import (
    HotColdEmbeddingBagCollectionSharder,
    HotColdEmbeddingCollectionSharder,
    HotColdFeatureProcessedEmbeddingBagCollectionSharder,
    HotColdParams,
    InterleavedTrainPipeline,
)
from torchrec_picasso.placement import Form

MAX_LENGTH = 4
NUM_TRAINED, NUM_EVALUATED = 3, 1
TABLES = (Table("t_a", 8, 30, ("f",)), Table("t_b", 8, 12, ("g",)), Table("t_c", 8, 6, ("h",)))
MODULES = ("tables", "more_tables")


@dataclass(frozen=True)
class Feature:
    """One line of the table of features."""

    name: str
    kinds: tuple[str, ...] = ("bags", "sequences")
    """Which collections have it."""
    tables: tuple[Table, ...] = TABLES
    hot_rows: Mapping[str, int | str | None] = field(default_factory=lambda: {"*": 2})
    """Of each table; ``"*"`` stands for all others, ``None`` and ``"row_wise"`` for a stock table,
    ``"bags"`` for one whose bags travel."""
    by_host: bool = False
    """Whether rows of hot/cold tables travel by host; then four ranks pretend to be on two."""
    optimizer: Any = torchrec.optim.RowWiseAdagrad
    optimizer_kwargs: Mapping[str, Any] = field(default_factory=lambda: {"lr": 0.1, "eps": 1e-2})
    kwargs_of_table: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Beside those, of the optimizer."""
    is_placed_alike: bool = False
    """Whether TorchRec's own run places row-wise what is hot/cold in ours, not table-wise."""
    fused_params: Mapping[str, Any] = field(default_factory=dict)
    data_type: Any = torchrec.modules.embedding_configs.DataType.FP32
    wire: str | tuple[str, str] | None = None
    """Of both directions, or forward and backward."""
    output_dtensor: bool = False
    """Whether state dicts have DTensors."""
    more_sharders: Callable[[], Mapping[type, Any]] = dict
    """Of TorchRec's own modules in the model, in both runs."""
    waves: Mapping[str, int] = field(default_factory=dict)
    weighted: bool = False
    processors: str | None = None
    """``by_feature`` or ``together``: two ways to write position weights."""
    need_indices: bool = False
    num_samples: Callable[[int, int], int] = lambda rank, step: 48
    """Of a rank and step."""
    change_batch: Callable[[Batch, int], Batch] = lambda batch, step: batch
    change_of_witness: Callable[[Batch, int], Batch] | None = None
    """What TorchRec gets instead, where it has no backward for what ours gets."""
    model: Callable[..., nn.Module] | None = None
    """Instead of :class:`Model`."""
    witness: Callable[[Feature, str, int], Outcome] | None = None
    """Instead of TorchRec, where it has no kernel."""
    is_2d: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of both pipelines."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Of ours alone."""
    is_prepared: bool = False
    """Whether ours gets batches whose ids were read before."""
    num_micro_batches: int | None = 3
    rtol: float = 1e-4
    atol: float = 2e-5


class Model(nn.Module):
    """Tables of one kind under one linear layer."""

    def __init__(self, feature: Feature, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.keys = keys_of(feature.tables)
        self.need_indices = feature.need_indices
        self.make(feature)
        self.over = nn.Linear(sum(t.dim * len(t.features) for t in feature.tables), 1)

    def make(self, feature: Feature) -> None:
        self.tables = collection(feature, self.kind, feature.tables)

    def look_up(self, features: KeyedJaggedTensor) -> list[Tensor]:
        return pooled_by(self.tables(features), self.keys, self.need_indices)

    def predict(self, pooled: Sequence[Tensor], batch: Batch) -> Tensor:
        return self.over(torch.cat(list(pooled), dim=1)).squeeze(1)

    def loss(self, out: Tensor, batch: Batch) -> Tensor:
        squares = (out - batch.labels) ** 2
        return (squares * (batch.labels >= 0)).sum() / 6  # no mean: of no samples it is none

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        out = self.predict(self.look_up(batch.sparse_features), batch)
        return self.loss(out, batch), out.detach()[batch.labels >= 0]


def pooled_by(output: Any, keys: Sequence[str], with_ids: bool = False) -> list[Tensor]:
    """Returns what the model makes of a collection's output: a matrix for each feature."""
    if not isinstance(found := output[keys[0]], torchrec.JaggedTensor):
        return [found, *(output[key] for key in keys[1:])]
    summed = []
    for key in keys:
        jagged = output[key]
        values = jagged.values()
        if with_ids:
            values = values * (1 + jagged.weights().unsqueeze(1) / 10)
        lengths = jagged.lengths().long()
        sample = torch.arange(len(lengths)).repeat_interleave(lengths)
        summed.append(values.new_zeros(len(lengths), values.size(1)).index_add(0, sample, values))
    return summed


def collection(feature: Feature, kind: str, tables: Sequence[Table]) -> nn.Module:
    """An unsharded collection; its processors start at different weights."""
    data_type = feature.data_type
    if kind != "bags":
        return sequences_of(tables, need_indices=feature.need_indices, data_type=data_type)
    weighted = feature.weighted or feature.processors is not None
    bags = bags_of(tables, is_weighted=weighted, data_type=data_type)
    if feature.processors is None:
        return bags
    names = sorted({name for table in tables for name in table.features})
    processors: Any = PositionWeightedModuleCollection(dict.fromkeys(names, MAX_LENGTH))
    if feature.processors == "by_feature":
        processors = nn.ModuleDict({n: PositionWeightedModule(MAX_LENGTH) for n in names})
    with torch.no_grad():
        for number, parameter in enumerate(processors.parameters()):
            parameter.copy_(torch.linspace(0.5, 1.5 + number, MAX_LENGTH))
    return FeatureProcessedEmbeddingBagCollection(bags, processors)


def batch_of(feature: Feature, rank: int, step: int, is_ours: bool) -> Batch:
    """Skewed to low ids, with empty bags."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    names = sorted({name for table in feature.tables for name in table.features})
    rows = {n: min(t.rows for t in feature.tables if n in t.features) for n in names}
    num_samples = feature.num_samples(rank, step)
    lengths = torch.randint(0, MAX_LENGTH, (len(names), num_samples), generator=generator)
    values = [
        (torch.rand(int(name_lengths.sum()), generator=generator) ** 2 * rows[name]).long()
        for name, name_lengths in zip(names, lengths)
    ]
    num_lookups = int(lengths.sum())
    batch = Batch(
        dense_features=torch.rand(num_samples, 4, generator=generator),
        sparse_features=KeyedJaggedTensor(
            keys=names,
            values=torch.cat(values),
            lengths=lengths.flatten(),
            weights=torch.rand(num_lookups, generator=generator) if feature.weighted else None,
        ),
        labels=torch.rand(num_samples, generator=generator),
    )
    change = feature.change_batch
    if not is_ours and feature.change_of_witness is not None:
        change = feature.change_of_witness
    return change(batch, step)


def build(feature: Feature, kind: str, is_ours: bool) -> DistributedModelParallel:
    """Shards a feature's model; stock tables are placed ``table_wise``."""
    sharders = {**_sharders(feature, is_ours), **feature.more_sharders()}
    model = (feature.model or Model)(feature, kind)
    start = {name: value.clone() for name, value in model.state_dict().items()}
    plans = {
        path: _place(feature, module, sharders[type(module)], is_ours)
        for path, module in model.named_children()
        if type(module) in sharders
    }
    wrap = _distribute_2d if feature.is_2d else _distribute
    sharded = wrap(
        feature, module=model, plan=ShardingPlan(plan=plans), sharders=list(sharders.values())
    )
    load_whole(sharded, start)
    return sharded


def _sharders(feature: Feature, is_ours: bool) -> dict[type, Any]:
    kwargs: dict[str, Any] = {"qcomm_codecs_registry": _codecs(feature)}
    if feature.fused_params:
        kwargs["fused_params"] = dict(feature.fused_params)
    bags, sequences, processed = (
        (
            HotColdEmbeddingBagCollectionSharder,
            HotColdEmbeddingCollectionSharder,
            HotColdFeatureProcessedEmbeddingBagCollectionSharder,
        )
        if is_ours
        else (
            EmbeddingBagCollectionSharder,
            EmbeddingCollectionSharder,
            FeatureProcessedEmbeddingBagCollectionSharder,
        )
    )
    bag_lengths = bags(**kwargs)
    return {
        EmbeddingBagCollection: bag_lengths,
        EmbeddingCollection: sequences(**kwargs),
        FeatureProcessedEmbeddingBagCollection: processed(bag_lengths),
    }


def _codecs(feature: Feature) -> dict[str, Any] | None:
    if feature.wire is None:
        return None
    wire = feature.wire if isinstance(feature.wire, tuple) else (feature.wire,) * 2
    forward, backward = map(CommType, wire)
    config = QCommsConfig(forward_precision=forward, backward_precision=backward)
    operations = (CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL, CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL)
    # not get_qcomm_codecs_registry, which takes FP16 for BF16 on the CPU
    return {operation.name: get_qcomm_codecs(config) for operation in operations}


def _place(feature: Feature, module: nn.Module, sharder: Any, is_ours: bool) -> Any:
    """Gives the tables of a collection their optimizers and places."""
    weights = {n.split(".")[-2]: p for n, p in module.named_parameters() if ".t_" in n}
    ways, hot_cold = {}, {}
    for i, (name, weight) in enumerate(weights.items()):
        kwargs = {**feature.optimizer_kwargs, **feature.kwargs_of_table.get(name, {})}
        if feature.optimizer is not None and not hasattr(weight, "_optimizer_classes"):
            apply_optimizer_in_backward(feature.optimizer, [weight], kwargs)
        asked = feature.hot_rows.get(name, feature.hot_rows.get("*"))
        hot = asked if is_ours else None
        is_row_wise = isinstance(asked if feature.is_placed_alike else hot, int)
        is_row_wise |= asked == "row_wise"
        ways[name] = row_wise() if is_row_wise else table_wise(rank=i % dist.get_world_size())
        if isinstance(hot, int):
            wave = feature.waves.get(name, 0)
            form: Form = "node_rows" if feature.by_host else "rows"
            hot_cold[name] = HotColdParams(hot_rows=range(hot), wave=wave, form=form)
        elif hot == "bags":
            hot_cold[name] = HotColdParams(form="bags")
    return place(module, sharder, ways, hot_cold)


def _distribute(feature: Feature, **what: Any) -> DistributedModelParallel:
    env = ShardingEnv(
        dist.get_world_size(),
        dist.get_rank(),
        dist.group.WORLD,
        output_dtensor=feature.output_dtensor,
    )
    return DistributedModelParallel(device=CPU, env=env, **what)


def _distribute_2d(feature: Feature, **what: Any) -> DistributedModelParallel:
    """2-D parallelism takes GPUs alone; hot/cold tables are refused before any is placed there."""

    def mesh(device_type: str, **options: Any) -> DeviceMesh:
        return DeviceMesh("cpu", **options)

    with mock.patch.object(model_parallel, "DeviceMesh", mesh):
        return DMPCollection(
            device=torch.device("cuda"),
            world_size=dist.get_world_size(),
            sharding_group_size=dist.get_world_size() // 2,
            global_pg=dist.group.WORLD,
            **what,
        )


@dataclass(frozen=True)
class Outcome:
    """Outcome of a run: what it left behind, or why there is none."""

    result: Result | None = None
    trained: Sequence[Tensor] = ()
    evaluated: Sequence[Tensor] = ()
    summary: str = ""
    error: str = ""


def run_cell(
    feature: Feature, kind: str, rank: int, is_ours: bool, num_micro_batches: int | None
) -> Outcome:
    """Trains, then evaluates. ``num_micro_batches`` 0 = through TorchRec's pipeline."""
    try:
        return _run(feature, kind, rank, is_ours, num_micro_batches)
    except Exception as error:  # what a cell tells
        return Outcome(error=f"{type(error).__name__}: {error}")


def dense_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    weights = [p for name, p in model.named_parameters() if ".t_" not in name]
    return torch.optim.SGD(weights, lr=0.05)


def _run(
    feature: Feature, kind: str, rank: int, is_ours: bool, num_micro_batches: int | None
) -> Outcome:
    model = build(feature, kind, is_ours)
    dense = dense_optimizer(model)
    options = dict(feature.options)
    pipeline: Any
    if num_micro_batches == 0:
        pipeline = TrainPipelineSparseDist(model, dense, CPU, **options)
    else:
        options = {"loss_reduction": "sum", **options, **feature.settings}
        options["num_micro_batches"] = num_micro_batches
        pipeline = InterleavedTrainPipeline(model, dense, CPU, **options)
    steps = range(NUM_TRAINED + NUM_EVALUATED)
    batches = [batch_of(feature, rank, step, is_ours) for step in steps]
    if feature.is_prepared and num_micro_batches != 0:
        batches = list(map(pipeline.preparation(), batches))
    trained = run_to_the_end(pipeline, iter(batches[:NUM_TRAINED]))
    result = result_of_module(model, [], MODULES)
    model.eval()
    with torch.no_grad():
        evaluated = run_to_the_end(pipeline, iter(batches[NUM_TRAINED:]))
    summary = "" if num_micro_batches == 0 else pipeline.summary()
    return Outcome(result, trained, evaluated, summary)


def own_rows(batch: Batch, step: int) -> Batch:
    """Features of 2, 3, 4, ... rows of their own, which samples have by inverse indices."""
    features, generator = batch.sparse_features, torch.Generator().manual_seed(step)
    num_samples, keys = len(batch.labels), features.keys()
    strides = [2 + number if num_samples else 0 for number in range(len(keys))]
    lengths = torch.randint(0, MAX_LENGTH, (sum(strides),), generator=generator)
    num_lookups = int(lengths.sum())
    weights = features.weights_or_none()
    batch.sparse_features = KeyedJaggedTensor(
        keys=keys,
        values=torch.randint(0, 6, (num_lookups,), generator=generator),
        lengths=lengths,
        weights=None if weights is None else torch.rand(num_lookups, generator=generator),
        stride_per_key_per_rank=[[stride] for stride in strides],
        inverse_indices=(
            keys,
            torch.stack(
                [torch.randint(0, max(s, 1), (num_samples,), generator=generator) for s in strides]
            ),
        ),
    )
    return batch


def own_rows_by_sample(batch: Batch, step: int) -> Batch:
    """The same with every feature's rows written out for all samples that have them."""
    batch = own_rows(batch, step)
    features = batch.sparse_features
    keys, row_FB = features.inverse_indices()
    rows_F = [(features[key], row_B.tolist()) for key, row_B in zip(keys, row_FB)]
    is_weighted = features.weights_or_none() is not None
    batch.sparse_features = KeyedJaggedTensor(
        keys=keys,
        values=torch.cat([each.to_dense()[row] for each, rows in rows_F for row in rows]),
        lengths=torch.cat([each.lengths()[rows] for each, rows in rows_F]),
        weights=torch.cat([each.to_dense_weights()[row] for each, rows in rows_F for row in rows])
        if is_weighted
        else None,
    )
    return batch


def one_that_counts_nothing(batch: Batch, step: int) -> Batch:
    """A sample of no lookups that no loss and no prediction shows, in place of no samples."""
    features = batch.sparse_features
    if len(batch.labels):
        return batch
    batch.sparse_features = KeyedJaggedTensor(
        keys=features.keys(),
        values=features.values(),
        lengths=torch.zeros(len(features.keys()), dtype=features.lengths().dtype),
    )
    batch.dense_features, batch.labels = torch.zeros(1, 4), -torch.ones(1)
    return batch
