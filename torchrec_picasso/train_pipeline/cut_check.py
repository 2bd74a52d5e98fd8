"""The evidence that micro-batches give, or do not give, a model's result for the whole batch.

An objection is a known fact against micro-batches, and a proof (:mod:`torchrec_picasso.proof`)
follows the model's forward. A comparison serves micro-batches that the user requested and that no
proof covers. On a few training steps the model runs forward and backward on the same samples with
the same rows in three ways: whole; in micro-batches as the step splits it; and torn, that is, small
pieces of the batch in random order, dealt out to uneven micro-batches. Losses, outputs, gradients
of tables and of dense weights, and the state that the runs leave behind are compared. Anything that
cannot be compared (a value that is not finite, an error, random numbers, a collective) counts as a
difference. Ranks agree: a difference on one rank counts for all.

A comparison leaves no trace: each run works on a copy of the model, which shares only the sharded
modules with it.

It costs about three dense forwards and backwards, the memory of one over the whole batch, and that
of the dense part.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._composable.contract import _get_registry
from torch.utils._pytree import tree_leaves
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

from torchrec_picasso.batches.join import join_outputs
from torchrec_picasso.batches.members import copy_batch
from torchrec_picasso.batches.split import FEWEST_SAMPLES, split_batch
from torchrec_picasso.errors import CompatError
from torchrec_picasso.exchange.agreement import agree_on
from torchrec_picasso.proof.comparison import (
    State,
    StillRandomness,
    difference_of,
    difference_of_outputs,
    difference_of_states,
    state_of,
)
from torchrec_picasso.proof.content import restored_randomness
from torchrec_picasso.proof.dense_part import (
    backward_steps,
    copy_model,
    dense_modules,
    dense_parameters,
    why_parameter_hooked,
)
from torchrec_picasso.proof.proof import Given, Proof, prove
from torchrec_picasso.schedule.schedule import is_depth_first
from torchrec_picasso.train_pipeline.data_parallel import (
    instead_of_wrapped,
    why_one_backward,
    wrapper_of,
)
from torchrec_picasso.train_pipeline.full_batch_output import FullBatchOutput
from torchrec_picasso.train_pipeline.in_flight_batch import InFlightBatch
from torchrec_picasso.train_pipeline.model_parts import inner_model, module_of
from torchrec_picasso.train_pipeline.operations import Program
from torchrec_picasso.train_pipeline.pipelined_model import PipelinedModel

_TENSOR_FLOAT = 2.0**-11
"""Rounding step of float32 products on devices that may compute them in TF32."""

_MOST_PIECES = 64
"""Number of pieces of a torn batch, roughly; small batches have fewer."""

_ADVICE = (
    "Either the loss is no mean over samples (a mean over clicked samples or over padded positions "
    "is not; loss_reduction='sum' or 'ratio' if it is one), or the model computes over the batch "
    "(its own statistics, negatives of the same batch). Use num_micro_batches=1"
)
_UNCOMPARED = "Micro-batches cannot be compared with it; use num_micro_batches=1"
"""Advice where the whole batch raises, by the model's own error or because it cannot be copied."""


