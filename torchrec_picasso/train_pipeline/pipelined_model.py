"""The sharded modules of a model, sorted by how the pipeline runs them; for one rewriting of it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.types import ShardedModule

from torchrec_picasso._torchrec import PipelinedPostproc, TrainPipelineContext
from torchrec_picasso.batches.split import num_samples
from torchrec_picasso.errors import InputError
from torchrec_picasso.sharding.sharded_ebc import ShardedHotColdEmbeddingBagCollection
from torchrec_picasso.train_pipeline.model_parts import (
    samples_of_input,
    unpipelined_modules,
    why_computed_once,
)
from torchrec_picasso.train_pipeline.postprocs import Postprocs

__all__ = ["PipelinedModel", "count_samples", "survey"]

ODD_BATCH = (
    "its KeyedJaggedTensor has a batch size per feature (variable batch), or another one than the "
    "batch"
)


class PipelinedModel:
    """What TorchRec's rewrite found, by name.

    Args:
        inner: The model inside its wrapper.
        pipelined: Modules whose forward was taken over.
        unpipelined: Names of those that the tracer saw called with another input.
        postprocs: Modules that run ahead of the model.
    """

    def __init__(
        self,
        inner: nn.Module,
        pipelined: Sequence[ShardedModule],
        unpipelined: Collection[str],
        postprocs: Sequence[PipelinedPostproc],
    ) -> None:
        self.interleaved: dict[str, Any] = {}
        """Modules whose exchange a schedule drives."""
        self.plain: dict[str, Any] = {}
        """Modules computed once per batch."""
        self.why_plain: dict[str, str] = {}
        for module in pipelined:
            name = module.forward.name
            is_hot_cold = isinstance(module, ShardedHotColdEmbeddingBagCollection)
            if is_hot_cold and module.can_interleave:
                self.interleaved[name] = module
            else:
                self.plain[name] = module
                self.why_plain[name] = why_computed_once(module)
        self.unpipelined = unpipelined_modules(inner, pipelined, unpipelined)
        self.postprocs = Postprocs(postprocs)

    @property
    def num_waves(self) -> int:
        """Waves that the plan cut the packs into."""
        return max((module.num_waves for module in self.interleaved.values()), default=1)

    def samples_of(self, batch: Any, context: TrainPipelineContext) -> dict[str, int | None]:
        """Of each interleaved module, how many samples its features have.

        Returns:
            ``None`` = a batch size per feature.
        """
        with self.postprocs.of_batch(context):
            return {
                name: samples_of_input(*module.forward.args.build_args_kwargs(batch))
                for name, module in self.interleaved.items()
            }

    def compute_once(self, names: Collection[str], why: str) -> None:
        """Interleaves these modules no more."""
        for name in names:
            self.plain[name] = self.interleaved.pop(name)
            self.why_plain[name] = why

    def lines(self) -> list[str]:
        """A line per module."""
        waves = {
            name: f" in {module.num_waves} waves" if module.num_waves > 1 else ""
            for name, module in self.interleaved.items()
        }
        return [
            *(f"{name}: interleaved{of_waves}" for name, of_waves in waves.items()),
            *(
                f"{name}: computed once per batch, of its exchange only that of ids is hidden: "
                f"{self.why_plain[name]}"
                for name in self.plain
            ),
            *(f"{name}: not pipelined: {reason}" for name, reason in self.unpipelined.items()),
        ]


def count_samples(batch: Any) -> int | None:
    """Samples of a batch; ``None`` = they cannot be counted."""
    try:
        return num_samples(batch)
    except InputError:
        return None


def survey(pg: dist.ProcessGroup, device: torch.device, values: Sequence[int]) -> list[int]:
    """The largest value of each over all ranks, so that ranks decide alike. Collective.

    Args:
        pg: Process group.
        device: Where collectives of ``pg`` run.
        values: This rank's.
    """
    most = torch.tensor(list(values), device=device)
    if pg.size() > 1:
        dist.all_reduce(most, dist.ReduceOp.MAX, group=pg)
    return [int(value) for value in most.tolist()]
