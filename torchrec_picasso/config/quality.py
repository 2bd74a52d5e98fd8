"""What a quality gate checks: ``torchrec-picasso quality --config configs/quality.yaml``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torchrec_picasso.config.rules import Rules, rule

__all__ = ["CHECK_KINDS", "QualityCheck", "QualityConfig"]

PARITY, ABOVE = CHECK_KINDS = ("parity", "above")
"""The same training as stock TorchRec; a higher AUC than another model."""


@dataclass(frozen=True, kw_only=True)
class QualityCheck(Rules):
    """One claim, and by how much it may be missed."""

    kind: str = rule(PARITY, "What is claimed.", choices=CHECK_KINDS)
    config: str = rule("", "Configuration of the model, a file beside this one.")
    baseline: str | None = rule(None, "Of the other model, for kind above.")
    data: str | None = rule(None, "File that both read; null = as their configurations say.")
    steps: int = rule(50, "Steps to train.", at_least=1)
    batch_size: int | None = rule(
        None, "Samples per rank and step; null = as configured.", at_least=1
    )
    heldout_steps: int | None = rule(
        None, "Global batches to evaluate on; null = as configured.", at_least=1
    )
    row_scale: float | None = rule(None, "Factor on table sizes; null = as configured.", above=0)
    sizes: Mapping[str, bool | int | float | str | tuple[int, ...]] | None = rule(
        None, "Sizes of the model that differ from the configuration's."
    )
    hot_rows: int = rule(
        1000, "Replicated rows, for kind parity: no table is left to stock.", at_least=0
    )
    num_micro_batches: int = rule(2, "Of a batch, for kind parity.", at_least=1)
    max_loss_difference: float = rule(
        1e-4, "Largest relative difference of a step's loss, for kind parity.", above=0
    )
    max_auc_difference: float = rule(1e-3, "Likewise of the AUC.", above=0)
    least_margin: float = rule(
        0.0, "What the lower end of the AUC difference's 95 % interval must exceed.", at_least=0
    )

    def cross_problems(self) -> list[str]:
        """Each kind needs its files."""
        if not self.config:
            return ["config: names no configuration; give a file"]
        if (self.kind == ABOVE) != (self.baseline is not None):
            return [f"baseline: kind above needs one and kind parity none, got kind {self.kind}"]
        return []


@dataclass(frozen=True, kw_only=True)
class QualityConfig(Rules):
    """Checks by name."""

    checks: Mapping[str, QualityCheck] | None = rule(None, "Checks by name.")
