"""Runs each operation of a schedule on an in-flight batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchrec_picasso._torchrec import TrainPipelineContext
from torchrec_picasso.batches.feed import AnyData
from torchrec_picasso.batches.id_stream import IdStream
from torchrec_picasso.exchange.waiting import note_all_reduce
from torchrec_picasso.rows.batch_gradients import BatchGradients
from torchrec_picasso.rows.batch_rows import BatchRows
from torchrec_picasso.schedule.kinds import KINDS
from torchrec_picasso.schedule.schedule import Op
from torchrec_picasso.train_pipeline.data_parallel import (
    announce_last_backward,
    no_gradients,
    note_reduction,
    without_reduction,
)
from torchrec_picasso.train_pipeline.in_flight_batch import InFlightBatch
from torchrec_picasso.train_pipeline.losses import Losses
from torchrec_picasso.train_pipeline.pipelined_model import PipelinedModel

__all__ = ["Operations", "Program"]


class _Vote(IntEnum):
    """A rank's vote on whether a module got a gradient; the largest vote of all ranks wins."""

    UNKNOWN = 0  # of a rank without samples
    TRAINED_WITHOUT_SAMPLES = 2
    UNTRAINED = 3
    TRAINED = 4


@dataclass(frozen=True, kw_only=True)
class Program:
    """The functions that a pipeline's user gave it, each called as by TorchRec's pipeline."""

    model: nn.Module
    """The model that was passed to the pipeline."""
    forward: Callable[[Any], tuple[Any, Any]]
    """Returns ``(losses, output)`` for a batch or micro-batch."""
    backward: Callable[[Tensor], None]
    """Runs backward from the losses of a whole batch."""
    step: Callable[[], None]
    """Steps the dense optimizer."""
    zero_grad: Callable[[], None]
    """Clears gradients, and passes learning rates to FBGEMM."""
    losses: Losses


