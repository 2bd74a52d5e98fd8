"""Plan of a side of the soak, and its results on one rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import Tensor

from benchmarks.reliability.process_figures import Held
from benchmarks.reliability.soak_batches import Stretch


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Plan of a side: its training, and the steps of evaluations, checkpoints and looks.

    Args:
        placement: One of ``small_trainer.PLANS``; a stock one is trained by TorchRec's pipeline.
        steps: Training steps.
        stretch: Steps between two ends of data; an evaluation follows each, and half-way a
            checkpoint is written.
        sample_every: Steps between two looks at the process.
        verify_every: Steps between two comparisons of replicas with homes.
        num_micro_batches: Micro-batches of the pipeline.
    """

    placement: str
    steps: int
    stretch: int
    sample_every: int
    verify_every: int
    num_micro_batches: int | None = None

    def stretches(self) -> Iterator[Stretch]:
        """All of them; the last may be shorter."""
        for index, start in enumerate(range(0, self.steps, self.stretch)):
            yield Stretch(start, min(self.stretch, self.steps - start), index)


@dataclass(kw_only=True)
class Found:
    """Results of a side on one rank; plain data and CPU tensors.

    Args:
        errors: Sum of squared errors, and samples, of this rank in each step: ``(steps, 2)``.
        evaluations: Sum of squared errors, and samples, of each evaluation.
        samples: Steps trained, then :data:`FIGURES`, a line per look: ``(looks, 7)``.
    """

    errors: Tensor
    samples: Tensor
    evaluations: list[tuple[float, float]] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    ends: list[int] = field(default_factory=list)
    """Steps of each stretch before ``StopIteration``."""
    reloads_unlike: list[str] = field(default_factory=list)
    differing_homes: str = ""
    setting: str = ""
    state: dict[str, Tensor] = field(default_factory=dict)
    """Weights and optimizer state at the end; on rank 0."""
    held: dict[str, Held] = field(default_factory=dict)
    """Descriptors and threads ``before`` a model was made, when ``warm``, at the ``end`` of
    training, and ``after`` pipeline, model and process group are gone."""
    tensors_kept: int = 0
    """Tensors that are alive then, beside those in here."""
    alive_after: list[str] = field(default_factory=list)
    """Objects of pipeline and model that are not gone."""
    seconds: float = 0.0
