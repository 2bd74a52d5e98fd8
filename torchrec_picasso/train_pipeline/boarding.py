"""Splits a batch into micro-batches as it enters the pipeline, and joins their outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torchrec_picasso.batches.end_of_data import SplitBatch
from torchrec_picasso.batches.feed import Fetched
from torchrec_picasso.batches.id_stream import IdStream
from torchrec_picasso.batches.join import join_outputs
from torchrec_picasso.batches.split import micro_batch_sizes, split_batch
from torchrec_picasso.errors import CompatError, InputError
from torchrec_picasso.schedule.schedule import Setting
from torchrec_picasso.train_pipeline.flight import Flight
from torchrec_picasso.train_pipeline.pipelined_model import ODD_BATCH, PipelinedModel

__all__ = ["Boarding"]


class Boarding:
    """Makes a :class:`.Flight`, the in-flight batch, of each fetched batch.

    Args:
        split: Splits a batch; ``None`` = :func:`.split_batch`.
        join: Joins outputs; ``None`` = :func:`.join_outputs`.
        id_stream: Stream on which batches are split.
    """

    def __init__(
        self,
        split: SplitBatch | None,
        join: Callable[[Sequence[Any], Sequence[int]], Any] | None,
        id_stream: IdStream,
    ) -> None:
        self.split = split or split_batch
        self.join = join or join_outputs
        self._id_stream = id_stream

    def board(self, fetched: Fetched, setting: Setting, taken: PipelinedModel) -> Flight:
        """Splits a batch into micro-batches.

        A batch of few samples, or one that cannot be split, becomes the first micro-batch, and the
        others are empty. Other ranks may still split theirs.

        Args:
            fetched: The batch.
            setting: Number of micro-batches, and the schedule's other choices.
            taken: The model that the batch will train.

        Returns:
            The in-flight batch.

        Raises:
            CompatError: If its features have their own batch sizes (VBE), unlike those of the first
                batch.
        """
        batch, num_micro_batches = fetched.batch, setting.num_micro_batches
        with self._id_stream.working():
            self._id_stream.take_batch(batch)
            for name in taken.odd_modules(batch, fetched.context):
                raise CompatError(
                    f"{name}: {ODD_BATCH}, and the first batch had not; give the pipeline such a "
                    "batch first, or use TorchRec's TrainPipelineSparseDist"
                )
            num_samples = taken.count(batch, fetched.context)
            sizes_K = micro_batch_sizes(num_samples, num_micro_batches)
            # sizes_K[0] == num_samples: too few samples for more than one micro-batch
            if sizes_K[0] < num_samples:
                try:
                    return Flight(fetched, setting, sizes_K, list(self.split(batch, sizes_K)))
                except (CompatError, InputError):
                    pass  # the batch has a member that cannot be split: it stays whole
            num_empty = num_micro_batches - 1
            sizes_K = [num_samples, *[0] * num_empty]
            return Flight(fetched, setting, sizes_K, [batch, *[None] * num_empty])

    def output_of(self, flight: Flight) -> Any:
        """Joins the outputs of the micro-batches that ran to the output of the batch."""
        return self.join(list(flight.outputs_K.values()), flight.run_sizes)
