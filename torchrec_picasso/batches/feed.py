"""Fetches a pipeline's batches on every rank until the data of the last rank has ended.

A rank whose data has ended takes part with empty batches until the data of all ranks has ended:
every collective includes all ranks, and gradients stay means over all of them. The header of the
next batch says whether any rank has data, at no cost. The collectives of this file serve the cases
without a header: before the first batch, for a model whose hot/cold tables cannot be interleaved,
and where a step must not begin unless all ranks have a next batch. A data loader may have read a
batch's ids already (:class:`PreparedBatch`).

Ids of later batches are prepared on a stream beside the computing stream, because ids cannot be
exchanged without asking the device how many there are. On the computing stream such a host sync
would wait for everything that is queued there, and the device would then wait for the host. On a
separate stream it waits only for the batch's copy, for kernels on integers and for exchanges of
ids. The results are handed over once per batch: the computing stream waits for them, and the
allocator does not reuse their memory before the computing stream is done with it.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.streamable import Pipelineable

from torchrec_picasso._torchrec import TrainPipelineContext, wait_for_batch
from torchrec_picasso.batches.members import children_of
from torchrec_picasso.batches.split import num_samples, reason_of
from torchrec_picasso.errors import CompatError, PicassoError
from torchrec_picasso.exchange.agreement import Agreement
from torchrec_picasso.ops.id_reader import PreparedIds

SplitBatch = Callable[[Any, Sequence[int]], Sequence[Any]]
"""Splits a batch into micro-batches of given sizes."""


@dataclass(frozen=True, eq=False)
class PreparedBatch(Pipelineable):
    """A batch and its ids, as read by a :class:`.Preparation`. A pipeline unpacks it: the model
    gets ``batch``. Ids that changed after the preparation are read again."""

    batch: Any
    """The user's batch."""
    plan: str
    """Name of the plan that the ids were read by."""
    ids_of: Mapping[tuple[str, ...], PreparedIds]
    """The ids by the names of the modules whose rows travel together."""

    def to(
        self,
        device: torch.device,
        non_blocking: bool = False,
        data_copy_stream: torch.Stream | None = None,
    ) -> PreparedBatch:
        """Copies batch and ids to a device; as TorchRec, on a stream if one is given."""
        stream = data_copy_stream
        on_stream = {} if stream is None else {"data_copy_stream": stream}
        batch = self.batch.to(device=device, non_blocking=non_blocking, **on_stream)
        with nullcontext() if stream is None else torch.get_device_module(device).stream(stream):
            return self._changed(batch, lambda ids: ids.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> PreparedBatch:
        """Copies batch and ids to pinned memory."""
        pinned = getattr(self.batch, "pin_memory", lambda: self.batch)()
        return self._changed(pinned, Tensor.pin_memory)

    def record_stream(self, stream: torch.Stream) -> None:
        """Records a stream on all memory of batch and ids."""
        self.batch.record_stream(stream)
        for ids in self.ids_of.values():
            ids.values.record_stream(stream)

    def _changed(self, batch: Any, change: Callable[[Tensor], Tensor]) -> PreparedBatch:
        changed = {n: replace(ids, values=change(ids.values)) for n, ids in self.ids_of.items()}
        return replace(self, batch=batch, ids_of=changed)


@dataclass(eq=False)
class Fetched:
    """A batch on its device, with TorchRec's pipeline context."""

    batch: Any
    context: TrainPipelineContext
    has_data: bool = True
    """Whether the batch comes from this rank's data; else it is empty, after the data's end."""
    refusal: PicassoError | None = None
    """Reason why the batch before stands in for a batch that cannot be trained, or for an empty
    batch that could not be made."""
    prepared: PreparedBatch | None = None
    """The batch with its ids, if a data loader read them."""


@dataclass(eq=False)
class BatchFeed:
    """Fetches batches, and makes empty batches for a rank whose data has ended. Its collectives run
    on the stream of ids."""

    copy_batch: Callable[[Iterator[Any]], tuple[Any, TrainPipelineContext | None]]
    """TorchRec's ``copy_batch_to_gpu``; its batch is ``None`` after the last one."""
    create_context: Callable[[], TrainPipelineContext]
    device: torch.device
    split: SplitBatch
    execute_all_batches: bool
    """If not, all ranks stop as soon as one lacks a batch; the others keep theirs for the next
    call."""
    id_stream: IdStream
    has_ended: bool = False
    """Whether the data of all ranks is known to have ended; :meth:`first` resets it."""
    asks_ahead: bool = False
    """Whether ranks ask each other before every batch: a small exchange per step, for models that
    cannot run a batch without samples merely to learn that all data has ended."""
    _kept: Fetched | None = None

    def first(self, pg: dist.ProcessGroup, batches: Iterator[Any]) -> Fetched:
        """Fetches a batch when none is in flight, an empty one if only other ranks have data.

        Collective. All ranks raise StopIteration if no rank has a batch, or if some rank has none
        and ``execute_all_batches`` is off; CompatError if the others' batches cannot be cut.
        """
        own = self._fetch(batches)
        with self.id_stream.working():
            source, all_have_data = find_data(pg, self.device, own is not None)
            if own is None or not all_have_data:
                if source is None or not self.execute_all_batches:
                    self._kept = own
                    raise StopIteration
                batch = None if own is None else own.batch
                if batch is not None:
                    self.id_stream.take_batch(batch)
                # a rank without any batch so far has nothing to make an empty batch from
                empty = share_empty_batch(pg, self.device, source, batch, self.split)
                own = own or Fetched(empty, self.create_context(), has_data=False)
        self.has_ended = False
        return own

    def following(self, pg: dist.ProcessGroup, batches: Iterator[Any], last: Any) -> Fetched | None:
        """Fetches the batch after the in-flight batch ``last``, from which an empty one is made.

        Collective if ``asks_ahead`` is on or ``execute_all_batches`` is off; in the second case all
        ranks raise StopIteration if some rank has no batch. ``None`` = no rank has a batch.
        """
        own = self._fetch(batches)
        # without an exchange the header of the (empty) batch says whether any rank has data
        self.has_ended = own is None and pg.size() == 1
        with self.id_stream.working():
            if self.asks_ahead or not self.execute_all_batches:
                source, all_have_data = find_data(pg, self.device, own is not None)
                if not all_have_data and not self.execute_all_batches:
                    self._kept, self.has_ended = own, False
                    raise StopIteration
                self.has_ended = source is None
            if own is not None or self.has_ended:
                return own
            context = self.create_context()
            try:
                return Fetched(empty_batch(last, self.split), context, has_data=False)
            except CompatError as error:  # raised later, and only if another rank has data
                return Fetched(last, context, has_data=False, refusal=error)

    def forget(self) -> None:
        """Drops the batch that was kept, and the record that data has ended."""
        self._kept, self.has_ended = None, False

    def _fetch(self, batches: Iterator[Any]) -> Fetched | None:
        """Returns the kept batch or copies the next one to the device; ``None`` = no more data."""
        kept, self._kept = self._kept, None
        if kept is not None:
            return kept
        try:
            batch, context = self.copy_batch(batches)
        except StopIteration:  # TorchRec raises it unless all batches are to be executed
            return None
        if batch is None or context is None:
            return None
        if isinstance(batch, PreparedBatch):
            return Fetched(batch.batch, context, prepared=batch)
        return Fetched(batch, context)


def find_data(
    pg: dist.ProcessGroup, device: torch.device, has_data: bool
) -> tuple[int | None, bool]:
    """Returns the lowest rank that has a batch, ``None`` = no rank has one; and whether all do.
    Collective: the host waits for 8 bytes of each rank; nothing with one rank."""
    has_data_W = [bool(has) for (has,) in Agreement(pg, device, [has_data]).wait()]
    return (has_data_W.index(True) if any(has_data_W) else None), all(has_data_W)


def empty_batch(batch: Any, split: SplitBatch) -> Any:
    """Makes a batch without samples from another batch; CompatError if it cannot be cut."""
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
    """Sends every rank an empty batch made from the ``batch`` of rank ``source`` alone. Collective.
    All ranks raise CompatError if that batch cannot be cut or pickled."""
    parcel: list[Any] = [None]
    # an error travels in place of the batch, so that all ranks raise it
    if pg.rank() == source:
        try:
            parcel = [pickle.dumps(empty_batch(batch, split).to(torch.device("cpu")))]
        except CompatError as error:
            parcel = [CompatError(str(error))]
        except Exception as error:  # any error of pickling a user's type
            refusal = f"a batch of type {type(batch).__name__} cannot be pickled, which a rank "
            refusal += f"without any batch needs ({error}); give every rank at least one batch"
            parcel = [CompatError(refusal)]
    dist.broadcast_object_list(parcel, group=pg, group_src=source, device=device)
    (found,) = parcel
    if isinstance(found, CompatError):
        raise found
    return pickle.loads(found).to(device)


class IdStream:
    """The stream of ids, and the stream that copies batches. On the CPU all work is in one order,
    and every method here does nothing."""

    def __init__(self, stream: torch.Stream | None, copy_stream: torch.Stream | None) -> None:
        self.stream = stream
        """The stream of ids; ``None`` = the device has none."""
        self._copy_stream = copy_stream

    def working(self) -> AbstractContextManager[Any]:
        """Context in which kernels are queued on this stream."""
        if self.stream is None:
            return nullcontext()
        return torch.get_device_module(self.stream.device).stream(self.stream)

    def take_batch(self, batch: Any) -> None:
        """Makes this stream wait for the copy of a batch. Call it inside :meth:`working`."""
        wait_for_batch(batch, self._copy_stream)

    def take_over(self, tensors: Iterable[Tensor]) -> None:
        """Makes the computing stream's tensors safe to read here, after their batch has ended too.
        Call it outside :meth:`working`."""
        if self.stream is None:
            return
        self.stream.wait_stream(torch.get_device_module(self.stream.device).current_stream())
        for tensor in tensors:
            tensor.record_stream(self.stream)

    def hand_over(self, batches: Iterable[Any], tensors: Iterable[Tensor]) -> None:
        """Makes tensors of this stream, and batches that it took or split, safe to read elsewhere.
        Call it outside :meth:`working`."""
        if self.stream is None:
            return
        computing = torch.get_device_module(self.stream.device).current_stream()
        computing.wait_stream(self.stream)
        for value in (*batches, *tensors):
            _record(value, computing)


def _record(value: Any, stream: torch.Stream) -> None:
    """Records a stream on all memory of a tensor or batch, so that it is not reused too early."""
    if hasattr(value, "record_stream"):
        value.record_stream(stream)
        return
    for _, member in children_of(value) or ():
        _record(member, stream)
