"""The lines of the table of features: what is turned on in each, and nothing of how it goes."""

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torchrec
from fbgemm_gpu.split_table_batched_embeddings_ops_training import WeightDecayMode
from tensordict import TensorDict
from torch import Tensor, nn
from torchrec import KeyedJaggedTensor
from torchrec.datasets.utils import Batch
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.fused_embeddingbag import FusedEmbeddingBagCollectionSharder
from torchrec.distributed.mc_embedding import ManagedCollisionEmbeddingCollectionSharder
from torchrec.distributed.mc_embeddingbag import ManagedCollisionEmbeddingBagCollectionSharder
from torchrec.distributed.types import ModuleSharder
from torchrec.modules.embedding_configs import DataType
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
from torchrec.modules.mc_embedding_modules import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)
from torchrec.modules.regroup import KTRegroupAsDict
from torchrec.optim import optimizers

from tests.sharding.jobs import RowWiseOnCpuSharder, Table
from tests.support.dense_updates import train_unsharded
from tests.support.placing import CPU
from tests.train_pipeline.feature_cells import (
    NUM_EVALUATED,
    NUM_TRAINED,
    TABLES,
    Feature,
    Model,
    Outcome,
    batch_of,
    collection,
    one_that_counts_nothing,
    own_rows,
    own_rows_by_sample,
    pooled_by,
)

SHARED = (
    Table("t_a", 8, 30, ("f",)),
    Table("t_b", 8, 12, ("g", "h")),
    Table("t_c", 8, 6, ("f", "i")),
)
MEAN = tuple(dataclasses.replace(table, mean=True) for table in TABLES)
MIXED_DIMS = (Table("t_a", 8, 30, ("f",)), Table("t_b", 16, 12, ("g",)), Table("t_c", 4, 6, ("h",)))


class Two(Model):
    """Two collections, each with some of the tables, of one feature each."""

    num_first = 1
    """Tables of the first; -1 = all but the last."""

    def make(self, feature: Feature) -> None:
        self.tables = collection(feature, self.kind, feature.tables[: self.num_first])
        self.more_tables = self.make_more(feature, feature.tables[self.num_first :])

    def make_more(self, feature: Feature, tables: Sequence[Table]) -> nn.Module:
        return collection(feature, self.kind, tables)

    def look_up(self, features: KeyedJaggedTensor) -> list[Tensor]:
        first, more = self.keys[: self.num_first], self.keys[self.num_first :]
        return [
            *pooled_by(self.tables(features), first),
            *pooled_by(self.look_up_more(features), more),
        ]

    def look_up_more(self, features: KeyedJaggedTensor) -> Any:
        return self.more_tables(features)


class ProcessedFirst(Two):
    """Processed tables beside others without weights, which share a batch's features."""

    def make_more(self, feature: Feature, tables: Sequence[Table]) -> nn.Module:
        return collection(dataclasses.replace(feature, processors=None), self.kind, tables)


class _Tied(Two):
    """Two collections with one table in common."""

    def make(self, feature: Feature) -> None:
        self.tables = collection(feature, self.kind, feature.tables[:1])
        self.more_tables = collection(feature, self.kind, feature.tables)
        tables, more_tables = (
            dict(module.named_modules()) for module in (self.tables, self.more_tables)
        )
        name = "embedding_bags.t_a" if self.kind == "bags" else "embeddings.t_a"
        more_tables[name].weight = tables[name].weight

    def look_up(self, features: KeyedJaggedTensor) -> list[Tensor]:
        once, again = self.tables(features), self.more_tables(features)
        first, *others = pooled_by(again, self.keys)
        return [first + pooled_by(once, self.keys[:1])[0], *others]


class _Normed(Model):
    def __init__(self, feature: Feature, kind: str) -> None:
        super().__init__(feature, kind)
        self.over = nn.Sequential(nn.BatchNorm1d(self.over.in_features), self.over)


class _OddLoss(Model):
    def loss(self, out: Tensor, batch: Batch) -> Tensor:
        squares = (out - batch.labels) ** 2
        clicked = (batch.labels > 0.5).float()
        return (squares * clicked).sum() / clicked.sum().clamp(min=1)


