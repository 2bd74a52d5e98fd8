"""Modules in front of the tables that TorchRec runs ahead of the model, under micro-batches.

With ``pipeline_postproc=True`` TorchRec's tracer takes modules without parameters, through which
features pass on their way from the batch to a table, out of the model's forward: they run once,
when ids are exchanged, and give the model what they gave then. A micro-batch is given its part.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torchrec_picasso._torchrec import (
    PipelinedPostproc,
    TrainPipelineContext,
    use_context_for_postprocs,
)
from torchrec_picasso.batches.split import reason_of, split_batch
from torchrec_picasso.errors import CompatError, InputError
from torchrec_picasso.train_pipeline.pieces import Cut

__all__ = ["Postprocs"]


class Postprocs:
    """Gives postprocs what they work with.

    Args:
        modules: As TorchRec's rewrite found them.
    """

    def __init__(self, modules: Sequence[PipelinedPostproc]) -> None:
        self._modules = list(modules)

    @contextmanager
    def of_batch(self, context: TrainPipelineContext) -> Iterator[None]:
        """Within it they run for a batch, or give what they gave for it."""
        with use_context_for_postprocs(self._modules, context):
            yield

    @contextmanager
    def of_part(self, context: TrainPipelineContext, cut: Cut, index: int) -> Iterator[None]:
        """Within it they give one micro-batch's part of what they gave for the batch.

        Raises:
            CompatError: If it cannot be cut.
        """
        if not self._modules or len(cut.sizes) == 1:
            with self.of_batch(context):
                yield
            return
        part = TrainPipelineContext(index=context.index, version=context.version)
        part.postproc_fwd_results = {
            name: cut.joined(_cut(result, cut.sizes, name), index)
            for name, result in context.postproc_fwd_results.items()
        }
        with self.of_batch(part):
            yield


def _cut(result: Any, sizes_K: Sequence[int], name: str) -> Sequence[Any]:
    try:
        return split_batch(result, sizes_K)
    except (CompatError, InputError) as error:
        raise CompatError(
            f"{name} is run ahead of the model (pipeline_postproc=True) and gives a "
            f"{type(result).__name__}, which cannot be cut into micro-batches "
            f"({reason_of(error)}); use num_micro_batches=1"
        ) from error
