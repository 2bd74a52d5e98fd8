"""The batches of a pipeline, one after the other, on every rank until the last rank's data ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from torchrec_picasso._torchrec import TrainPipelineContext
from torchrec_picasso.errors import CompatError, PicassoError
from torchrec_picasso.feed.end_of_data import (
    SplitBatch,
    empty_batch,
    share_empty_batch,
    take_census,
)
from torchrec_picasso.feed.id_stream import IdStream

__all__ = ["BatchFeed", "Fetched"]


@dataclass(frozen=True)
class Fetched:
    """A batch on its device."""

    batch: Any
    context: TrainPipelineContext
    has_data: bool = True
    """Whether the batch comes from this rank's data; else it stands in for data that has ended."""
    refusal: PicassoError | None = None
    """Why nothing can be trained on it: it could not be cut, or is no empty batch to stand in."""


class BatchFeed:
    """Fetches batches and replaces those that a rank lacks.

    Args:
        fetch: TorchRec's ``copy_batch_to_gpu``; its batch is ``None`` after the last.
        create_context: Makes what TorchRec keeps with a batch.
        device: Where batches go, and where collectives run.
        split: Cuts a batch.
        execute_all_batches: Whether a rank whose data has ended goes on until all ranks' has. If
            not, all stop as soon as one lacks a batch; the others keep theirs for the next call.
        id_stream: Where ranks ask each other, and where stand-ins are made.
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
        """Whether it is known that no rank has any more, until :meth:`first` finds otherwise."""
        self.asks_ahead = False
        """Whether ranks ask each other for every batch, as where a batch of no samples cannot go
        the way of others just to learn that there is no more; a small all-reduce a step."""

    def first(self, pg: dist.ProcessGroup, batches: Iterator[Any]) -> Fetched:
        """A batch when none is in flight. Collective.

        Raises:
            StopIteration: On all ranks, if no rank has one, or not all have and all must.
            CompatError: On all ranks, if a rank has none and the others' cannot be cut.
        """
        mine = self._fetch(batches)
        with self._id_stream.working():
            first = self._first(pg, mine)
        self.has_ended = False
        return first

    def _first(self, pg: dist.ProcessGroup, mine: Fetched | None) -> Fetched:
        census = take_census(pg, self._device, mine is not None)
        if census.all_have_data and mine is not None:
            return mine
        if census.first_with_data is None or not self._execute_all_batches:
            self._kept = mine
            raise StopIteration
        batch = None if mine is None else mine.batch
        if batch is not None:
            self._id_stream.take_batch(batch)
        empty = share_empty_batch(pg, self._device, census.first_with_data, batch, self._split)
        return mine or Fetched(empty, self.create_context(), has_data=False)

    def following(self, pg: dist.ProcessGroup, batches: Iterator[Any], last: Any) -> Fetched | None:
        """The batch after one in flight. Collective unless all batches are to be executed.

        Args:
            pg: Process group.
            batches: This rank's.
            last: The batch in flight; what an empty one is made from.

        Returns:
            A batch, or one that stands in for it; ``None`` = no rank has any more.

        Raises:
            StopIteration: On all ranks, if not all have a batch and all must.
        """
        mine = self._fetch(batches)
        with self._id_stream.working():
            following = self._following(pg, mine, last)
        self.has_ended = following is None
        return following

    def _following(self, pg: dist.ProcessGroup, mine: Fetched | None, last: Any) -> Fetched | None:
        if self.asks_ahead or not self._execute_all_batches:
            census = take_census(pg, self._device, mine is not None)
            if not census.all_have_data and not self._execute_all_batches:
                self._kept = mine
                raise StopIteration
            if census.first_with_data is None:
                return None
        if mine is not None or pg.size() == 1:
            return mine
        context = self.create_context()
        try:
            return Fetched(empty_batch(last, self._split), context, has_data=False)
        except CompatError as error:  # matters only if another rank has data
            return Fetched(last, context, has_data=False, refusal=error)

    def end(self) -> None:
        """Notes that no rank has any more."""
        self.has_ended = True

    def forget(self) -> None:
        """Forgets the batch that was kept, and whether data has ended."""
        self._kept, self.has_ended = None, False

    def _fetch(self, batches: Iterator[Any]) -> Fetched | None:
        kept, self._kept = self._kept, None
        if kept is not None:
            return kept
        try:
            batch, context = self._copy_batch(batches)
        except StopIteration:  # as TorchRec says it unless all batches are to be executed
            return None
        return None if batch is None or context is None else Fetched(batch, context)
