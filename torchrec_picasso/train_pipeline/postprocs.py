"""Splits the results of modules that TorchRec runs ahead of the model, for micro-batches.

With ``pipeline_postproc=True`` TorchRec's tracer takes modules without parameters, which transform
features between the batch and a table, out of the model's forward ("postprocs"). They run once,
when ids are exchanged, and later return the same result to the model. A micro-batch gets its part
of that result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torchrec_picasso._torchrec import (
    PipelinedPostproc,
    TrainPipelineContext,
    use_context_for_postprocs,
)
from torchrec_picasso.batches.split import reason_of, split_batch
from torchrec_picasso.errors import CompatError, InputError
from torchrec_picasso.schedule.schedule import Op
from torchrec_picasso.train_pipeline.in_flight_batch import InFlightBatch
from torchrec_picasso.train_pipeline.pieces import Cut

__all__ = ["Postprocs"]


class Postprocs:
    """Sets the context that postprocs read and write.

    Args:
        modules: The postprocs that TorchRec's rewrite found.
    """

    def __init__(self, modules: Sequence[PipelinedPostproc]) -> None:
        self._modules = list(modules)

    def for_op(self, op: Op, inflight: InFlightBatch) -> AbstractContextManager[None]:
        """The context of an operation of a schedule on a batch."""
        if op.kind == "request":
            return self.for_batch(inflight.context)
        if op.kind == "forward" and op.index in inflight.run_indices:
            run = inflight.run_indices.index(op.index)
            return self.for_part(inflight.context, Cut.in_order(inflight.run_sizes), run)
        return nullcontext()

    @contextmanager
    def for_batch(self, context: TrainPipelineContext) -> Iterator[None]:
        """In this context, postprocs run for a batch, or return their result for it."""
        with use_context_for_postprocs(self._modules, context):
            yield

    @contextmanager
    def for_part(self, context: TrainPipelineContext, cut: Cut, index: int) -> Iterator[None]:
        """In this context, postprocs return one micro-batch's part of their result for the batch.

        Args:
            context: TorchRec's pipeline context of the batch.
            cut: Pieces of the batch by micro-batch.
            index: Index of the micro-batch.

        Raises:
            CompatError: If a result cannot be split.
        """
        if not self._modules or len(cut.sizes) == 1:
            with self.for_batch(context):
                yield
            return
        part = TrainPipelineContext(index=context.index, version=context.version)
        part.postproc_fwd_results = {
            name: cut.joined(_cut(result, cut.sizes, name), index)
            for name, result in context.postproc_fwd_results.items()
        }
        with self.for_batch(part):
            yield


def _cut(result: Any, sizes_K: Sequence[int], name: str) -> Sequence[Any]:
    """Splits the result of one postproc; errors name it."""
    try:
        return split_batch(result, sizes_K)
    except (CompatError, InputError) as error:
        raise CompatError(
            f"{name} is run ahead of the model (pipeline_postproc=True) and gives a "
            f"{type(result).__name__}, which cannot be cut into micro-batches "
            f"({reason_of(error)}); use num_micro_batches=1"
        ) from error
