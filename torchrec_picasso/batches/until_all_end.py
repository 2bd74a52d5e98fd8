"""A rank's batches, and empty ones after them until the data of all ranks has ended.

For models without hot/cold tables, which TorchRec's own pipeline trains: it stops a rank at the end
of the rank's data, and the others would wait for it forever.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from torchrec_picasso.batches.feed import SplitBatch, empty_batch, find_data, share_empty_batch
from torchrec_picasso.exchange.agreement import Agreement


class UntilAllEnd(Iterator[Any]):
    """Yields the batches of an iterator, on the host.

    Collective: all ranks ask for batches equally often. A call costs 8 bytes to each rank; only the
    first batch, and those after the end of this rank's data, wait for the answer.

    Args:
        pg: The ranks.
        device: Device on which the collectives of ``pg`` run.
        split: Makes an empty batch from another one.
        execute_all_batches: If not, all ranks stop as soon as one has no batch; the batch of
            another rank is :attr:`kept`.
    """

    def __init__(
        self,
        batches: Iterator[Any],
        pg: dist.ProcessGroup,
        device: torch.device,
        split: SplitBatch,
        execute_all_batches: bool,
        kept: Any = None,
    ) -> None:
        self.batches = batches
        self._pg, self._device, self._split = pg, device, split
        self._execute_all_batches = execute_all_batches
        self.kept = kept
        """A batch that waits for the next iterator; ``None`` = no batch waits."""
        self.has_ended = False
        """Whether this rank's data has ended."""
        self._last: Any = None
        self._told: Agreement | None = None

    def __next__(self) -> Any:
        """Returns the next batch, maybe an empty one.

        Raises:
            StopIteration: On all ranks at once.
            CompatError: If a rank needs an empty batch and a batch cannot be split.
        """
        own, self.kept = self.kept, None
        if own is None and not self.has_ended:
            own = next(self.batches, None)
            self.has_ended = own is None
        if self._last is not None and own is not None and self._execute_all_batches:
            if self._told is not None:
                self._told.wait()  # it is long done; a process that drops it unfinished ends badly
            # for ranks that wait for the answer
            self._told, self._last = Agreement(self._pg, self._device, [True]), own
            return own
        source, all_have_data = find_data(self._pg, self._device, own is not None)
        if source is None or not (all_have_data or self._execute_all_batches):
            self.kept = own
            raise StopIteration
        if self._last is None and not all_have_data:
            # a rank without any batch so far has nothing to make an empty batch from
            empty = share_empty_batch(self._pg, self._device, source, own, self._split)
            own = empty if own is None else own
        elif own is None:
            own = empty_batch(self._last, self._split)
        self._last = own
        return own
