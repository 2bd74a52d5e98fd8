"""What a quality gate checks: ``torchrec-picasso quality --config configs/quality.yaml``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from torchrec_picasso.app.config.schema import CARDINALITY_NAMES, LABELS, OptimizerConfig
from torchrec_picasso.rules import Rules, rule, shown

__all__ = ["CHECK_KINDS", "METRICS", "QualityCheck", "QualityConfig"]

PARITY, ABOVE, VALUE = CHECK_KINDS = ("parity", "above", "value")
"""The same training as stock TorchRec; a higher AUC than another model; a known AUC or loss."""

AUC, LOG_LOSS = METRICS = ("auc", "log_loss")
"""Area under the ROC curve, and mean cross-entropy, of held-out samples; a mean over tasks."""

_NEEDED = {"baseline": ABOVE, "value": VALUE, "tolerance": VALUE}
"""Keys without which a kind claims nothing, and which no other kind has."""


@dataclass(frozen=True, kw_only=True)
class QualityCheck(Rules):
    """One claim, and by how much it may be missed."""

    kind: str = rule(PARITY, "What is claimed.", choices=CHECK_KINDS)
    config: str = rule("", "Configuration of the model, a file beside this one.")
    baseline: str | None = rule(None, "Of the other model, for kind above.")
    data: str | None = rule(None, "File that both read; null = as their configurations say.")
    steps: int = rule(50, "Steps to train, both models.", at_least=1)
    batch_size: int | None = rule(
        None, "Samples per rank and step; null = as configured.", at_least=1
    )
    heldout_steps: int | None = rule(
        None, "Global batches to evaluate on; null = as configured.", at_least=1
    )
    folds: tuple[int, ...] | None = rule(
        None,
        "Runs of heldout_steps batches of a Criteo file; each is held out of a training of its "
        "own. null = as configured.",
        at_least=0,
    )
    cardinalities: str | None = rule(
        None, "Published table sizes; null = as configured.", choices=CARDINALITY_NAMES
    )
    row_scale: float | None = rule(None, "Factor on table sizes; null = as configured.", above=0)
    max_rows: int | None = rule(None, "Cap on the rows of one table; likewise.", at_least=1)
    labels: str | None = rule(None, "What generated labels follow; likewise.", choices=LABELS)
    task_correlation: float | None = rule(
        None, "How alike two tasks are; likewise.", at_least=-1, at_most=1
    )
    sizes: Mapping[str, bool | int | float | str | tuple[int, ...]] | None = rule(
        None, "Sizes of the model that differ from the configuration's."
    )
    baseline_sizes: Mapping[str, bool | int | float | str | tuple[int, ...]] | None = rule(
        None, "Likewise of the other model."
    )
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    """Trains both."""
    baseline_steps: int | None = rule(None, "Likewise of the other model.", at_least=1)
    baseline_optimizer: OptimizerConfig | None = dataclasses.field(default=None)
    """Trains the other model alone."""
    hot_rows: int = rule(
        1000, "Replicated rows, for kind parity: no table is left to stock.", at_least=0
    )
    num_micro_batches: int = rule(2, "Of a batch, for kind parity.", at_least=1)
    max_loss_difference: float = rule(
        1e-4, "Largest relative difference of a step's loss, for kind parity.", above=0
    )
    max_auc_difference: float = rule(1e-3, "Likewise of the AUC.", above=0)
    least_margin: float = rule(
        0.0,
        "What the lower end of the AUC difference's 95 % interval must exceed; below 0 = by how "
        "much the model may be worse.",
        at_least=-1,
        at_most=1,
    )
    metric: str = rule(AUC, "What is known, for kind value.", choices=METRICS)
    value: float | None = rule(None, "Of the metric, for kind value.", above=0)
    tolerance: float | None = rule(None, "Largest difference from it.", above=0)

    def cross_problems(self) -> list[str]:
        """Each kind needs keys that others have not."""
        if not self.config:
            return ["config: names no configuration; give a file"]
        problems = [
            f"{key}: kind {kind} needs one and no other kind has it, got kind {self.kind} and "
            f"{shown(getattr(self, key), quoted=False)}"
            for key, kind in _NEEDED.items()
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
