"""Checks of model quality: ``torchrec-picasso quality --config configs/quality.yaml``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from torchrec_picasso.app.config.rules import Rules, rule, shown
from torchrec_picasso.app.config.schema import CARDINALITY_NAMES, LABELS, OptimizerConfig

PARITY, ABOVE, VALUE = CHECK_KINDS = ("parity", "above", "value")
"""Same training as stock TorchRec; higher AUC than another model; a known AUC or loss."""

AUC, LOG_LOSS = METRICS = ("auc", "log_loss")
"""Area under the ROC curve, and mean cross-entropy, on held-out samples; means over tasks."""

_KIND_OF_KEY = {"baseline": ABOVE, "value": VALUE, "tolerance": VALUE}
"""Keys that one kind requires and other kinds refuse."""


@dataclass(frozen=True, kw_only=True)
class QualityCheck(Rules):
    """One check and its tolerances; ``null`` = as the configuration of the model says."""

    kind: str = rule(PARITY, "Kind of the check.", choices=CHECK_KINDS)
    config: str = rule("", "Configuration of the model, relative to this file.")
    baseline: str | None = rule(None, "Configuration of the other model, for kind above.")
    data: str | None = rule(None, "File of samples for both models.")
    steps: int = rule(50, "Steps to train.", at_least=1)
    batch_size: int | None = rule(None, "Samples per rank and step.", at_least=1)
    heldout_steps: int | None = rule(None, "Global batches to evaluate on.", at_least=1)
    folds: tuple[int, ...] | None = rule(
        None, "Values of data.heldout_fold, each with a training of its own.", at_least=0
    )
    cardinalities: str | None = rule(None, "Published table sizes.", choices=CARDINALITY_NAMES)
    row_scale: float | None = rule(None, "Factor on table sizes.", above=0)
    max_rows: int | None = rule(None, "Cap on the rows of one table.", at_least=1)
    labels: str | None = rule(None, "Labels of generated samples.", choices=LABELS)
    task_correlation: float | None = rule(None, "Correlation of two tasks.", at_least=-1, at_most=1)
    window_steps: int | None = rule(
        None, "Evaluate on as many global batches after the last step, in time order.", at_least=1
    )
    num_candidates: int | None = rule(None, "Candidates of a sample of a stream.", at_least=1)
    sizes: Mapping[str, bool | int | float | str | tuple[int, ...]] | None = rule(
        None, "Sizes of the model that replace the configuration's."
    )
    baseline_sizes: Mapping[str, bool | int | float | str | tuple[int, ...]] | None = rule(
        None, "Sizes of the other model."
    )
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    """Optimizers of both models."""
    baseline_steps: int | None = rule(None, "Steps of the other model.", at_least=1)
    baseline_optimizer: OptimizerConfig | None = dataclasses.field(default=None)
    """Optimizers of the other model."""
    hot_rows: int = rule(1000, "Replicated rows, for kind parity.", at_least=0)
    num_micro_batches: int = rule(2, "Micro-batches per batch, for kind parity.", at_least=1)
    max_loss_difference: float = rule(
        1e-4, "Largest relative difference of a step's loss, for kind parity.", above=0
    )
    max_auc_difference: float = rule(1e-3, "Largest difference of the AUC.", above=0)
    least_margin: float = rule(
        0.0,
        "Exclusive bound of the lower end of the 95 % interval of the AUC difference; below 0, "
        "the model may be worse than the other by this much.",
        at_least=-1,
        at_most=1,
    )
    metric: str = rule(AUC, "Metric of kind value.", choices=METRICS)
    value: float | None = rule(None, "Expected value of the metric.", above=0)
    tolerance: float | None = rule(None, "Largest difference from that value.", above=0)

    def cross_problems(self) -> list[str]:
        """Refuses missing keys of a kind, and keys of other kinds."""
        if not self.config:
            return ["config: names no configuration; give a file"]
        problems = [
            f"{key}: kind {kind} needs one and no other kind has it, got kind {self.kind} and "
            f"{shown(getattr(self, key), quoted=False)}"
            for key, kind in _KIND_OF_KEY.items()
            if (self.kind == kind) != (getattr(self, key) is not None)
        ]
        if self.kind != ABOVE:
            problems += [
                f"{key}: kind {self.kind} has no other model; remove it"
                for key in ("baseline_sizes", "baseline_steps", "baseline_optimizer")
                if getattr(self, key) is not None
            ]
        if self.folds is not None and self.kind == PARITY:
            problems.append("folds: kind parity trains on the first alone; remove them")
        if self.folds is not None and len(set(self.folds)) < max(1, len(self.folds)):
            problems.append(
                f"folds: expected each once, at least one, got {shown(list(self.folds))}"
            )
        return problems


@dataclass(frozen=True, kw_only=True)
class QualityConfig(Rules):
    """Checks by name."""

    checks: Mapping[str, QualityCheck] | None = rule(None, "Checks by name.")
