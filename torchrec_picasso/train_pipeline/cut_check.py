"""Whether a model gives in micro-batches what it gives for the whole batch, by trying both.

Nothing can be read off a model: a loss over those samples only that were clicked, an auxiliary loss
over padded positions, statistics of the batch written by hand all look like any other code, and all
are wrong in micro-batches, without an error. So on a few training steps (:func:`is_due`) the
model runs both ways on the same samples with the same rows, and loss, outputs, buffers and the
gradients that reach the tables' outputs are compared. Ranks agree: what one sees counts for all.

It leaves no trace: rows are looked up without a backward, gradients go to no parameter, the batch
is a copy, random layers are held still and random states, buffers and attributes put back.

A difference that does not show on these batches is not found: all clicked, all of one length. Nor
is one where the model runs on random numbers that cannot be held still. Evaluation is not looked
at.

Cost: about two dense forwards and backwards more, and the memory of one over the whole batch, in a
step with a check: 1, 2, 4, 8, 16, 64, 256, ...
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchrec_picasso.batches.copy import copy_batch
from torchrec_picasso.batches.join import join_outputs
from torchrec_picasso.batches.split import micro_batch_sizes
from torchrec_picasso.comparison.difference import (
    Tolerance,
    difference_of,
    difference_of_outputs,
)
from torchrec_picasso.comparison.model_memory import (
    checkpoint_buffers,
    forget_random_states,
    without_a_trace,
)
from torchrec_picasso.comparison.still_randomness import StillRandomness
from torchrec_picasso.feed.end_of_data import SplitBatch
from torchrec_picasso.train_pipeline.flight import Flight, share_of
from torchrec_picasso.train_pipeline.module_group import ModuleGroup
from torchrec_picasso.train_pipeline.postprocs import Postprocs
from torchrec_picasso.train_pipeline.whole_output import WholeOutput

__all__ = ["CutCheck", "agree", "is_due"]

_TENSOR_FLOAT = 2.0**-11
"""Rounding step of float32 products where the device is allowed to shorten them."""

_OFTEN_UNTIL = 16
"""Steps in which data that differ from the first batch are likely to be new."""

ADVICE = (
    "Either the loss is no mean over samples (a mean over clicked samples or over padded positions "
    "is not; loss_reduction='sum' if it is a sum), or the model computes over the batch (its own "
    "statistics, negatives of the same batch). Use num_micro_batches=1"
)


def is_due(step: int) -> bool:
    """Whether a training step, counted from 1, begins with a check.

    Steps 1, 2, 4, 8, 16, then 64, 256, 1024, ...
    """
    is_power_of_2 = step & (step - 1) == 0
    return is_power_of_2 and (step <= _OFTEN_UNTIL or step.bit_length() % 2 == 1)


@dataclass(frozen=True)
class _Run:
    """What one way of running the model gave."""

    loss: Tensor
    output: Any
    buffers: Mapping[str, Tensor]
    grads: Mapping[str, Sequence[Tensor]]


class CutCheck:
    """Compares the two ways.

    Args:
        module: The model inside its wrapper.
        forward: Gives ``(losses, output)`` for a batch.
        groups: Sharded modules whose exchange a schedule drives, those together that travel so.
        plain: Sharded modules computed once per batch, by name.
        split: Cuts a batch.
        join: Joins outputs.
        postprocs: Modules that run ahead of the model.
        losses_are_means: Whether losses are means over samples.
        pg: Process group.
        device: Where the model and collectives of ``pg`` run.
    """

    def __init__(
        self,
        module: nn.Module,
        forward: Callable[[Any], tuple[Tensor, Any]],
        groups: Sequence[ModuleGroup],
        plain: Mapping[str, Any],
        *,
        split: SplitBatch,
        join: Callable[[Sequence[Any], Sequence[int]], Any],
        postprocs: Postprocs,
        losses_are_means: bool,
        pg: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        self._module = module
        self._forward = forward
        self._groups = groups
        self._plain = plain
        self._split = split
        self._join = join
        self._postprocs = postprocs
        self._losses_are_means = losses_are_means
        self._pg = pg
        self._device = device
        self.is_blind: str | None = None
        """Why the last comparison could not be made."""

    def why_not(self, flight: Flight, num_micro_batches: int) -> str | None:
        """What is wrong with micro-batches on any rank; ``None`` = nothing that shows. Collective.

        Every rank runs the model equally often, with data or without: it may have exchanges of its
        own.

        Args:
            flight: A batch whose rows are there or on their way.
            num_micro_batches: How many to try.
        """
        flight.compute_wholes(self._plain)
        wholes = self._outputs_of(flight)
        sizes_K = micro_batch_sizes(flight.num_samples, num_micro_batches)
        still = StillRandomness()
        with still:
            whole = self._run(flight, wholes, [flight.num_samples])
            cut = self._run(flight, wholes, sizes_K)
        found = self._judge(flight, whole, cut, sizes_K, self._tolerance(still))
        if agree(self._pg, self._device, found) is None:
            return None
        with still:
            again = self._run(flight, wholes, [flight.num_samples], reseed=True)
        drawn = ", ".join(sorted(still.drawn))
        if not drawn and _differ(whole, again, self._tolerance(still)):
            drawn = "the same batch gives different results"
        drawn_anywhere = agree(self._pg, self._device, drawn or None)
        if drawn_anywhere is not None:
            self.is_blind = f"the model is random by itself: {drawn_anywhere}"
            return None
        return agree(self._pg, self._device, found)

    def _judge(
        self,
        flight: Flight,
        whole: _Run | Exception,
        cut: _Run | Exception,
        sizes_K: Sequence[int],
        tolerance: Tolerance,
    ) -> str | None:
        if not flight.num_samples or isinstance(whole, Exception):
            return None  # the step raises it as well, then for everybody to see
        if isinstance(cut, Exception):
            return f"{type(cut).__name__} with micro-batches of {sizes_K} samples: {cut}. {ADVICE}"
        found = _difference(whole, cut, tolerance)
        return None if found is None else f"in {len(sizes_K)} micro-batches {found}. {ADVICE}"

    def _tolerance(self, still: StillRandomness) -> Tolerance:
        shortened = self._device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32
        return Tolerance(max(still.coarsest, _TENSOR_FLOAT if shortened else 0.0))

    def _outputs_of(self, flight: Flight) -> dict[str, WholeOutput]:
        """Of every pipelined module, its output for the whole batch, with leaves of its own."""
        outputs = {name: flight.wholes[name].detached() for name in self._plain}
        counted = [
            (index, size)
            for index, size in enumerate(flight.sizes_K)
            if size or not (index or flight.num_samples)
        ]
        for group, rows in zip(self._groups, flight.rows):
            for number, (name, module) in enumerate(group.modules.items()):
                weights = flight.weights_of(name, module, rows, number)
                with torch.no_grad():
                    parts = [
                        group.output(
                            name, rows.hand_out(index, lambda _: None, weights, module=number)
                        ).wait()
                        for index, _ in counted
                    ]
                whole = join_outputs(parts, [size for _, size in counted])
                outputs[name] = WholeOutput(whole, name, always_leaves=True)
        return outputs

    def _run(
        self,
        flight: Flight,
        wholes: Mapping[str, WholeOutput],
        sizes_K: Sequence[int],
        reseed: bool = False,
    ) -> _Run | Exception:
        """Runs forward and backward; gives whatever the model raised."""
        given = {name: whole.detached() for name, whole in wholes.items()}
        modules = [m for group in self._groups for m in group.modules.items()]
        modules += self._plain.items()
        with without_a_trace(self._module, self._device), torch.enable_grad():
            if reseed:
                forget_random_states()
            try:
                batch, context = copy_batch(flight.batch), copy.copy(flight.context)
                context.postproc_fwd_results = copy_batch(context.postproc_fwd_results)
                is_cut = len(sizes_K) > 1 and flight.num_samples
                parts_K = self._split(batch, sizes_K) if is_cut else [batch] * len(sizes_K)
                losses, outputs, sizes = [], [], []
                for index, size in enumerate(sizes_K):
                    if flight.num_samples and not size:
                        continue
                    for name, module in modules:
                        module.forward.give(given[name].part(sizes_K, index))
                    with self._postprocs.of_part(context, sizes_K, index):
                        loss, output = self._forward(parts_K[index])
                    share = share_of(index, sizes_K, self._losses_are_means)
                    losses.append(torch.sum(loss, dim=0) * share)
                    outputs.append(output)
                    sizes.append(size)
                total = torch.stack(losses).sum()
                buffers = checkpoint_buffers(self._module)
                return _Run(
                    total.detach(), self._join(outputs, sizes), buffers, _grads(total, given)
                )
            except Exception as error:  # whatever a user's model raises
                return error


def _grads(loss: Tensor, given: Mapping[str, WholeOutput]) -> dict[str, Sequence[Tensor]]:
    """Gradients of the loss by the tables' outputs; none where the model lets none through."""
    leaves = [leaf for whole in given.values() for leaf in whole.leaves]
    if not leaves or not loss.requires_grad:
        return {}
    found = iter(torch.autograd.grad(loss, leaves, allow_unused=True))
    return {
        name: whole.join_gradients([next(found) for _ in whole.leaves])
        for name, whole in given.items()
    }


