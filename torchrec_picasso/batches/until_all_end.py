"""A rank's batches, and empty ones after them until the data of all ranks has ended.

For models without hot/cold tables, which TorchRec's own pipeline trains: it stops a rank at the end
of the rank's data, and the others would wait for it forever.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from torchrec_picasso.batches.feed import SplitBatch, empty_batch, share_empty_batch
from torchrec_picasso.errors import CompatError
from torchrec_picasso.exchange.agreement import Agreement


class UntilAllEnd(Iterator[Any]):
    """Yields a rank's batches, on the host, and after the last one empty ones.

    Collective: all ranks ask for batches equally often. The first batch costs 16 bytes to each
    rank; StopIteration if no rank has one.

    Args:
        pg: The ranks.
        device: Device on which the collectives of ``pg`` run.
        split: Makes an empty batch from another one.
        execute_all_batches: If not, all ranks stop as soon as one has no batch; the batch of
            another rank is kept.
        asks_ahead: Whether ranks tell each other of every batch, at the same cost, so that none is
            empty on all ranks. On too if a rank's batch cannot be cut to no samples.
        are_data: Whether each batch in flight is this rank's data, in order; appended to.
    """

    def __init__(
        self,
        pg: dist.ProcessGroup,
        device: torch.device,
        split: SplitBatch,
        execute_all_batches: bool,
        asks_ahead: bool,
        are_data: deque[bool],
    ) -> None:
        self._pg, self._device, self._split = pg, device, split
        self._execute_all_batches = execute_all_batches
        self.asks_ahead = asks_ahead or not execute_all_batches or pg.size() == 1
        self._are_data = are_data
        self._batches: Iterator[Any] | None = None
        self.has_ended = False
        """Whether the iterator has ended; it is not asked again."""
        self._own: deque[Any] = deque()  # batches of this rank that were read
        self._last: Any = None

    def read(self, batches: Iterator[Any], num_batches: int, is_first: bool) -> None:
        """Reads batches until so many wait, or the data ends. Not collective.

        An error of the data loses nothing, since no operation of a step has begun. ``is_first`` =
        no batch is in flight, on any rank.
        """
        if batches is not self._batches:
            self._batches, self.has_ended = batches, False
        while len(self._own) < num_batches and not self.has_ended:
            batch = next(batches, None)
            self.has_ended = batch is None
            self._own += [] if batch is None else [batch]
        if is_first:
            self._last = None

    def __next__(self) -> Any:
        """Returns the next batch, maybe an empty one.

        Raises StopIteration on all ranks at once; CompatError if a rank needs an empty batch and a
        batch cannot be split.
        """
        own = self._own.popleft() if self._own else None
        is_data = own is not None
        if self._last is None or self.asks_ahead:
            own = self._agreed(own)
        elif own is None:
            own = empty_batch(self._last, self._split)
        self._last = own
        self._are_data.append(is_data)
        return own

    def _agreed(self, own: Any) -> Any:
        """Returns the batch, or an empty one if only other ranks have data. Collective."""
        asks_ahead = self.asks_ahead or (own is not None and not self._can_be_cut(own))
        told = Agreement(self._pg, self._device, [own is not None, asks_ahead]).wait()
        have_data_W, asks_W = zip(*told)
        self.asks_ahead = any(asks_W)
        if not any(have_data_W) or not (all(have_data_W) or self._execute_all_batches):
            self._own.extendleft([] if own is None else [own])
            raise StopIteration
        if self._last is None and not all(have_data_W):
            # a rank without any batch so far has nothing to make an empty batch from
            source = have_data_W.index(True)
            empty = share_empty_batch(self._pg, self._device, source, own, self._split)
            return empty if own is None else own
        return empty_batch(self._last, self._split) if own is None else own

    def _can_be_cut(self, batch: Any) -> bool:
        try:
            empty_batch(batch, self._split)
        except CompatError:
            return False
        return True
