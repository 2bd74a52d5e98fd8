"""Runs each operation of a schedule on an in-flight batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from itertools import chain
from operator import itemgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

from torchrec_picasso._torchrec import TrainPipelineContext
from torchrec_picasso.exchange.waiting import note_all_reduce
from torchrec_picasso.ops.streams import tensors_in
from torchrec_picasso.rows.batch_gradients import BatchGradients, update_rows
from torchrec_picasso.rows.batch_rows import BatchRows
from torchrec_picasso.schedule.kinds import KINDS
from torchrec_picasso.schedule.schedule import Op
from torchrec_picasso.train_pipeline.data_parallel import (
    announce_last_backward,
    no_gradients,
    note_reduction,
    without_reduction,
)
from torchrec_picasso.train_pipeline.in_flight_batch import GroupBatch, InFlightBatch
from torchrec_picasso.train_pipeline.losses import Losses
from torchrec_picasso.train_pipeline.options import PipelineOptions
from torchrec_picasso.train_pipeline.pipelined_model import PipelinedModel


class _Vote(IntEnum):
    """A rank's vote on whether a module got a gradient; the largest vote of all ranks wins."""

    UNKNOWN = 0  # of a rank without samples
    TRAINED_WITHOUT_SAMPLES = 1
    UNTRAINED = 2
    TRAINED = 3


class InferenceMode:
    """The inference mode of a step's caller. Only the model's forward runs in it: training could
    not write into the tensors that other operations keep."""

    def __init__(self) -> None:
        self._is_on = False

    @contextmanager
    def left(self) -> Iterator[None]:
        """Context of a step."""
        self._is_on = torch.is_inference_mode_enabled()
        with ExitStack() as stack:
            if self._is_on:
                stack.enter_context(torch.inference_mode(False))
                stack.enter_context(torch.no_grad())
            yield

    def entered(self) -> AbstractContextManager[Any]:
        """Context of the model's forward."""
        return torch.inference_mode() if self._is_on else nullcontext()


@dataclass(frozen=True, kw_only=True)
class Program:
    """Functions of a pipeline's user, each called as by TorchRec's pipeline."""

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
    wait_plain: Callable[[TrainPipelineContext], None]
    """Waits for the input dists of plain modules, which run once per batch."""
    losses: Losses
    options: PipelineOptions
    pipeline: type[TrainPipelineSparseDist]
    """Class of the pipeline, which a user may have derived."""
    injected: Sequence[str]
    """Modules into whose backward the user injected work."""
    inference: InferenceMode = field(default_factory=InferenceMode)


def _for_each_group(method: Callable[[GroupBatch], Callable[..., None]]) -> Callable[..., None]:
    """Makes an operation that calls a method of every module group's view of the batch."""

    def run(_: Operations, inflight: InFlightBatch, index: int | None = None, **wave: int) -> None:
        chunk = () if index is None else (index,)
        for each in inflight.groups:
            method(each)(*chunk, **wave)

    return run


