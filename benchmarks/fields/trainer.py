"""One variant's model, placed, initialised and in the hands of its pipeline."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.datasets.utils import Batch

from benchmarks.fields.plans import Planned
from benchmarks.pipelines.variants import Variant, pipeline_maker
from torchrec_picasso.app.config import OptimizerConfig
from torchrec_picasso.app.runs.trainer import shard_model
from torchrec_picasso.train_pipeline.step_report import OnStep


class VariantTrainer:
    """Model and pipeline of one variant. Collective: every rank makes one, in the same order.

    Args:
        variant: Variant that is trained.
        model: Before sharding.
        planned: Where its tables go.
        pg: The ranks.
        seed: Draws the tables' first weights, the same for every plan.
        optimizer: Optimizer of the dense part.
        on_step: Called with the step reports of an interleaved pipeline.
    """

    def __init__(
        self,
        variant: Variant,
        model: nn.Module,
        planned: Planned,
        pg: dist.ProcessGroup,
        seed: int,
        optimizer: OptimizerConfig,
        on_step: OnStep | None = None,
    ) -> None:
        self.placement, device = planned.placement, torch.device("cpu")
        self._model, both = shard_model(model, self.placement, pg, device, seed, optimizer)
        self.pipeline = pipeline_maker(variant, on_step)(self._model, both, device)

    def steps(self, batches: Iterable[Batch]) -> Iterator[Tensor]:
        """Trains on the given batches, one at a time, until they end. Collective.

        Yields:
            This rank's loss of each step, a scalar.
        """
        self._model.train()
        stream = iter(batches)
        while True:
            try:
                loss, _, _ = self.pipeline.progress(stream)
            except StopIteration:
                return
            yield loss
