"""What speaks for micro-batches of a model, and against them: known facts, a proof, a comparison."""

from __future__ import annotations

from collections.abc import Sequence

from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

from torchrec_picasso.proof import Proof
from torchrec_picasso.train_pipeline import data_parallel, hooks
from torchrec_picasso.train_pipeline.cut_check import CutCheck
from torchrec_picasso.train_pipeline.flight import Flight
from torchrec_picasso.train_pipeline.operations import Program
from torchrec_picasso.train_pipeline.pipelined_model import PipelinedModel

__all__ = ["CutEvidence"]


class CutEvidence:
    """Speaks for one model in the hands of one pipeline.

    Args:
        program: What the pipeline runs.
        pipeline: Class of the pipeline.
        injected: Modules into whose backward the user injected work, by name.
        taken: The model's sharded modules.
        check: Compares micro-batches with the whole batch.
    """

    def __init__(
        self,
        program: Program,
        pipeline: type[TrainPipelineSparseDist],
        injected: Sequence[str],
        taken: PipelinedModel,
        check: CutCheck,
    ) -> None:
        self._program = program
        self._pipeline = pipeline
        self._injected = injected
        self._taken = taken
        self._check = check

    def objection(self) -> str | None:
        """What would happen once per micro-batch where the user expects it once per batch."""
        model = self._program.model
        reason = data_parallel.why_whole_batches(model) or hooks.why_whole_batches(model)
        if reason is None and self._injected:
            reason = f"register_backward_hook injected work into {', '.join(self._injected)}"
        if reason is None and self._pipeline._backward is not TrainPipelineSparseDist._backward:
            reason = f"{self._pipeline.__name__} overrides _backward"
        return None if reason is None else f"{reason}; use num_micro_batches=1, or remove it"

    def prove(self, flight: Flight) -> Proof:
        """Follows the model once on a stand-in for a batch. Collective."""
        return Proof(None)

    def compare(self, flight: Flight) -> str | None:
        """Runs the model on the whole batch and on micro-batches. Collective."""
        return self._check.why_not(flight)
