"""A model that looks up sequences beside bags, trained under any placement of its tables.

A target attends over a history of the same table; a second sequence table and two collections of
pooled ones stand beside. Every placement starts from the same weights and sees the same batches.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torchrec import JaggedTensor
from torchrec.datasets.utils import Batch
from torchrec.distributed import DistributedModelParallel

from tests.sharding.jobs import Job, Result, Table, keys_of, make_batch, result_of_module, shard
from tests.support.tables import bags_of, sequences_of

DIM = 8
MAX_LENGTH = 5
TABLES_OF = {
    "ec": (Table("item", DIM, 40, ("history", "target")), Table("shop", DIM, 3, ("shops",))),
    "ebc": (Table("user", 2 * DIM, 17, ("user",)), Table("tag", 2 * DIM, 5, ("tags", "more_tags"))),
    "means": (Table("genre", DIM, 11, ("genres",), mean=True),),
}
"""By path of the collection. The history comes before the target, and in the batch after it."""
FEATURES = ("target", "tags", "history", "genres", "user", "shops", "more_tags")

Driver = Callable[[DistributedModelParallel, list[Batch]], list[Tensor]]
"""Trains a model on batches; gives the predictions of each."""


@dataclass(frozen=True)
class SequenceJob(Job):
    """One training run; per-sample weights of a batch are ignored by sequences."""

    tables: tuple[Table, ...] = tuple(table for each in TABLES_OF.values() for table in each)
    optimizer_kwargs: Mapping[str, Any] = field(default_factory=lambda: {"lr": 0.1, "eps": 1e-2})
    num_steps: int = 5
    need_indices: bool = False
    single: tuple[str, ...] = ("target",)
    features: tuple[str, ...] = FEATURES  # type: ignore[assignment]
    """The order in which a batch has them."""


class SequenceModel(nn.Module):
    """Returns (loss, prediction) as pipelines expect."""

    def __init__(self, job: SequenceJob) -> None:
        super().__init__()
        torch.manual_seed(job.seed)
        sequences, pooled, (means,) = TABLES_OF.values()
        self.ec = sequences_of(sequences, need_indices=job.need_indices)
        if job.weighted:  # placements do not agree on what a weighted mean is
            means = replace(means, mean=False)
        self.ebc, self.means = (
            bags_of(tables, is_weighted=job.weighted) for tables in (pooled, [means])
        )
        self.over = nn.Linear(3 * DIM + 3 * 2 * DIM + DIM, 1)
        self.keys, self.need_indices = keys_of(pooled), job.need_indices

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        found = self.ec(batch.sparse_features)
        pooled = self.ebc(batch.sparse_features)
        target_BD = found["target"].values()
        history_BLD = _padded(found["history"])
        scores_BL = torch.softmax((history_BLD * target_BD.unsqueeze(1)).sum(2), dim=1)
        attended_BD = (scores_BL.unsqueeze(2) * history_BLD).sum(1)
        shops_BD = _padded(found["shops"]).sum(1)
        bags = [pooled[key] for key in self.keys] + [self.means(batch.sparse_features)["genres"]]
        out = self.over(torch.cat([target_BD, attended_BD, shops_BD, *bags], dim=1)).squeeze(1)
        if self.need_indices:  # ids belong to their embeddings, else the loss shows it
            out = out + 0.01 * _padded_ids(found["history"]).sum(1)
        loss = ((out - batch.labels) ** 2).sum() / 6
        return loss, out.detach()


def _padded(sequence: JaggedTensor) -> Tensor:
    return sequence.to_padded_dense(MAX_LENGTH)


def _padded_ids(sequence: JaggedTensor) -> Tensor:
    ids = sequence.weights().float().unsqueeze(1)
    return _padded(JaggedTensor(values=ids, lengths=sequence.lengths())).squeeze(2)


def build_sequences(job: SequenceJob, world_size: int) -> DistributedModelParallel:
    """Shards the job's model, with the weights that the unsharded model starts from."""
    return shard(SequenceModel(job), job, TABLES_OF, world_size)


def train_sequences(model: Any, job: SequenceJob, rank: int, drive: Driver) -> Result:
    """Trains; losses by the model's own formula."""
    batches = [make_batch(job, rank, step) for step in range(job.num_steps)]
    outputs = drive(model, batches)
    losses = [
        float(((output - batch.labels) ** 2).sum() / 6)
        for output, batch in zip(outputs, batches, strict=True)
    ]
    return result_of_module(model, losses, tuple(TABLES_OF))
