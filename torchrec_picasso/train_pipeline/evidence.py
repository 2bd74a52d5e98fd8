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
    """Collects the facts about one model in one pipeline; implements :class:`.Evidence`.

    Args:
        program: Model and losses that the pipeline runs.
        pipeline: Class of the pipeline.
        injected: Names of modules into whose backward the user injected work.
        taken: The model's sharded modules.
        options: Functions of the user's that run beside the model's forward.
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
        self._check = CutCheck(program, taken, options)
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
        reason = why_whole_batches(model) or why_hooked(model)
        if reason is None and self._injected:
            reason = f"register_backward_hook injected work into {', '.join(self._injected)}"
        if reason is None and self._pipeline._backward is not TrainPipelineSparseDist._backward:
            reason = f"{self._pipeline.__name__} overrides _backward"
        return None if reason is None else f"{reason}; use num_micro_batches=1, or remove it"

    def news(self) -> str | None:
        """Names a hook on the model's wrappers; the guard of a proof sees hooks inside."""
        return _on_wrappers(self._program.model)

    def prove(self, inflight: InFlightBatch) -> Proof:
        """Traces the model once, with tensors that have no data. Collective."""
        # collective, so it comes before any decision of this rank alone
        full_outputs = inflight.full_batch_outputs(self.taken.groups, self.taken.plain)
        reason = self._why_unproved
        if reason is not None or not inflight.num_samples:
            return Proof(reason)
        given = [
            Given(module_of(module), name, full_outputs[name].value, module.forward.give)
            for name, module in self.taken.modules.items()
        ]
        losses = _LOSSES[self._program.losses.reduction]
        return prove(self.taken.inner, inflight.batch, given, losses=losses)

    def compare(self, inflight: InFlightBatch) -> str | None:
        """Runs the model on the whole batch and on micro-batches. Collective."""
        return self._check.why_not(inflight)


def why_hooked(model: nn.Module) -> str | None:
    """Names a hook that micro-batches would call K times, with partial gradients or losses.

    The search covers hooks on gradients of dense parameters and modules, hooks on the wrappers, and
    ``replicate()``, which reduces gradients in hooks. Forward hooks inside the model are a part of
    its forward.

    Args:
        model: The model that was passed to the pipeline.

    Returns:
        A reason; ``None`` = there is no such hook.
    """
    return _on_wrappers(model) or next(_inside(model), None)


def _on_wrappers(model: nn.Module) -> str | None:
    """Names a wrapper around the model that has a hook; ``None`` = there is none."""
    inner = inner_model(model)
    for wrapper in (model, wrapper_of(model)):
        if wrapper is None or wrapper is inner:
            continue
        if wrapper._forward_hooks or wrapper._forward_pre_hooks or _hooks_backward(wrapper):
            return f"a hook is registered on the {type(wrapper).__name__} around the model"
    return None


def _inside(model: nn.Module) -> Iterator[str]:
    """Yields descriptions of hooks on gradients inside the wrappers."""
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
