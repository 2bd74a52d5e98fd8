"""Keeps ranks together when their data ends at different batches.

A rank whose data has ended takes part with empty batches until the data of all ranks has ended:
every collective includes all ranks, and gradients stay means over all of them. The header of the
next batch says whether any rank has data, at no cost. The collectives of this file serve the cases
without a header: before the first batch, for a model without interleaved modules, and where a step
must not begin unless all ranks have a next batch.

Shape letters: W ranks.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from torchrec_picasso.batches.split import num_samples, reason_of
from torchrec_picasso.errors import CompatError

__all__ = ["AnyData", "SplitBatch", "empty_batch", "find_data", "share_empty_batch"]

SplitBatch = Callable[[Any, Sequence[int]], Sequence[Any]]
"""Splits a batch into micro-batches of given sizes."""


def find_data(
    pg: dist.ProcessGroup, device: torch.device, has_data: bool
) -> tuple[int | None, bool]:
    """All-reduces whether ranks have a batch. Collective.

    Args:
        pg: Process group of W ranks.
        device: Device of the collectives of ``pg``.
        has_data: Whether this rank has a batch.

    Returns:
        The lowest rank that has a batch, ``None`` = no rank has one; and whether all have one.

    Cost:
        One all-reduce of 16 bytes with a host wait; none with one rank.
    """
    if pg.size() == 1:
        return 0 if has_data else None, has_data
    # one MIN gives both: the lowest rank with data (W = none), and 1 only if all have data
    lowest = torch.tensor([pg.rank() if has_data else pg.size(), int(has_data)], device=device)
    dist.all_reduce(lowest, op=dist.ReduceOp.MIN, group=pg)
    first, all_have = lowest.tolist()
    return None if first == pg.size() else first, bool(all_have)


class AnyData:
    """Asks whether any rank has a batch, with an all-reduce that starts at construction.

    Collective: all ranks construct and wait for it, in the same order.

    Args:
        pg: Process group.
        device: Device of the collectives of ``pg``.
        has_data: Whether this rank has a batch.
    """

    def __init__(self, pg: dist.ProcessGroup, device: torch.device, has_data: bool) -> None:
        self._answer = torch.tensor([int(has_data)], device=device)
        self._work = None
        if pg.size() > 1:
            self._work = dist.all_reduce(
                self._answer, op=dist.ReduceOp.MAX, group=pg, async_op=True
            )

    def wait(self) -> bool:
        """Waits for the answer, which is equal on all ranks."""
        if self._work is not None:
            self._work.wait()
        return bool(self._answer.item())


def empty_batch(batch: Any, split: SplitBatch) -> Any:
    """Makes a batch without samples from another batch.

    Args:
        batch: Any batch.
        split: Splits it.

    Raises:
        CompatError: If the batch cannot be split.
    """
    try:
        return split(batch, [0, num_samples(batch)])[0]
    except Exception as error:  # any error of a user's function
        raise CompatError(
            f"a rank whose data ends before the others' goes on with empty batches, but a batch of "
            f"type {type(batch).__name__} could not be cut to 0 samples "
            f"({type(error).__name__}: {reason_of(error)}); give the pipeline a split_batch= that "
            "can, or all ranks the same number of batches"
        ) from error


def share_empty_batch(
    pg: dist.ProcessGroup, device: torch.device, source: int, batch: Any, split: SplitBatch
) -> Any:
    """Sends every rank an empty batch made from that of rank ``source``. Collective.

    Args:
        pg: Process group.
        device: Device of the empty batch and of the collectives of ``pg``.
        source: A rank of ``pg`` that has a batch.
        batch: This rank's batch; only that of ``source`` is used.
        split: Splits it.

    Raises:
        CompatError: On all ranks, if the batch cannot be split or pickled.
    """
    parcel: list[Any] = [None, None]
    # an error travels in place of the batch, so that all ranks raise it
    if pg.rank() == source:
        try:
            empty = empty_batch(batch, split).to(torch.device("cpu"))
            parcel = [pickle.dumps(empty), None]
        except CompatError as error:
            parcel = [None, str(error)]
        except Exception as error:  # any error of pickling a user's type
            refusal = f"a batch of type {type(batch).__name__} cannot be pickled, which a rank "
            refusal += f"without any batch needs ({error}); give every rank at least one batch"
            parcel = [None, refusal]
    dist.broadcast_object_list(parcel, group=pg, group_src=source, device=device)
    pickled, refusal = parcel
    if refusal is not None:
        raise CompatError(refusal)
    return pickle.loads(pickled).to(device)
