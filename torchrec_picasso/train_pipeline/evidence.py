"""The facts for and against micro-batches of a model: known objections, a proof, a comparison."""

from __future__ import annotations

from collections.abc import Sequence

from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

from torchrec_picasso.proof.proof import Given, Losses, Proof, prove
from torchrec_picasso.train_pipeline import data_parallel, hooks
from torchrec_picasso.train_pipeline.cut_check import CutCheck
from torchrec_picasso.train_pipeline.flight import Flight
from torchrec_picasso.train_pipeline.operations import Program
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
        check: Compares micro-batches with the whole batch.
        own_parts: Arguments in which the user passed functions that run beside the model's forward.
    """

    def __init__(
        self,
        program: Program,
        pipeline: type[TrainPipelineSparseDist],
        injected: Sequence[str],
        taken: PipelinedModel,
        check: CutCheck,
        own_parts: Sequence[str],
    ) -> None:
        self._program = program
        self._pipeline = pipeline
        self._injected = injected
        self._taken = taken
        self._check = check
        self._why_unproved: str | None = None
        # a proof follows the model's forward only, not code that runs beside or ahead of it
        if own_parts:
            self._why_unproved = f"nothing is known of {', '.join(own_parts)}; give a number"
        elif taken.postproc_modules:
            self._why_unproved = "modules run ahead of the model (pipeline_postproc=True)"

    def objection(self) -> str | None:
        """Names work that would run per micro-batch where the user expects it per batch."""
        model = self._program.model
        reason = data_parallel.why_whole_batches(model) or hooks.why_whole_batches(model)
        if reason is None and self._injected:
            reason = f"register_backward_hook injected work into {', '.join(self._injected)}"
        if reason is None and self._pipeline._backward is not TrainPipelineSparseDist._backward:
            reason = f"{self._pipeline.__name__} overrides _backward"
        return None if reason is None else f"{reason}; use num_micro_batches=1, or remove it"

    def news(self) -> str | None:
        """Names a hook on the model's wrappers; the guard of a proof sees hooks inside."""
        return hooks.on_wrappers(self._program.model)

    def prove(self, flight: Flight) -> Proof:
        """Traces the model once, with tensors that have no data. Collective."""
        # collective, so it comes before any decision of this rank alone
        wholes = flight.whole_outputs(self._taken.groups, self._taken.plain)
        reason = self._why_unproved
        if reason is not None or not flight.num_samples:
            return Proof(reason)
        given = [
            Given(module_of(module), name, wholes[name].value, module.forward.give)
            for name, module in self._taken.modules.items()
        ]
        losses = _LOSSES[self._program.losses.reduction]
        return prove(self._taken.inner, flight.batch, given, losses=losses)

    def compare(self, flight: Flight) -> str | None:
        """Runs the model on the whole batch and on micro-batches. Collective."""
        return self._check.why_not(flight)
