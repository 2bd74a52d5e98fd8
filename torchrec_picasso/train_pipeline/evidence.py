"""The facts for and against micro-batches of a model: known objections, a proof, a comparison."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn
from torch.distributed._composable.contract import _get_registry
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

from torchrec_picasso.proof.dense_part import dense_modules
from torchrec_picasso.proof.hooks import why_parameter_hooked
from torchrec_picasso.proof.proof import Given, Losses, Proof, prove
from torchrec_picasso.train_pipeline.cut_check import CutCheck
from torchrec_picasso.train_pipeline.data_parallel import why_whole_batches, wrapper_of
from torchrec_picasso.train_pipeline.in_flight_batch import InFlightBatch
from torchrec_picasso.train_pipeline.model_parts import inner_model
from torchrec_picasso.train_pipeline.operations import Program
from torchrec_picasso.train_pipeline.options import PipelineOptions
from torchrec_picasso.train_pipeline.pipelined_model import PipelinedModel
from torchrec_picasso.train_pipeline.processed_module import module_of

__all__ = ["CutEvidence"]

_LOSSES = {"mean": Losses.MEANS, "sum": Losses.SUMS, "ratio": Losses.RATIOS}


class CutEvidence:
    """Collects the facts about one model in one pipeline.

    The user injected work into the backward of modules with the names ``injected``.
    """

    def __init__(
        self,
        program: Program,
        pipeline: type[TrainPipelineSparseDist],
        injected: Sequence[str],
        taken: PipelinedModel,
        options: PipelineOptions,
    ) -> None:
        self._program = program
        self._pipeline = pipeline
        self._injected = injected
        self.taken = taken
        self.compare = CutCheck(program, taken, options).why_not
        """Runs the model on the whole batch and on micro-batches. Collective."""
        self._why_unproved: str | None = None
        # a proof follows the model's forward only, not code that runs beside or ahead of it
        if options.own_functions:
            self._why_unproved = (
                f"nothing is known of {', '.join(options.own_functions)}; give a number"
            )
        elif taken.postproc_modules:
            self._why_unproved = "modules run ahead of the model (pipeline_postproc=True)"

    def objection(self) -> str | None:
        """Names work that would run per micro-batch where the user expects it per batch."""
        model = self._program.model
        reason = why_whole_batches(model) or self.news() or next(_hooks_inside(model), None)
        if reason is None and self._injected:
            reason = f"register_backward_hook injected work into {', '.join(self._injected)}"
        if reason is None and self._pipeline._backward is not TrainPipelineSparseDist._backward:
            reason = f"{self._pipeline.__name__} overrides _backward"
        return None if reason is None else f"{reason}; use num_micro_batches=1, or remove it"

    def news(self) -> str | None:
        """Names a hook on the model's wrappers; the guard of a proof sees hooks inside."""
        model = self._program.model
        inner = inner_model(model)
        for wrapper in (model, wrapper_of(model)):
            if wrapper is None or wrapper is inner:
                continue
            if wrapper._forward_hooks or wrapper._forward_pre_hooks or _hooks_backward(wrapper):
                return f"a hook is registered on the {type(wrapper).__name__} around the model"
        return None

    def prove(self, inflight: InFlightBatch) -> Proof:
        """Traces the model once, with tensors that have no data. Collective."""
        # collective, so it comes before any decision of this rank alone
        full_outputs = inflight.full_batch_outputs(self.taken.plain)
        reason = self._why_unproved
        if reason is not None or not inflight.num_samples:
            return Proof(reason)
        given = [
            Given(module_of(module), name, full_outputs[name].value, module.forward.give)
            for name, module in self.taken.modules.items()
        ]
        losses = _LOSSES[self._program.losses.reduction]
        return prove(self.taken.inner, inflight.batch, given, losses=losses)


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