class Operations:
    """The operations of a schedule: one method ``_<kind>`` per kind of operation."""

    def __init__(self, program: Program, pipelined: PipelinedModel) -> None:
        self.program = program
        self.pipelined = pipelined
        self._id_stream = pipelined.id_stream
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
        if op.kind == "build_layout":
            layouts = [each.rows.layout for each in inflight.groups]
            batches = [inflight.batch, *inflight.micro_batches_K]
            ahead = self.pipelined.made_ahead.tensors(inflight.context)
            self._id_stream.hand_over(batches, chain(ahead, tensors_in(layouts)))

    def _send_header(self, inflight: InFlightBatch) -> None:
        """Starts a :class:`.RowRequest` of each module group, and the input dists of plain modules;
        a request begins with its header."""
        for group in self.pipelined.groups:
            features_of, prepared = inflight.features_of, inflight.prepared
            request = group.request(features_of, inflight.sizes_K, inflight.has_data, prepared)
            inflight.groups.append(GroupBatch(group, request))
            if prepared is not None:
                self.pipelined.num_prepared[request.is_prepared] += 1
        if self.pipelined.plain:
            self.pipelined.start_plain(inflight)

    def _send_row_numbers(self, inflight: InFlightBatch) -> None:
        """Waits for the headers and sends row numbers; learns whether all ranks' data has ended."""
        go_on = [each.request.send_row_numbers() for each in inflight.groups]
        if self.pipelined.plain:
            self.program.wait_plain(inflight.context)
        inflight.is_end = not all(go_on)
        if inflight.is_end:
            # no rank trains this batch; TorchRec's started requests still have to end
            for request in inflight.context.input_dist_tensors_requests.values():
                request.wait()

    # waits for the row numbers; then home ranks know the requested rows
    _receive_row_numbers = _for_each_group(lambda each: each.request.receive_row_numbers)
    # starts to fetch the clean rows of all chunks
    _fetch_clean = _for_each_group(lambda each: each.rows.fetch_clean)
    # starts to fetch the dirty rows of one chunk
    _fetch_dirty = _for_each_group(lambda each: each.rows.fetch_dirty)
    # reads replicas into the batch's row matrices
    _read_hot = _for_each_group(lambda each: each.rows.read_hot)
    # sends the gradients of one chunk's rows to their home ranks
    _send_gradients = _for_each_group(lambda each: each.gradients.send)
    # starts to sum the replicas' gradients over ranks
    _reduce_hot = _for_each_group(lambda each: each.gradients.reduce_hot)

    def _send_dirty_mask(self, inflight: InFlightBatch, before: InFlightBatch) -> None:
        """Sends the dirty mask: which requested rows the batch before updates."""
        for each, each_before in zip(inflight.groups, before.groups):
            each.request.send_dirty_mask(each_before.request)

    def _build_layout(self, inflight: InFlightBatch) -> None:
        """Builds the layout of the rows, on the requesting rank and on the home rank."""
        for each in inflight.groups:
            layout = each.request.build_layout()
            each.rows = BatchRows(each.group.row_group, layout)
            each.gradients = BatchGradients(each.group.row_group, layout)

    def _forward(self, inflight: InFlightBatch, index: int) -> None:
        """Runs the model on one micro-batch.

        A batch that this rank does not cut is its first micro-batch. The others then have nothing
        to run; all ranks still reach their operations in the same order.
        """
        for each in inflight.groups:
            each.rows.relay(index)
        runs = inflight.runs
        run = next((run for run in runs if run.forward_at == index), None)
        if run is None:
            return
        for each in inflight.groups:
            # The model calls the module later; the call waits for the rows of its micro-batch
            # (InterleavedForward in rewrite.py, then sharding/output_dist.py).
            for name, module in each.group.modules.items():
                acquired = inflight.acquire(run.micro_batches, each, name, trains=True)
                module.forward.set_compute(partial(each.group.output, name, acquired))
        inflight.compute_plain(self.pipelined.plain)
        sizes = [each.num_samples for each in runs]
        for name, module in self.pipelined.plain.items():
            module.forward.set_output(inflight.full_outputs[name].part(sizes, run.number))
        # with several micro-batches, DDP reduces only in the last backward
        is_one = inflight.is_one_backward
        reducing = nullcontext() if is_one else without_reduction(self.program.model)
        part_of, context = itemgetter(run.number), inflight.context
        parts = self.pipelined.postprocs_for_part(context, sizes, part_of)
        micro_batch = run.micro_batches[0] if len(sizes) > 1 else None
        made = self.pipelined.made_ahead.in_forward(context, micro_batch)
        with reducing, parts, made, self.program.inference.entered():
            losses, output = self.program.forward(run.batch)
        inflight.outputs_K[index] = output
        if self.program.model.training:  # in evaluation losses may have any form
            inflight.losses_K[index] = self.program.losses.checked(losses)

    def _backward(self, inflight: InFlightBatch, index: int) -> None:
        """Runs backward of one micro-batch, and after the last one that of full-batch outputs.

        An empty batch, which replaces data that has ended, adds nothing to the gradients. Its
        backward still runs, because DDP waits for it.
        """
        program, model = self.program, self.program.model
        run = next((run for run in inflight.runs if run.backward_at == index), None)
        is_last = index == inflight.backward_order[-1]
        if is_last and not inflight.is_one_backward:
            announce_last_backward(model)
            if run is None:
                no_gradients(model).backward()
        if run is not None:
            losses_K, k = inflight.losses_K, run.forward_at
            if not inflight.has_data:
                loss = program.losses.stand_in(losses_K[k])
                (loss * 0.0 if loss.requires_grad else no_gradients(model)).backward()
            elif inflight.is_one_backward:
                program.backward(program.losses.whole(losses_K[k]))
            else:
                program.losses.share(losses_K, k, inflight.sizes_K).backward()
        if is_last:
            # the leaves of full-batch outputs now have all their gradients
            for whole in inflight.full_outputs.values():
                whole.backward()
            inflight.takes_gradients = False
            self._note_trained(inflight)

    def _note_trained(self, inflight: InFlightBatch) -> None:
        """Records which modules got a gradient; a plain loop would not update the others.

        A rank without samples may see other gradients than other ranks, or none. It must still
        update, or not update, its home rows and replicas as the other ranks do. Collective.
        """
        trained = {name for name, _ in inflight.trained}
        # A rank with samples outvotes ranks without.
        yes, no = _Vote.TRAINED, _Vote.UNTRAINED
        if not inflight.num_samples:
            yes, no = _Vote.TRAINED_WITHOUT_SAMPLES, _Vote.UNKNOWN
        names = [name for group in self.pipelined.groups for name in group.modules]
        votes: list[int] = [yes if name in trained else no for name in names]
        if any(each.request.header.any_looks_up_nothing for each in inflight.groups):
            largest = torch.tensor(votes, device=self.pipelined.device)
            note_all_reduce(largest.nbytes, self.pipelined.pg.size())
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.pipelined.pg)
            votes = largest.tolist()
        for name, vote in zip(names, votes):
            if vote != _Vote.UNKNOWN:
                self._is_trained[name] = vote != _Vote.UNTRAINED

    def _update(self, inflight: InFlightBatch, wave: int | None = None) -> None:
        """Updates home rows and replicas, and releases the rows' memory after the last pack."""
        for each in inflight.groups:
            names = [name for name in each.group.modules if not self._is_trained.get(name, True)]
            untrained = set(map(each.group.number_of, names))
            if update_rows(each.group.row_group, [each.gradients], wave, untrained):
                each.rows.release()

    def _dense_step(self, inflight: InFlightBatch) -> None:
        note_reduction(self.program.model)
        self.program.step()