class _PerLookup(Model):
    """An output per lookup of a feature, in a plain tensor."""

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        out = self.predict(self.look_up(batch.sparse_features), batch)
        ids_N = batch.sparse_features["f"].values()
        return self.loss(out, batch), ids_N * self.over.bias.detach()


class _Made(Model):
    """Features that are changed on their way to the tables, by a module without parameters."""

    def make(self, feature: Feature) -> None:
        super().make(feature)
        self.shift = _Shift()

    def look_up(self, features: KeyedJaggedTensor) -> list[Tensor]:
        return super().look_up(self.shift(features))


class _Shift(nn.Module):
    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        values = (features.values() + 1) % 6
        return KeyedJaggedTensor(features.keys(), values, lengths=features.lengths())


class _Keyword(Model):
    def look_up(self, features: KeyedJaggedTensor) -> list[Tensor]:
        return pooled_by(self.tables(features=features), self.keys)


class _Regrouped(Model):
    def make(self, feature: Feature) -> None:
        super().make(feature)
        self.regroup = KTRegroupAsDict([self.keys[-1:], self.keys[:-1]], ["last", "first"])

    def look_up(self, features: KeyedJaggedTensor) -> list[Tensor]:
        groups = self.regroup([self.tables(features)])
        return [groups["first"], groups["last"]]


class _ManagedCollision(Two):
    """Raw ids of a table beside hot/cold ones become its rows, which others take over in time."""

    num_first = -1

    def make_more(self, feature: Feature, tables: Sequence[Table]) -> nn.Module:
        inner, (managed,) = collection(feature, self.kind, tables), tables
        configs = getattr(inner, f"embedding_{'bag_' * (self.kind == 'bags')}configs")()
        configs[0].init_fn = torch.nn.init.ones_  # of rows that are taken over; else it draws
        collisions = ManagedCollisionCollection({managed.name: managed_ids(managed.rows)}, configs)
        return MANAGED[self.kind](inner, collisions)

    def look_up_more(self, features: KeyedJaggedTensor) -> Any:
        found, _ = self.more_tables(features)
        return found


class _Fused(Two):
    """A FusedEmbeddingBagCollection, with its own way to an optimizer, beside hot/cold tables."""

    num_first = -1

    def make_more(self, feature: Feature, tables: Sequence[Table]) -> nn.Module:
        return FusedEmbeddingBagCollection(
            collection(feature, self.kind, tables).embedding_bag_configs(),
            optimizer_type=torchrec.optim.RowWiseAdagrad,
            optimizer_kwargs=dict(feature.optimizer_kwargs),
            device=CPU,
        )


def managed_ids(rows: int, **more: Any) -> MCHManagedCollisionModule:
    """Raw ids below 1000 on their way to rows."""
    evicts: Any = {"eviction_policy": DistanceLFU_EvictionPolicy(), "eviction_interval": 2}
    return MCHManagedCollisionModule(rows, CPU, input_hash_size=1000, **evicts, **more)


MANAGED: dict[str, Any] = {
    "bags": ManagedCollisionEmbeddingBagCollection,
    "sequences": ManagedCollisionEmbeddingCollection,
}


def managed_collision_sharders(
    bags: Any = None, sequences: Any = None
) -> dict[type, ModuleSharder[Any]]:
    """TorchRec's sharders of managed collision; on the CPU its own leave row-wise out."""
    return {
        ManagedCollisionEmbeddingBagCollection: ManagedCollisionEmbeddingBagCollectionSharder(
            bags or RowWiseOnCpuSharder()
        ),
        ManagedCollisionEmbeddingCollection: ManagedCollisionEmbeddingCollectionSharder(
            sequences or EmbeddingCollectionSharder()
        ),
    }


def _raw_ids(batch: Batch, step: int) -> Batch:
    """Ids of the last feature far beyond its table's rows, others in each step."""
    features = batch.sparse_features
    features.values()[sum(features.length_per_key()[:-1]) :].mul_(37).add_(step)
    return batch