class Operations:
    """The operations of a schedule: one method ``_<kind>`` per kind of operation.

    ``wait_plain`` waits for the input dists of plain modules, which run once per batch.
    """

    def __init__(
        self,
        program: Program,
        taken: PipelinedModel,
        id_stream: IdStream,
        wait_plain: Callable[[TrainPipelineContext], None],
    ) -> None:
        self._program = program
        self._taken = taken
        self._id_stream = id_stream
        self._wait_plain = wait_plain
        # by module name: whether it got gradients when any rank last had samples
        self._is_trained: dict[str, bool] = {}

    def run(self, op: Op, inflights: Sequence[InFlightBatch]) -> None:
        """Runs one operation on the in-flight batch with index ``op.batch``."""
        inflight = inflights[op.batch]
        which = {"index": op.index, "wave": op.wave}
        given = {name: number for name, number in which.items() if number is not None}
        with self._id_stream.working() if KINDS[op.kind].on_id_stream else nullcontext():
            if op.kind == "send_dirty_mask":
                self._send_dirty_mask(inflight, inflights[op.batch - 1])
            else:  # the kind names its method: "fetch_dirty" -> _fetch_dirty(inflight, index, wave)
                getattr(self, f"_{op.kind}")(inflight, **given)
        # the layout is the last result of the ids' stream that other streams read
        if op.kind == "lay_out":
            tensors = chain.from_iterable(rows.layout.tensors() for rows in inflight.rows)
            self._id_stream.hand_over([inflight.batch, *inflight.micro_batches_K], tensors)

    def _request(self, inflight: InFlightBatch) -> None:
        """Starts the header exchanges, and the input dists of non-interleaved modules."""
        for group in self._taken.groups:
            request = group.request(inflight.inputs, inflight.sizes_K, inflight.has_data)
            inflight.requests.append(request)
        if not self._taken.groups:
            # without a header, a separate all-reduce says whether any rank has data
            inflight.any_data = AnyData(self._taken.pg, self._taken.device, inflight.has_data)
        if self._taken.plain:
            self._taken.start_plain(inflight)

    def _send_ids(self, inflight: InFlightBatch) -> None:
        """Waits for the headers and sends ids; learns whether the data of all ranks has ended."""
        go_on = [request.send_ids() for request in inflight.requests]
        if self._taken.plain:
            self._wait_plain(inflight.context)
        if inflight.any_data is not None:
            go_on.append(inflight.any_data.wait())
        inflight.is_end = not all(go_on)
        if inflight.is_end:
            # no rank trains this batch; TorchRec's started requests still have to end
            for request in inflight.context.input_dist_tensors_requests.values():
                request.wait()

    def _receive_ids(self, inflight: InFlightBatch) -> None:
        """Waits for the ids; then home ranks know the requested rows."""
        for request in inflight.requests:
            request.receive_ids()

    def _send_dirty_mask(self, inflight: InFlightBatch, before: InFlightBatch) -> None:
        """Sends the dirty mask: which requested rows the batch before updates."""
        for request, request_before in zip(inflight.requests, before.requests):
            request.send_dirty_mask(request_before)

    def _lay_out(self, inflight: InFlightBatch) -> None:
        """Builds the layout of the rows, on the requesting rank and on the home rank."""
        for group, request in zip(self._taken.groups, inflight.requests):
            layout = request.lay_out()
            inflight.rows.append(BatchRows(group.rows, layout))
            inflight.gradients.append(BatchGradients(group.rows, layout))

    def _fetch_clean(self, inflight: InFlightBatch) -> None:
        """Starts to fetch the rows that the batch before does not update."""
        for rows in inflight.rows:
            rows.fetch_clean()

    def _fetch_dirty(self, inflight: InFlightBatch, index: int, wave: int | None = None) -> None:
        """Starts to fetch the other rows of one chunk."""
        for rows in inflight.rows:
            rows.fetch_dirty(index, wave)

    def _read_hot(self, inflight: InFlightBatch) -> None:
        """Reads replicas into the batch's row matrices."""
        for rows in inflight.rows:
            rows.read_hot()

    def _forward(self, inflight: InFlightBatch, index: int) -> None:
        """Runs the model on one micro-batch; a whole batch runs as the first."""
        if index not in inflight.run_indices:
            return
        run = inflight.run_indices.index(index)
        for position, (group, rows) in enumerate(zip(self._taken.groups, inflight.rows)):
            # The model calls the module later; the call waits for the rows of its micro-batch.
            for number, (name, module) in enumerate(group.modules.items()):
                weights = inflight.weights_of(name, module, rows, number)
                parts = inflight.acquire(run, name, number, position, weights)
                module.forward.take(partial(group.output, name, parts))
        inflight.compute_full_outputs(self._taken.plain)
        for name, module in self._taken.plain.items():
            module.forward.give(inflight.full_outputs[name].part(inflight.run_sizes, run))
        # with several micro-batches, DDP reduces only in the last backward
        is_one = inflight.is_one_backward
        with nullcontext() if is_one else without_reduction(self._program.model):
            losses, output = self._program.forward(inflight.run_batch(run))
        inflight.outputs_K[index] = output
        if self._program.model.training:  # in evaluation losses may have any form
            inflight.losses_K[index] = self._program.losses.checked(losses)

    def _backward(self, inflight: InFlightBatch, index: int) -> None:
        """Runs backward of one micro-batch, and after the last one that of full-batch outputs."""
        if inflight.is_last_slot(index) and not inflight.is_one_backward:
            announce_last_backward(self._program.model)
            if not inflight.runs_backward_at(index):
                no_gradients(self._program.model).backward()
        if inflight.runs_backward_at(index):
            self._run_backward(inflight, 0 if inflight.is_whole else index)
        if inflight.is_last_slot(index):
            # the leaves of full-batch outputs now have all their gradients
            for whole in inflight.full_outputs.values():
                whole.backward()
            self._note_trained(inflight)

    def _run_backward(self, inflight: InFlightBatch, index: int) -> None:
        """Runs backward of one micro-batch.

        An empty batch, which replaces data that has ended, adds nothing to the gradients. Its
        backward still runs, because DDP waits for it.
        """
        program, model = self._program, self._program.model
        if inflight.is_one_backward and inflight.has_data:
            program.backward(program.losses.whole(inflight.losses_K[index]))
            return
        if not inflight.has_data:
            loss = program.losses.stand_in(inflight.losses_K[index])
            loss = loss * 0.0 if loss.requires_grad else no_gradients(model)
        else:
            loss = program.losses.part(inflight.losses_K, index, inflight.sizes_K)
        loss.backward()

    def _note_trained(self, inflight: InFlightBatch) -> None:
        """Records which modules got a gradient; a plain loop would not update the others.

        A rank without samples may see other gradients than other ranks, or none. It must still
        update, or not update, its home rows and replicas as the other ranks do. Collective.
        """
        names = [name for group in self._taken.groups for name in group.modules]
        # A rank with samples outvotes ranks without.
        yes, no = _Vote.TRAINED, _Vote.UNTRAINED
        if not inflight.num_samples:
            yes, no = _Vote.TRAINED_WITHOUT_SAMPLES, _Vote.UNKNOWN
        votes: list[int] = [yes if name in inflight.trained else no for name in names]
        if any(request.any_looks_up_nothing for request in inflight.requests):
            largest = torch.tensor(votes, device=self._taken.device)
            note_all_reduce(largest.nbytes, self._taken.pg.size())
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self._taken.pg)
            votes = largest.tolist()
        known = {name: vote for name, vote in zip(names, votes) if vote != _Vote.UNKNOWN}
        self._is_trained |= {name: vote != _Vote.UNTRAINED for name, vote in known.items()}

    def _send_gradients(self, inflight: InFlightBatch, index: int, wave: int | None = None) -> None:
        """Sends the gradients of one chunk's rows to their home ranks."""
        for gradients in inflight.gradients:
            gradients.send(index, wave)

    def _reduce_hot(self, inflight: InFlightBatch, wave: int | None = None) -> None:
        """Starts to sum the replicas' gradients over ranks."""
        for gradients in inflight.gradients:
            gradients.reduce_hot(wave)

    def _update(self, inflight: InFlightBatch, wave: int | None = None) -> None:
        """Updates home rows and replicas, and releases the rows' memory after the last pack."""
        for group, rows, gradients in zip(self._taken.groups, inflight.rows, inflight.gradients):
            # modules by position in the group, whose rows must not be updated
            untrained = {
                number
                for number, name in enumerate(group.modules)
                if not self._is_trained.get(name, True)
            }
            if gradients.update(wave, untrained):
                rows.release()

    def _dense_step(self, inflight: InFlightBatch) -> None:
        """Steps the dense optimizer."""
        note_reduction(self._program.model)
        self._program.step()
