"""One variant's model, placed, initialised and in the hands of its pipeline."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.datasets.utils import Batch
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline import TrainPipeline
from torchrec.distributed.types import ShardingEnv
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from benchmarks.fields.plans import Planned
from benchmarks.fields.variants import make_pipeline
from benchmarks.pipelines.variants import Variant
from torchrec_picasso.app.config import OptimizerConfig
from torchrec_picasso.app.runs.trainer import dense_optimizer
from torchrec_picasso.app.zoo.initial_tables import write_initial_tables
from torchrec_picasso.app.zoo.tables import tables_of

__all__ = ["VariantTrainer"]


class VariantTrainer:
    """What trains for one variant. Collective: every rank makes one, in the same order.

    Args:
        variant: Who trains.
        model: Before sharding.
        planned: Where its tables go.
        pg: The ranks.
        seed: Draws the tables' first weights, the same for every plan.
        optimizer: Of the dense part.
    """

    def __init__(
        self,
        variant: Variant,
        model: nn.Module,
        planned: Planned,
        pg: dist.ProcessGroup,
        seed: int,
        optimizer: OptimizerConfig,
    ) -> None:
        self.placement = planned.placement
        device, tables = torch.device("cpu"), tables_of(model)
        self._model = DistributedModelParallel(
            module=model,
            env=ShardingEnv.from_process_group(pg),
            device=device,
            plan=self.placement.plan,
            sharders=self.placement.sharders,
        )
        write_initial_tables(self._model, tables, seed)
        dense = KeyedOptimizerWrapper(
            dict(in_backward_optimizer_filter(self._model.named_parameters())),
            dense_optimizer(optimizer),
        )
        both = CombinedOptimizer([self._model.fused_optimizer, dense])
        self._pipeline = make_pipeline(variant, self._model, both, device)

    @property
    def pipeline(self) -> TrainPipeline:
        """What trains."""
        return self._pipeline

    def steps(self, batches: Iterable[Batch]) -> Iterator[Tensor]:
        """Trains on the given batches, one at a time, until they end. Collective.

        Args:
            batches: This rank's batches; each rank must give as many.

        Yields:
            This rank's loss of each step, a scalar.
        """
        self._model.train()
        stream = iter(batches)
        while True:
            try:
                loss, _, _ = self._pipeline.progress(stream)
            except StopIteration:
                return
            yield loss