def _tensor_dict(batch: Batch, step: int) -> Batch:
    features = batch.sparse_features
    nested = {
        key: torch.nested.nested_tensor_from_jagged(each.values(), each.offsets())
        for key, each in features.to_dict().items()
    }
    batch.sparse_features = TensorDict(nested, batch_size=[features.stride()])
    return batch


def _run_unsharded(formula: str, feature: Feature, kind: str, rank: int) -> Outcome:
    """Trains by one of FBGEMM's formulas, then evaluates."""
    model, steps = Model(feature, kind), range(NUM_TRAINED + NUM_EVALUATED)
    batches = [batch_of(feature, rank, step, is_ours=False) for step in steps]
    optimizer = {"name": formula, **feature.optimizer_kwargs}
    trained = train_unsharded(model, batches[:NUM_TRAINED], feature.tables, **optimizer)
    with torch.no_grad():
        return Outcome(*trained, [model(batch)[1] for batch in batches[NUM_TRAINED:]])


OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.05}),
    "row-wise Adagrad": (torchrec.optim.RowWiseAdagrad, {"lr": 0.1, "eps": 1e-2}),
    "row-wise Adagrad with weight decay": (
        torchrec.optim.RowWiseAdagrad,
        {"lr": 0.1, "weight_decay": 0.1, "weight_decay_mode": WeightDecayMode.L2},
    ),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.1, "eps": 1e-2}),
    "LARS SGD": (optimizers.LarsSGD, {"lr": 0.1}),
}
ONLY_OURS = {
    "Adam": ("adam", torchrec.optim.Adam),
    "LAMB": ("lamb", optimizers.LAMB),
    "partial row-wise Adam": ("partial_rowwise_adam", optimizers.PartialRowWiseAdam),
    "partial row-wise LAMB": ("partial_rowwise_lamb", optimizers.PartialRowWiseLAMB),
}
"""Without a CPU kernel in FBGEMM: its formula in ``dense_updates.py``, and the optimizer."""

_ROUNDED: Any = {"rtol": 5e-2, "atol": 2e-2}
"""What a wire of 11 or 8 bits may differ by after a few steps: it rounds rows here, bags there."""

OWN_ROWS: Any = {"change_batch": own_rows, "change_of_witness": own_rows_by_sample}
"""TorchRec has no backward for rows of their own: it gets them written out."""
BAGS: Mapping[str, int | str | None] = {"*": "bags"}


def _together(name: str, **more: Any) -> Feature:
    return Feature(name, ("bags",), processors="together", **more)


def _by_host(name: str, *args: Any, **more: Any) -> Feature:
    return Feature(f"rows by host{name}", *args, by_host=True, **more)


