"""Fetches a pipeline's batches on every rank until the data of the last rank has ended."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from torchrec_picasso._torchrec import TrainPipelineContext
from torchrec_picasso.batches.end_of_data import (
    SplitBatch,
    empty_batch,
    find_data,
    share_empty_batch,
)
from torchrec_picasso.batches.id_stream import IdStream
from torchrec_picasso.errors import CompatError, PicassoError

__all__ = ["BatchFeed", "Fetched"]


@dataclass(frozen=True)
class Fetched:
    """A batch on its device, with TorchRec's pipeline context."""

    batch: Any
    context: TrainPipelineContext
    has_data: bool = True
    """Whether the batch comes from this rank's data; else it is empty, after the data's end."""
    refusal: PicassoError | None = None
    """Reason why the batch before stands in for a batch that cannot be trained, or for an empty
    batch that could not be made."""


class BatchFeed:
    """Fetches batches, and makes empty batches for a rank whose data has ended.

    Args:
        fetch: TorchRec's ``copy_batch_to_gpu``; its batch is ``None`` after the last one.
        create_context: Makes TorchRec's pipeline context of a batch.
        device: Device of the batches and of the collectives.
        split: Splits a batch.
        execute_all_batches: Whether a rank whose data has ended continues with empty batches until
            the data of all ranks has ended. If not, all ranks stop as soon as one lacks a batch;
            the others keep their batch for the next call.
        id_stream: Stream of these collectives and of empty batches.
    """

    def __init__(
        self,
        fetch: Callable[[Iterator[Any]], tuple[Any, TrainPipelineContext | None]],
        create_context: Callable[[], TrainPipelineContext],
        device: torch.device,
        split: SplitBatch,
        execute_all_batches: bool,
        id_stream: IdStream,
    ) -> None:
        self._copy_batch = fetch
        self.create_context = create_context
        self._device = device
        self._split = split
        self._execute_all_batches = execute_all_batches
        self._id_stream = id_stream
        self._kept: Fetched | None = None
        self.has_ended = False
        """Whether the data of all ranks is known to have ended; :meth:`first` resets it."""
        self.asks_ahead = False
        """Whether ranks ask each other before every batch: a small all-reduce per step, for models
        that cannot run a batch without samples merely to learn that all data has ended."""

    def first(self, pg: dist.ProcessGroup, batches: Iterator[Any]) -> Fetched:
        """Fetches a batch when none is in flight. Collective.

        Args:
            pg: Process group.
            batches: This rank's data.

        Returns:
            This rank's batch, or an empty one if only other ranks have one.

        Raises:
            StopIteration: On all ranks, if no rank has a batch, or if some rank has none and
                ``execute_all_batches`` is off.
            CompatError: On all ranks, if a rank has none and the others' cannot be split.
        """
        own = self._fetch(batches)
        with self._id_stream.working():
            first = self._first(pg, own)
        self.has_ended = False
        return first

    def _first(self, pg: dist.ProcessGroup, own: Fetched | None) -> Fetched:
        source, all_have_data = find_data(pg, self._device, own is not None)
        if all_have_data and own is not None:
            return own
        if source is None or not self._execute_all_batches:
            self._kept = own
            raise StopIteration
        batch = None if own is None else own.batch
        if batch is not None:
            self._id_stream.take_batch(batch)
        # a rank without any batch so far has nothing to make an empty batch from
        empty = share_empty_batch(pg, self._device, source, batch, self._split)
        return own or Fetched(empty, self.create_context(), has_data=False)

    def following(self, pg: dist.ProcessGroup, batches: Iterator[Any], last: Any) -> Fetched | None:
        """Fetches the batch after an in-flight batch.

        Collective if ``asks_ahead`` is on or ``execute_all_batches`` is off.

        Args:
            pg: Process group.
            batches: This rank's data.
            last: The in-flight batch; an empty batch is made from it.

        Returns:
            A batch, perhaps an empty one; ``None`` = no rank has one.

        Raises:
            StopIteration: On all ranks, if some rank has no batch and ``execute_all_batches`` is
                off.
        """
        own = self._fetch(batches)
        with self._id_stream.working():
            following = self._following(pg, own, last)
        self.has_ended = following is None
        return following

    def _following(self, pg: dist.ProcessGroup, own: Fetched | None, last: Any) -> Fetched | None:
        if self.asks_ahead or not self._execute_all_batches:
            source, all_have_data = find_data(pg, self._device, own is not None)
            if not all_have_data and not self._execute_all_batches:
                self._kept = own
                raise StopIteration
            if source is None:
                return None
        # without an all-reduce the header of the (empty) batch says whether any rank has data
        if own is not None or pg.size() == 1:
            return own
        context = self.create_context()
        try:
            return Fetched(empty_batch(last, self._split), context, has_data=False)
        except CompatError as error:  # raised later, and only if another rank has data
            return Fetched(last, context, has_data=False, refusal=error)

    def end(self) -> None:
        """Records that the data of all ranks has ended."""
        self.has_ended = True

    def forget(self) -> None:
        """Drops the batch that was kept, and the record that data has ended."""
        self._kept, self.has_ended = None, False

    def _fetch(self, batches: Iterator[Any]) -> Fetched | None:
        """Returns the kept batch or copies the next one to the device; ``None`` = no more data."""
        kept, self._kept = self._kept, None
        if kept is not None:
            return kept
        try:
            batch, context = self._copy_batch(batches)
        except StopIteration:  # TorchRec raises it unless all batches are to be executed
            return None
        return None if batch is None or context is None else Fetched(batch, context)
