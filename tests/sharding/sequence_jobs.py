"""A model that looks up sequences beside bags, trained under any placement of its tables.

A target attends over a history of the same table; a second sequence table and two collections of
pooled ones stand beside. Every placement starts from the same weights and sees the same batches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    JaggedTensor,
    KeyedJaggedTensor,
    PoolingType,
)
from torchrec.datasets.utils import Batch
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding import EmbeddingCollectionSharder

from tests.sharding.jobs import (
    OPTIMIZERS,
    Result,
    RowWiseOnCpuSharder,
    load_whole,
    params_of,
    result_of_module,
    way_of,
)
from tests.support.placing import CPU, distribute, place, wire_codecs
from torchrec_picasso import (
    HotColdEmbeddingBagCollectionSharder,
    HotColdEmbeddingCollectionSharder,
)

DIM = 8
MAX_LENGTH = 5
SEQUENCE_TABLES = {"item": (40, ("history", "target")), "shop": (3, ("shops",))}
"""Rows and features; the history comes before the target, and in the batch after it."""
POOLED_TABLES = {"user": (17, ("user",)), "tag": (5, ("tags", "more_tags"))}
MEAN_TABLES = {"genre": (11, ("genres",))}
"""A collection of its own."""
TABLES_OF = {"ec": SEQUENCE_TABLES, "ebc": POOLED_TABLES, "means": MEAN_TABLES}
"""By path of the collection."""
FEATURES = ("target", "tags", "history", "genres", "user", "shops", "more_tags")

Driver = Callable[[DistributedModelParallel, list[Batch]], list[Tensor]]
"""Trains a model on batches; gives the predictions of each."""

Place = str | int
"""``table_wise``, ``row_wise``, a number of hot rows, or ``bags``: hot/cold, its bags travel."""


@dataclass(frozen=True)
class SequenceJob:
    """One training run; ``"*"`` stands for all tables that are not named."""

    placement: Mapping[str, Place]
    optimizer: str = "rowwise_adagrad"
    optimizer_kwargs: Mapping[str, Any] = field(default_factory=lambda: {"lr": 0.1, "eps": 1e-2})
    num_steps: int = 5
    batch_sizes: tuple[int, ...] = (16,)
    need_indices: bool = False
    weighted: bool = False
    """Whether the batch has per-sample weights, which sequences ignore."""
    waves: Mapping[str, int] = field(default_factory=dict)
    wire: str | None = None
    features: tuple[str, ...] = FEATURES
    """The order in which a batch has them."""
    seed: int = 0

    def batch_size(self, rank: int) -> int:
        return self.batch_sizes[rank % len(self.batch_sizes)]


class SequenceModel(nn.Module):
    """Returns (loss, prediction) as pipelines expect."""

    def __init__(self, job: SequenceJob) -> None:
        super().__init__()
        torch.manual_seed(job.seed)
        self.ec = EmbeddingCollection(
            device=CPU,
            need_indices=job.need_indices,
            tables=[
                EmbeddingConfig(
                    name=name,
                    embedding_dim=DIM,
                    num_embeddings=rows,
                    feature_names=list(features),
                )
                for name, (rows, features) in SEQUENCE_TABLES.items()
            ],
        )
        self.ebc = _bags(job, POOLED_TABLES, 2 * DIM, PoolingType.SUM)
        # placements do not agree on what a weighted mean is
        pooling = PoolingType.SUM if job.weighted else PoolingType.MEAN
        self.means = _bags(job, MEAN_TABLES, DIM, pooling)
        self.over = nn.Linear(3 * DIM + 3 * 2 * DIM + DIM, 1)
        self.need_indices = job.need_indices

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        found = self.ec(batch.sparse_features)
        pooled = self.ebc(batch.sparse_features)
        target_BD = found["target"].values()
        history_BLD = _padded(found["history"])
        scores_BL = torch.softmax((history_BLD * target_BD.unsqueeze(1)).sum(2), dim=1)
        attended_BD = (scores_BL.unsqueeze(2) * history_BLD).sum(1)
        shops_BD = _padded(found["shops"]).sum(1)
        keys = [f for _, features in POOLED_TABLES.values() for f in features]
        bags = [pooled[key] for key in keys] + [self.means(batch.sparse_features)["genres"]]
        out = self.over(torch.cat([target_BD, attended_BD, shops_BD, *bags], dim=1)).squeeze(1)
        if self.need_indices:  # ids belong to their embeddings, else the loss shows it
            out = out + 0.01 * _padded_ids(found["history"]).sum(1)
        loss = ((out - batch.labels) ** 2).sum() / 6
        return loss, out.detach()


def _bags(
    job: SequenceJob,
    tables: Mapping[str, tuple[int, tuple[str, ...]]],
    dim: int,
    pooling: PoolingType,
) -> EmbeddingBagCollection:
    return EmbeddingBagCollection(
        device=CPU,
        is_weighted=job.weighted,
        tables=[
            EmbeddingBagConfig(
                name=name,
                embedding_dim=dim,
                num_embeddings=rows,
                feature_names=list(features),
                pooling=pooling,
            )
            for name, (rows, features) in tables.items()
        ],
    )


def _padded(sequence: JaggedTensor) -> Tensor:
    return sequence.to_padded_dense(MAX_LENGTH)


def _padded_ids(sequence: JaggedTensor) -> Tensor:
    ids = sequence.weights().float().unsqueeze(1)
    return _padded(JaggedTensor(values=ids, lengths=sequence.lengths())).squeeze(2)


def make_sequence_batch(job: SequenceJob, rank: int, step: int) -> Batch:
    """Histories of 0 to 4 items, skewed to low ids, one target per sample."""
    generator = torch.Generator().manual_seed(100_000 * job.seed + 1000 * step + rank)
    batch_size = job.batch_size(rank)
    rows_of = {f: rows for tables in TABLES_OF.values() for rows, fs in tables.values() for f in fs}
    lengths = [
        torch.ones(batch_size, dtype=torch.int64)
        if name == "target"
        else torch.randint(0, MAX_LENGTH, (batch_size,), generator=generator)
        for name in job.features
    ]
    values = [
        (torch.rand(int(length.sum()), generator=generator) ** 3 * rows_of[name]).long()
        for name, length in zip(job.features, lengths)
    ]
    num_lookups = sum(v.numel() for v in values)
    return Batch(
        dense_features=torch.zeros(batch_size, 1),
        sparse_features=KeyedJaggedTensor(
            keys=list(job.features),
            values=torch.cat(values),
            lengths=torch.cat(lengths),
            weights=torch.rand(num_lookups, generator=generator) if job.weighted else None,
        ),
        labels=torch.randn(batch_size, generator=generator),
    )


def build_sequences(job: SequenceJob, world_size: int) -> DistributedModelParallel:
    """Shards the job's model, with the weights that the unsharded model starts from."""
    model = SequenceModel(job)
    start = {name: value.detach().clone() for name, value in model.state_dict().items()}
    tables = {**SEQUENCE_TABLES, **POOLED_TABLES, **MEAN_TABLES}
    places = {name: job.placement.get(name, job.placement.get("*")) for name in tables}
    hot_cold = {
        name: params
        for name, (rows, _) in tables.items()
        if (params := params_of(places[name], rows, job.waves.get(name, 0))) is not None
    }
    sequences, bags = (
        (HotColdEmbeddingCollectionSharder, HotColdEmbeddingBagCollectionSharder)
        if hot_cold
        else (EmbeddingCollectionSharder, RowWiseOnCpuSharder)
    )
    of_sequences, of_bags = (
        kind(qcomm_codecs_registry=wire_codecs(job.wire)) for kind in (sequences, bags)
    )
    plans = {}
    for path, own in TABLES_OF.items():
        module = model.get_submodule(path)
        apply_optimizer_in_backward(
            OPTIMIZERS[job.optimizer], module.parameters(), dict(job.optimizer_kwargs)
        )
        plans[path] = place(
            module,
            of_sequences if path == "ec" else of_bags,
            {name: way_of(places[name], i % world_size) for i, name in enumerate(own)},
            {name: hot_cold[name] for name in own if name in hot_cold},
        )
    sharded = distribute(model, plans, [of_sequences, of_bags])
    load_whole(sharded, start)
    return sharded


def train_sequences(
    model: DistributedModelParallel,
    job: SequenceJob,
    rank: int,
    drive: Driver,
) -> Result:
    """Trains; losses by the model's own formula."""
    batches = [make_sequence_batch(job, rank, step) for step in range(job.num_steps)]
    outputs = drive(model, batches)
    losses = [
        float(((output - batch.labels) ** 2).sum() / 6)
        for output, batch in zip(outputs, batches, strict=True)
    ]
    return result_of_module(model, losses, tuple(TABLES_OF))