FEATURES: Sequence[Feature] = (
    Feature("sum pooling", ("bags",)),
    Feature("mean pooling", ("bags",), tables=MEAN),
    Feature("sequences", ("sequences",)),
    Feature("per-sample weights", weighted=True),
    Feature("feature processors, one a feature", ("bags",), processors="by_feature"),
    _together("feature processors, one for all"),
    _together("feature processors, some tables stock", hot_rows={"*": 2, "t_b": None}),
    _together("feature processors beside tables without weights", model=ProcessedFirst),
    Feature("several features on a table, a feature on several tables", tables=SHARED),
    Feature("mixed dims", tables=MIXED_DIMS),
    Feature("variable batch per feature", **OWN_ROWS),
    Feature("variable batch per feature, mean pooling", ("bags",), MEAN, change_batch=own_rows),
    Feature("variable batch per feature, weights", ("bags",), weighted=True, change_batch=own_rows),
    Feature(
        "variable batch per feature, some tables stock", hot_rows={"*": 2, "t_a": None}, **OWN_ROWS
    ),
    _together("variable batch per feature, feature processors", **OWN_ROWS),
    Feature("need_indices", ("sequences",), need_indices=True),
    Feature("ranks with batches of different size", num_samples=lambda rank, step: 55 - 14 * rank),
    Feature(
        "a batch of no samples on a rank",
        num_samples=lambda rank, step: 0 if rank == 1 and step in (1, 3) else 48,
        change_of_witness=one_that_counts_nothing,
    ),
    Feature("fp16 on the wire", wire="fp16", **_ROUNDED),
    Feature("bf16 on the wire", wire="bf16", **_ROUNDED),
    Feature("int8 on the wire", wire="int8", **_ROUNDED),
    Feature("fp16 weights, no hot rows", hot_rows={"*": 0}, data_type=DataType.FP16, **_ROUNDED),
    Feature("fp16 weights, hot rows", data_type=DataType.FP16, **_ROUNDED),
    *(
        Feature(f"{name}", optimizer=optimizer, optimizer_kwargs=kwargs)
        for name, (optimizer, kwargs) in OPTIMIZERS.items()
    ),
    *(
        Feature(
            f"{name} (unsharded)",
            optimizer=optimizer,
            optimizer_kwargs={"lr": 0.1, "eps": 1e-2, "weight_decay": 0.1},
            witness=partial(_run_unsharded, formula),
        )
        for name, (formula, optimizer) in ONLY_OURS.items()
    ),
    Feature("gradient clipping in the tables", fused_params={"gradient_clipping": True}),
    Feature("no hot rows", hot_rows={"*": 0}),
    Feature("all rows hot", hot_rows={"t_a": 30, "t_b": 12, "t_c": 6}),
    Feature("bags travel", hot_rows=BAGS),
    Feature("bags travel, mean pooling", ("bags",), MEAN, hot_rows=BAGS),
    Feature("bags travel, weights", ("bags",), weighted=True, hot_rows=BAGS),
    _together("bags travel, feature processors", hot_rows=BAGS),
    Feature(
        "bags travel, variable batch per feature", ("bags",), hot_rows=BAGS, change_batch=own_rows
    ),
    _by_host(""),
    _by_host(", mean pooling", ("bags",), MEAN),
    _by_host(", weights", ("bags",), weighted=True),
    _by_host(", feature processors", ("bags",), processors="together"),
    _by_host(", variable batch per feature", **OWN_ROWS),
    Feature("rows beside bags", ("bags",), hot_rows={"*": "bags", "t_b": 2}),
    Feature("rows beside bags beside stock tables", ("bags",), hot_rows={"t_a": "bags", "t_b": 2}),
    Feature("stock tables beside hot/cold ones", hot_rows={"*": 2, "t_b": None}),
    Feature("stock tables only", hot_rows={"*": None}),
    Feature("two collections", model=Two),
    Feature("a table in two collections", model=_Tied),
    Feature("tables called by keyword", model=_Keyword),
    Feature("BatchNorm in the model", model=_Normed),
    Feature("a loss over some samples", model=_OddLoss),
    Feature("an output per lookup", ("bags",), model=_PerLookup),
    Feature("input made inside the model", model=_Made),
    Feature("input made ahead of the model", model=_Made, options={"pipeline_postproc": True}),
    Feature("waves", waves={"t_b": 1}),
    Feature("1 micro-batch", num_micro_batches=1),
    Feature("4 micro-batches", num_micro_batches=4),
    Feature("micro-batches chosen by trying", num_micro_batches=None),
    Feature("2-D parallelism", is_2d=True),
    Feature("fp16 on the wire forward, bf16 backward", wire=("fp16", "bf16"), **_ROUNDED),
    Feature("DTensors in state dicts (output_dtensor)", output_dtensor=True),
    Feature("KTRegroupAsDict", ("bags",), model=_Regrouped),
    Feature("ids read by a data loader (preparation())", is_prepared=True),
    Feature("features in a TensorDict", change_batch=_tensor_dict, num_micro_batches=None),
    Feature(
        "managed collision on a table beside",
        optimizer=torch.optim.SGD,  # of others TorchRec resets the state on CUDA alone
        optimizer_kwargs={"lr": 0.1},
        hot_rows={"*": 2, "t_c": "row_wise"},
        model=_ManagedCollision,
        more_sharders=managed_collision_sharders,
        change_batch=_raw_ids,
    ),
    Feature(
        "FusedEmbeddingBagCollection beside",
        ("bags",),
        hot_rows={"*": 2, "t_c": None},
        model=_Fused,
        more_sharders=lambda: {FusedEmbeddingBagCollection: FusedEmbeddingBagCollectionSharder()},
    ),
)