class _Cut:
    """Samples of each piece of a batch, in order, and the pieces' positions by micro-batch."""

    def __init__(self, sizes: Sequence[int], pieces_K: Sequence[Sequence[int]]) -> None:
        self.sizes = sizes
        self.pieces_K = pieces_K
        self.sizes_K = [sum(sizes[piece] for piece in pieces) for pieces in pieces_K]

    @staticmethod
    def in_order(sizes_K: Sequence[int]) -> _Cut:
        """Splits into micro-batches of these sizes, one piece each."""
        return _Cut(sizes_K, [[k] for k in range(len(sizes_K))])

    @staticmethod
    def torn(num_samples: int, num_micro_batches: int, draw: random.Random) -> _Cut:
        """Splits into pieces of random sizes, dealt in random order to uneven micro-batches.

        The last of the K >= 2 micro-batches has two samples, the fewest that one ever has. The
        batch has at least 2 K samples.
        """
        # about 64 pieces of 2 to `usual` + 1 samples; piece 0 (two samples) is the last one
        usual = max(FEWEST_SAMPLES, 2 * num_samples // min(_MOST_PIECES, num_samples))
        sizes = [FEWEST_SAMPLES]
        while (left := num_samples - sum(sizes)) >= 2 * FEWEST_SAMPLES:
            sizes.append(draw.randint(FEWEST_SAMPLES, min(usual + 1, left - FEWEST_SAMPLES)))
        sizes.append(left)
        # shuffle pieces 1.. and split them at random positions into the other micro-batches
        others = draw.sample(range(1, len(sizes)), len(sizes) - 1)
        num_parts = min(num_micro_batches - 1, len(others))
        ends = sorted(draw.sample(range(1, len(others)), num_parts - 1))
        parts = [others[start:end] for start, end in pairwise([0, *ends, len(others)])]
        return _Cut(sizes, [*parts, [0]])

    @property
    def is_in_order(self) -> bool:
        """Whether micro-batch k is piece k, for all k."""
        return all(list(pieces) == [k] for k, pieces in enumerate(self.pieces_K))

    def joined(self, pieces: Sequence[Any], index: int) -> Any:
        """Joins the pieces of one micro-batch; ``pieces`` are all, in the order of the batch."""
        places = self.pieces_K[index]
        return join_outputs([pieces[p] for p in places], [self.sizes[p] for p in places])


@dataclass(frozen=True)
class _RunResult:
    """The result of one way to run the model."""

    tensors: Sequence[tuple[str, Tensor | None]]
    """Gradients of tables' outputs and of dense weights, and the loss, each with its name."""
    output: Any
    state: State

    def difference(self, parts: _RunResult, eps: float, cut: _Cut) -> str | None:
        """Describes the first difference in gradients, loss, state or outputs. The outputs of a
        torn batch are in another order and not compared."""
        for (name, one), (_, other) in zip(self.tensors, parts.tensors):
            if one is not None and other is not None:
                found = difference_of(one.to_dense(), other.to_dense(), eps)
            else:
                found = None if one is other else "is there in one of the two only"
            if found is not None:
                return f"{name} {found}"
        found = difference_of_states(self.state, parts.state, eps)
        if found is not None or not cut.is_in_order:
            return found
        return difference_of_outputs(self.output, parts.output, eps)


@dataclass
class CutEvidence:
    """The facts for and against micro-batches of a model: objections, a proof, a comparison."""

    program: Program
    pipelined: PipelinedModel
    draw: random.Random = field(default_factory=partial(random.Random, 0))
    """Draws the sizes and the order of torn pieces."""

    def objection(self) -> str | None:
        """Names work that would run per micro-batch where the user expects it per batch."""
        model = self.program.model
        reason = why_one_backward(model) or self.hook_on_wrappers()
        reason = reason or next(_hooks_inside(model), None)
        injected, pipeline = self.program.injected, self.program.pipeline
        if reason is None and injected:
            reason = f"register_backward_hook injected work into {', '.join(injected)}"
        if reason is None and pipeline._backward is not TrainPipelineSparseDist._backward:
            reason = f"{pipeline.__name__} overrides _backward"
        return None if reason is None else f"{reason}; use num_micro_batches=1, or remove it"

    def hook_on_wrappers(self) -> str | None:
        """Names a hook on the model's wrappers; the guard of a proof sees hooks inside."""
        model = self.program.model
        for wrapper in (model, wrapper_of(model)):
            if wrapper is None or wrapper is inner_model(model):
                continue
            if wrapper._forward_hooks or wrapper._forward_pre_hooks or _hooks_backward(wrapper):
                return f"a hook is registered on the {type(wrapper).__name__} around the model"
        return None

    def prove(self, inflight: InFlightBatch) -> Proof:
        """Traces the model once, with tensors that have no data. Collective."""
        # collective, so it comes before any decision of this rank alone
        full_outputs = inflight.full_batch_outputs(self.pipelined.plain)
        # a proof follows the model's forward only, not code that runs beside or ahead of it
        functions = ("split_batch", "join_outputs", "custom_model_fwd")
        given = [name for name in functions if getattr(self.program.options, name) is not None]
        if given:
            return Proof(f"nothing is known of {', '.join(given)}; give a number")
        if self.pipelined.postproc_modules:
            return Proof("modules run ahead of the model (pipeline_postproc=True)")
        if not inflight.num_samples:
            return Proof(None)
        outputs = [
            Given(module_of(module), name, full_outputs[name].value, module.forward.set_output)
            for name, module in self.pipelined.modules.items()
        ]
        ahead, losses = self.pipelined.made_ahead, self.program.losses
        made_inputs = ahead.telling if ahead.names else None
        batch = inflight.batch
        return prove(self.pipelined.inner, batch, outputs, losses.reduction, made_inputs)

    def compare(self, inflight: InFlightBatch) -> str | None:
        """Describes a difference on any rank; ``None`` = no rank sees one. Collective. The rows of
        the in-flight batch are fetched or on their way."""
        # collective, so it comes before any decision of this rank alone
        full_outputs = inflight.full_batch_outputs(self.pipelined.plain)
        is_cut = inflight.sizes_K[0] < inflight.num_samples
        found = self._difference(inflight, full_outputs) if is_cut else None
        return agree_on(self.pipelined.pg, self.pipelined.device, found)

    def _difference(
        self, inflight: InFlightBatch, full_outputs: Mapping[str, FullBatchOutput]
    ) -> str | None:
        num_samples, num_parts = inflight.num_samples, len(inflight.sizes_K)
        ways = {
            "on the whole batch": _Cut.in_order([num_samples]),
            f"in {num_parts} micro-batches": _Cut.in_order(inflight.sizes_K),
            "in uneven parts": _Cut.torn(num_samples, num_parts, self.draw),
        }
        # torn pieces are joined by join_outputs, which may not know a user's type of batch
        if self.program.options.split is not split_batch:
            ways.popitem()
        still, whole = StillRandomness(), None
        shortened = self.pipelined.device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32
        for way, cut in ways.items():
            try:
                with restored_randomness(self.pipelined.device):
                    run = self._run(inflight, full_outputs, cut, still)
            except Exception as error:  # any error of a user's model
                # the message quotes sizes, since a torn batch has other sizes than the step's
                raised = f"{type(error).__name__} {way}, of {cut.sizes_K} samples: {error}"
                advice = _UNCOMPARED if whole is None else _ADVICE
                return f"{raised.rstrip('.')}. {advice}"
            if still.drawn:
                return (
                    f"the model is random by itself or communicates ({', '.join(still.drawn)}), so "
                    "it cannot be checked whether micro-batches train the same; use "
                    "num_micro_batches=1"
                )
            whole = whole or run
            # of the coarsest number format that the runs used
            eps = max(still.coarsest, _TENSOR_FLOAT if shortened else 0.0)
            found = whole.difference(run, eps, cut)
            if found is not None:
                return f"{way} {found}. {_ADVICE}"
        return None

    def _run(
        self,
        inflight: InFlightBatch,
        full_outputs: Mapping[str, FullBatchOutput],
        cut: _Cut,
        still: StillRandomness,
    ) -> _RunResult:
        """Runs forward and backward of all micro-batches of ``cut``, as a step does.
        ``full_outputs`` are those of the sharded modules for the whole batch, by name."""
        model = copy_model(self.pipelined.inner, self.pipelined.postproc_modules)
        # copies: a model may write into its batch, and the step still needs the original
        batch, context = copy_batch(inflight.batch), copy.copy(inflight.context)
        context.postproc_fwd_results = copy_batch(context.postproc_fwd_results)
        program = self.program
        pieces = [batch]
        if len(cut.sizes) > 1:
            pieces = list(program.options.split(batch, cut.sizes))
        given = {name: whole.detached() for name, whole in full_outputs.items()}
        losses_K: dict[int, Any] = {}
        outputs = []
        setting = replace(inflight.setting, num_micro_batches=len(cut.pieces_K))
        at_once = is_depth_first(setting, inflight.forwards_first)
        with still, torch.enable_grad():
            # in the order of a scheduled step
            for k in range(len(cut.pieces_K)):
                self._give(given, cut, k)
                part_of = partial(cut.joined, index=k)
                with self.pipelined.postprocs_for_part(context, cut.sizes, part_of):
                    losses, output = self._forward(model, cut.joined(pieces, k))
                losses_K[k] = program.losses.checked(losses)
                outputs.append(output)
                _refuse_views(output, model)
                if at_once:
                    self._backward(losses_K, [k], cut)
            if not at_once:
                self._backward(losses_K, list(reversed(losses_K)), cut)
            # the leaves' gradients, in the order of the samples of the whole batch
            grads = [(name, grad) for name, v in given.items() for grad in v.joined_gradients()]
            tables = [(f"the gradient of the output of {name}", grad) for name, grad in grads]
            weights = [(f"the gradient of {n}", w.grad) for n, w in dense_parameters(model)]
            loss = "the loss", program.losses.batch(losses_K, cut.sizes_K)
            output = program.options.join(outputs, cut.sizes_K) if cut.is_in_order else None
            return _RunResult([*tables, *weights, loss], output, state_of(model))

    def _give(self, given: Mapping[str, FullBatchOutput], cut: _Cut, index: int) -> None:
        """Gives sharded modules, which do not run, their output for one micro-batch's samples."""
        for name, module in self.pipelined.modules.items():
            parts = [given[name].part(cut.sizes, p) for p in range(len(cut.sizes))]
            module.forward.set_output(cut.joined(parts, index))

    def _backward(self, losses_K: Mapping[int, Any], indices: Sequence[int], cut: _Cut) -> None:
        """Runs backward of some micro-batches, in this order.

        One that would reach the model itself instead of its copy is refused: a method of the model
        was replaced by a function bound to the original.
        """
        losses = [self.program.losses.share(losses_K, k, cut.sizes_K) for k in indices]
        own = {id(parameter) for _, parameter in dense_parameters(self.pipelined.inner)}
        # the graph's leaves (AccumulateGrad) name their parameter
        if any(id(getattr(node, "variable", None)) in own for node in backward_steps(losses)):
            raise CompatError("a function of the model runs another module than a copy's")
        for loss in losses:
            loss.backward()

    def _forward(self, model: nn.Module, batch: Any) -> tuple[Any, Any]:
        """Runs the program with the copy in place of the model that it wraps."""
        program = self.program
        if isinstance(program.model, DistributedModelParallel):
            with instead_of_wrapped(program.model, model):
                return program.forward(batch)
        losses, output = model(batch)
        return losses, output


def _refuse_views(output: Any, model: nn.Module) -> None:
    """Refuses 0-d outputs that are views into the model: they would change with it when joined."""
    weights = [parameter for _, parameter in dense_parameters(model)]
    kept = {weight.untyped_storage().data_ptr() for weight in weights}
    for leaf in tree_leaves(output):
        is_number = isinstance(leaf, Tensor) and leaf.dim() == 0
        if is_number and leaf._is_view() and leaf.untyped_storage().data_ptr() in kept:
            raise CompatError("the output holds a view into the model; clone it")


def _hooks_inside(model: nn.Module) -> Iterator[str]:
    """Names hooks inside the wrappers that would run K times, with gradients of micro-batches.

    These are hooks on gradients of dense parameters and modules, and ``replicate()``, which reduces
    gradients in hooks. Forward hooks inside the model are a part of its forward.
    """
    for path, module in dense_modules(inner_model(model)):
        where = path or "the model"
        if _hooks_backward(module):
            yield f"a backward hook is registered on {where}"
        if "replicate" in (_get_registry(module) or {}):
            yield f"replicate() was applied to {where}"
        for name, parameter in module.named_parameters(path, recurse=False):
            if why_parameter_hooked(parameter) is not None:
                yield f"a gradient hook is registered on parameter {name}"


def _hooks_backward(module: nn.Module) -> bool:
    return bool(module._backward_hooks or module._backward_pre_hooks)
