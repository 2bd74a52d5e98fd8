"""Bytes of a step both ways, and of the other way with its samples put in a better order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torchrec.datasets.utils import Batch

from benchmarks.first_use.streams import Steps
from benchmarks.first_use.travel import Tables, Travel
from torchrec_picasso.app.zoo.data.clicks import Clicks
from torchrec_picasso.batches.split import micro_batch_sizes
from torchrec_picasso.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Found:
    """Traffic of one stream, per rank and step, mean of some steps.

    Args:
        stream: Name of the stream.
        batch_size: Samples per rank and step.
        micro_batches: Micro-batches of a step, K.
        steps: Number of counted steps.
        lookups: Ids of a batch.
        hot_rows: Rows with replicas.
        first_use_bytes: Every row once, in the chunk of its first use.
        per_micro_batch_bytes: Each micro-batch's own unique rows.
        clustered_bytes: Bytes per micro-batch with the samples sorted by one column.
        clustered_by: The column that saves most.
    """

    stream: str
    batch_size: int
    micro_batches: int
    steps: int
    lookups: float
    hot_rows: int
    first_use_bytes: float
    per_micro_batch_bytes: float
    clustered_bytes: float
    clustered_by: str

    @property
    def ratio(self) -> float:
        """How many times the bytes of first use a dedup per micro-batch sends."""
        return self.per_micro_batch_bytes / self.first_use_bytes

    @property
    def clustered_ratio(self) -> float:
        """The ratio with its samples sorted."""
        return self.clustered_bytes / self.first_use_bytes


def compare(
    name: str,
    samples: Clicks,
    *,
    batch_size: int,
    micro_batches: Sequence[int],
    dim: int,
    hot_rows: int = 0,
    world_size: int = 2,
    num_steps: int = 2,
) -> Iterator[Found]:
    """Counts a stream.

    Raises:
        InputError: If the stream is shorter than a step, and one to choose hot rows from.
    """
    kept = 1 if hot_rows else 0  # the first one tells the hot rows
    steps = Steps(
        samples=samples,
        batch_size=batch_size,
        world_size=world_size,
        num_steps=num_steps + kept,
    )
    if len(steps) <= kept:
        raise InputError(
            f"{name}: {len(samples):,} samples, but {1 + kept} x {world_size} x {batch_size:,} are "
            "needed (steps x ranks x batch size; hot rows take a step more); lower --batch-sizes"
        )
    tables = Tables(samples, dim, world_size)
    if hot_rows:
        tables.replicate(tables.most_looked_up(steps.batches(0), hot_rows))
    batches_of_steps = [steps.batches(step) for step in range(kept, len(steps))]
    share = world_size * len(batches_of_steps)

    def per_rank(travels: Iterator[Travel]) -> float:
        return sum(travel.sent_bytes for travel in travels) / share

    for num in micro_batches:
        sizes_K = micro_batch_sizes(batch_size, num)
        by_column = {
            column: per_rank(
                tables.per_micro_batch([_sorted_by(column, batch) for batch in batches], sizes_K)
                for batches in batches_of_steps
            )
            for column in (*samples.profiles, *samples.targets)
        }
        best = min(by_column, key=lambda column: by_column[column])
        yield Found(
            stream=name,
            batch_size=batch_size,
            micro_batches=num,
            steps=len(batches_of_steps),
            lookups=sum(map(tables.lookups, batches_of_steps)) / share,
            hot_rows=tables.num_hot_rows,
            first_use_bytes=per_rank(
                tables.first_use(batches, sizes_K) for batches in batches_of_steps
            ),
            per_micro_batch_bytes=per_rank(
                tables.per_micro_batch(batches, sizes_K) for batches in batches_of_steps
            ),
            clustered_bytes=by_column[best],
            clustered_by=best,
        )


def _sorted_by(column: str, batch: Batch) -> Batch:
    """A rank's samples in the order of their ids in a column."""
    order_B = batch.sparse_features[column].values().argsort(stable=True)
    features = batch.sparse_features
    lengths_FB = features.lengths().view(len(features.keys()), -1)
    bags_FB = torch.arange(lengths_FB.numel()).view(lengths_FB.shape)[:, order_B].reshape(-1)
    lengths, values, _ = torch.ops.fbgemm.permute_1D_sparse_data(
        bags_FB.to(torch.int32), features.lengths(), features.values(), None, None
    )
    return Batch(
        dense_features=batch.dense_features[order_B],
        sparse_features=type(features)(keys=features.keys(), values=values, lengths=lengths),
        labels=batch.labels[order_B],
    )
