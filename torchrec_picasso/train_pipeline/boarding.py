"""How a batch comes into a pipeline and its output out of it: cut, joined again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torchrec_picasso.batches.join import join_outputs
from torchrec_picasso.batches.split import micro_batch_sizes, split_batch
from torchrec_picasso.errors import CompatError, InputError
from torchrec_picasso.feed.batch_feed import Fetched
from torchrec_picasso.feed.end_of_data import SplitBatch
from torchrec_picasso.feed.id_stream import IdStream
from torchrec_picasso.schedule.schedule import Setting
from torchrec_picasso.train_pipeline.flight import Flight
from torchrec_picasso.train_pipeline.pipelined_model import ODD_BATCH, PipelinedModel

__all__ = ["Boarding"]


class Boarding:
    """Makes flights of batches.

    Args:
        split: Cuts a batch; ``None`` = :func:`.split_batch`.
        join: Joins outputs; ``None`` = :func:`.join_outputs`.
        id_stream: Where batches are cut.
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
        """Cuts a batch into micro-batches.

        Args:
            fetched: The batch.
            setting: Into how many.
            taken: The model that will be trained on it.

        Raises:
            CompatError: If its features have other samples, and those of the first batch had not.
        """
        batch = fetched.batch
        with self._id_stream.working():
            self._id_stream.take_batch(batch)
            for name in taken.odd_modules(batch, fetched.context):
                raise CompatError(
                    f"{name}: {ODD_BATCH}, and the first batch had not; give the pipeline such a "
                    "batch first, or use TorchRec's TrainPipelineSparseDist"
                )
            num_samples = taken.count(batch, fetched.context)
            sizes_K = micro_batch_sizes(num_samples, setting.num_micro_batches)
            if len(sizes_K) == 1 or not num_samples:  # every micro-batch is the batch itself
                return Flight(fetched, setting, sizes_K, [batch] * len(sizes_K))
            try:
                parts_K = list(self.split(batch, sizes_K))
            except InputError as error:  # the header may tell all ranks why, and stop them
                refused = replace(fetched, refusal=error)
                return Flight(refused, setting, sizes_K, [batch] * len(sizes_K))
        return Flight(fetched, setting, sizes_K, parts_K)

    def output_of(self, flight: Flight) -> Any:
        """What the model gave for the whole batch."""
        outputs = list(flight.outputs_K.values())
        sizes = [flight.sizes_K[index] for index in flight.outputs_K]
        return self.join(outputs, sizes)
