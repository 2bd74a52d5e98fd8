"""What each operation of a schedule does to a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchrec_picasso._torchrec import TrainPipelineContext
from torchrec_picasso.feed.end_of_data import AnyData
from torchrec_picasso.feed.id_stream import IdStream
from torchrec_picasso.rows.batch_gradients import BatchGradients
from torchrec_picasso.rows.batch_rows import BatchRows
from torchrec_picasso.schedule.kinds import KINDS
from torchrec_picasso.schedule.schedule import Op
from torchrec_picasso.train_pipeline.dense_reduction import DenseReduction
from torchrec_picasso.train_pipeline.flight import Flight
from torchrec_picasso.train_pipeline.module_group import ModuleGroup

__all__ = ["Operations"]


class Operations:
    """The operations of a schedule, a method each, named as in the schedule.

    Args:
        pg: Process group.
        device: Where collectives of ``pg`` run.
        model: Gives ``(losses, output)`` for a micro-batch.
        dense: Parameters whose gradients are averaged over ranks as the last backward runs.
        late: Those whose gradients come only when modules computed once run backward.
        optimizer: Takes the step.
        groups: Sharded modules whose exchange the schedule drives, those together that travel so.
        plain: Sharded modules computed once per batch, by name.
        id_stream: Where ids are made ready.
        start_plain: Starts the input dists of the plain modules.
        wait_plain: Waits for them.
        losses_are_means: Whether losses are means over samples.
    """

    def __init__(
        self,
        pg: dist.ProcessGroup,
        device: torch.device,
        model: Callable[[Any], tuple[Tensor, Any]],
        dense: Sequence[nn.Parameter],
        late: Sequence[nn.Parameter],
        optimizer: torch.optim.Optimizer,
        groups: Sequence[ModuleGroup],
        plain: Mapping[str, Any],
        *,
        id_stream: IdStream,
        start_plain: Callable[[Flight], None],
        wait_plain: Callable[[TrainPipelineContext], None],
        losses_are_means: bool,
    ) -> None:
        self._pg = pg
        self._device = device
        self._model = model
        self._optimizer = optimizer
        self._groups = groups
        self._plain = plain
        self._id_stream = id_stream
        self._start_plain = start_plain
        self._wait_plain = wait_plain
        self._losses_are_means = losses_are_means
        self._dense = dense
        self._late = late
        # by module: whether it got gradients when any rank last had samples
        self._is_trained: dict[str, bool] = {}

    def run(self, op: Op, flights: Sequence[Flight]) -> None:
        """Runs one operation on the batch it is for."""
        if not KINDS[op.kind].on_id_stream:
            self._run(op, flights)
            return
        with self._id_stream.working():
            self._run(op, flights)
        if op.kind == "lay_out":  # nothing else asks what the ids' stream made
            flight = flights[op.batch]
            tensors = chain.from_iterable(rows.layout.tensors() for rows in flight.rows)
            self._id_stream.hand_over([flight.batch, *flight.micro_batches_K], tensors)

    def _run(self, op: Op, flights: Sequence[Flight]) -> None:
        flight = flights[op.batch]
        if op.kind == "send_marks":
            self._send_marks(flight, flights[op.batch - 1])
            return
        which = {"index": op.index, "wave": op.wave}
        given = {name: number for name, number in which.items() if number is not None}
        getattr(self, f"_{op.kind}")(flight, **given)

    def _request(self, flight: Flight) -> None:
        for group in self._groups:
            request = group.request(flight.batch, flight.sizes_K, flight.has_data)
            flight.requests.append(request)
        if not self._groups:
            flight.any_data = AnyData(self._pg, self._device, flight.has_data)
        if self._plain:
            self._start_plain(flight)

    def _send_ids(self, flight: Flight) -> None:
        go_on = [request.send_ids() for request in flight.requests]
        if self._plain:
            self._wait_plain(flight.context)
        if flight.any_data is not None:
            go_on.append(flight.any_data.wait())
        flight.is_end = not all(go_on)
        if flight.is_end:
            for request in flight.context.input_dist_tensors_requests.values():
                request.wait()
        elif flight.fetched.refusal is not None:
            raise flight.fetched.refusal

    def _receive_ids(self, flight: Flight) -> None:
        for request in flight.requests:
            request.receive_ids()

    def _send_marks(self, flight: Flight, before: Flight) -> None:
        for request, request_before in zip(flight.requests, before.requests):
            request.send_marks(request_before)

    def _lay_out(self, flight: Flight) -> None:
        for group, request in zip(self._groups, flight.requests):
            layout = request.lay_out()
            flight.rows.append(BatchRows(group.rows, layout))
            flight.gradients.append(BatchGradients(group.rows, layout))

    def _fetch_clean(self, flight: Flight) -> None:
        for rows in flight.rows:
            rows.fetch_clean()

    def _fetch_dirty(self, flight: Flight, index: int, wave: int | None = None) -> None:
        for rows in flight.rows:
            rows.fetch_dirty(index, wave)

    def _read_hot(self, flight: Flight) -> None:
        for rows in flight.rows:
            rows.read_hot()

    def _forward(self, flight: Flight, index: int) -> None:
        if flight.num_samples and not flight.sizes_K[index]:
            return  # nothing to learn from no samples
        is_last = index == len(flight.sizes_K) - 1
        for group, rows, gradients in zip(self._groups, flight.rows, flight.gradients):
            for number, (name, module) in enumerate(group.modules.items()):
                sink = partial(flight.take_gradients, name, gradients, index, number)
                weights = flight.weights_of(name, module, rows, number)
                given = rows.hand_out(index, sink, weights, once=is_last, module=number)
                module.forward.take(partial(group.output, name, given))
        flight.compute_wholes(self._plain)
        for name, module in self._plain.items():
            module.forward.give(flight.wholes[name].part(flight.sizes_K, index))
        losses, output = self._model(flight.micro_batches_K[index])
        if isinstance(losses, Tensor) and losses.requires_grad:  # in evaluation it may be anything
            share = flight.share(index, self._losses_are_means)
            flight.losses_K[index] = torch.sum(losses, dim=0) * share
        flight.outputs_K[index] = output

    def _backward(self, flight: Flight, index: int) -> None:
        loss = flight.losses_K.pop(index, None)
        if loss is not None:
            loss.backward()
        if index == 0:
            assert flight.dense is not None
            flight.dense.start_rest()
            for whole in flight.wholes.values():
                whole.backward()
            flight.late = DenseReduction(self._pg, self._late)
            flight.late.start_rest()
            self._is_trained |= self._find_trained(flight)

    def _find_trained(self, flight: Flight) -> dict[str, bool]:
        """Which interleaved modules got gradients, where anybody knows. Collective.

        A rank without samples may get none. It must leave the rows that it is home to, or has
        replicas of, as the others leave theirs, whatever it trained before.
        """
        names = [name for group in self._groups for name in group.modules]
        # 2 = yes, 1 = no, 0 = not known here: the largest answer holds
        told = [2 if name in flight.trained else int(flight.num_samples > 0) for name in names]
        if any(request.any_looks_up_nothing for request in flight.requests):
            told_N = torch.tensor(told, device=self._device)
            dist.all_reduce(told_N, op=dist.ReduceOp.MAX, group=self._pg)
            told = told_N.tolist()
        return {name: answer == 2 for name, answer in zip(names, told) if answer}

    def _send_gradients(self, flight: Flight, index: int, wave: int | None = None) -> None:
        for gradients in flight.gradients:
            gradients.send(index, wave)

    def _reduce_hot(self, flight: Flight, wave: int | None = None) -> None:
        for gradients in flight.gradients:
            gradients.reduce_hot(wave)

    def _reduce_dense(self, flight: Flight) -> None:
        flight.dense = DenseReduction(self._pg, self._dense)

    def _update(self, flight: Flight, wave: int | None = None) -> None:
        for group, rows, gradients in zip(self._groups, flight.rows, flight.gradients):
            untrained = {  # a plain loop would not update them either
                number
                for number, name in enumerate(group.modules)
                if not self._is_trained.get(name, True)
            }
            if gradients.update(wave, untrained):
                rows.release()

    def _dense_step(self, flight: Flight) -> None:
        assert flight.dense is not None
        assert flight.late is not None
        flight.dense.wait()
        flight.late.wait()
        self._optimizer.step()
