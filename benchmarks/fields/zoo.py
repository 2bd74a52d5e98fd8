"""A model of the zoo for variants."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from torch import nn
from torchrec.datasets.utils import Batch

from benchmarks.fields.workload import ModelTable
from torchrec_picasso.app.config import TrainConfig
from torchrec_picasso.app.runs.trainer import unsharded_model
from torchrec_picasso.app.zoo.registry import build_model, make_source
from torchrec_picasso.frequency.collect import table_configs

_COUNTED_FROM = 1000
"""The first step of clicks that lookups are counted in; variants train on those from 0 on."""


class ZooWorkload:
    """A configuration's model and samples.

    Args:
        config: Configuration of the model and its data.
        world_size: Ranks that share a step.
    """

    def __init__(self, config: TrainConfig, world_size: int) -> None:
        self._config, self._world_size = config, world_size
        self._source = make_source(config.data, config.seed)

    @property
    def tables(self) -> Sequence[ModelTable]:
        """All tables, in the model's order."""
        features = self.training(0, 1)[0].sparse_features
        lookups = dict(zip(features.keys(), features.length_per_key()))
        return [
            ModelTable(
                name=table.name,
                module=path,
                num_embeddings=table.num_embeddings,
                dim=table.embedding_dim,
                ids_per_sample=sum(lookups[name] for name in table.feature_names)
                / self._config.data.batch_size,
            )
            for path, table in table_configs(build_model(self._config, self._source))
        ]

    def model(self) -> nn.Module:
        """The model before sharding, a row-wise optimizer fused into its tables."""
        return unsharded_model(self._config, self._source)

    def training(self, rank: int, num_batches: int) -> list[Batch]:
        """One rank's batches."""
        return list(itertools.islice(self._source.batches(rank, self._world_size), num_batches))

    def heldout(self, world_size: int, num_steps: int) -> Iterator[Batch]:
        """All ranks' batches that hot rows are chosen from.

        Too few clicks are held out for that; they are drawn from those that are trained on.
        """
        shares = [
            self._source.batches(rank, world_size, _COUNTED_FROM)
            if self._config.data.kind == "clicks"
            else self._source.heldout(rank, world_size)
            for rank in range(world_size)
        ]
        steps = itertools.islice(zip(*shares), num_steps)
        return itertools.chain.from_iterable(steps)

    def in_words(self) -> str:
        """Description of the workload, for the head of a report."""
        data = self._config.data
        samples = data.path or f"generated {data.kind}"
        return f"{self._config.model.kind}, {samples}"