def _difference(whole: _Run, cut: _Run, tolerance: Tolerance) -> str | None:
    for name, grads in whole.grads.items():
        for one, other in zip(grads, cut.grads.get(name, [])):
            found = difference_of(one, other, tolerance)
            if found is not None:
                return f"the gradient of the output of {name} {found}"
    found = difference_of(whole.loss, cut.loss, tolerance)
    if found is not None:
        return f"the loss {found}"
    for name, buffer in whole.buffers.items():
        if buffer.is_floating_point():
            found = difference_of(buffer, cut.buffers[name], tolerance)
        else:
            found = None if buffer.equal(cut.buffers[name]) else "differs"
        if found is not None:
            return f"the buffer {name} {found} after the forward"
    return difference_of_outputs(whole.output, cut.output, tolerance)


def _differ(one: _Run | Exception, other: _Run | Exception, tolerance: Tolerance) -> bool:
    if isinstance(one, Exception) or isinstance(other, Exception):
        return False
    return _difference(one, other, tolerance) is not None


def agree(pg: dist.ProcessGroup, device: torch.device, reason: str | None) -> str | None:
    """The reason of the lowest rank that has one, on all ranks. Collective.

    Args:
        pg: Process group.
        device: Where collectives of ``pg`` run.
        reason: This rank's; ``None`` = it has none.
    """
    if pg.size() == 1:
        return reason
    mine = pg.rank() if reason is not None else pg.size()
    first = torch.tensor([mine], device=device)
    dist.all_reduce(first, op=dist.ReduceOp.MIN, group=pg)
    source = int(first.item())
    if source == pg.size():
        return None
    parcel = [reason]
    dist.broadcast_object_list(parcel, group=pg, group_src=source, device=device)
    return parcel[0]
