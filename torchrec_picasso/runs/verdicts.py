"""What comes of a quality check: both of its sides are trained, and their figures are compared.

A training that several checks name is run once.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from torchrec_picasso.config import TrainConfig, load_config
from torchrec_picasso.config.quality import ABOVE, PARITY, QualityCheck
from torchrec_picasso.launch.run_ranks import run_ranks
from torchrec_picasso.runs.quality import (
    Scores,
    as_hot_cold,
    as_stock,
    paired_bootstrap,
    score_on_rank,
)
from torchrec_picasso.zoo.registry import check_run

__all__ = ["Checker", "Verdict"]

_OF_DATA = (
    *("batch_size", "heldout_steps", "cardinalities", "row_scale", "max_rows", "labels"),
    "task_correlation",
)
"""Keys of a check that change those of the same name in ``data``."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What came of a check.

    Args:
        holds: Whether it does.
        found: What was measured, in words.
        figures: The same by name.
    """

    holds: bool
    found: str
    figures: dict[str, float]


@dataclass
class Checker:
    """Trains what checks name.

    Args:
        folder: Of their configurations.
        seed: Of weights and generated samples; ``None`` = as configured.
    """

    folder: Path
    seed: int | None = None
    _known: list[tuple[TrainConfig, Scores]] = field(default_factory=list)

    def check(self, wanted: QualityCheck) -> Verdict:
        """Trains and compares.

        Raises:
            PicassoError: If a configuration or its data cannot be used.
            RankError: If a rank fails.
        """
        if wanted.kind == PARITY:
            return self._parity(wanted)
        return self._above(wanted) if wanted.kind == ABOVE else self._value(wanted)

    def _parity(self, wanted: QualityCheck) -> Verdict:
        config = self._configured(wanted.config, wanted)
        ours = self._score(as_hot_cold(config, wanted.hot_rows, wanted.num_micro_batches))
        stock = self._score(as_stock(config))
        losses, stock_losses = np.array(ours.losses), np.array(stock.losses)
        apart = float((np.abs(losses - stock_losses) / np.abs(stock_losses)).max())
        return Verdict(
            holds=apart <= wanted.max_loss_difference
            and abs(ours.auc - stock.auc) <= wanted.max_auc_difference,
            found=f"{len(losses)} losses within {apart:.1e} of stock's, "
            f"AUC {ours.auc:.4f} and {stock.auc:.4f}",
            figures={"loss_difference": apart, "auc": ours.auc, "stock_auc": stock.auc},
        )

    def _above(self, wanted: QualityCheck) -> Verdict:
        assert wanted.baseline is not None
        ours = self._score(self._configured(wanted.config, wanted))
        other = self._score(self._configured(wanted.baseline, wanted, of_baseline=True))
        by = paired_bootstrap(ours, other)
        return Verdict(
            holds=by.low > wanted.least_margin,
            found=f"AUC {ours.auc:.4f} and {other.auc:.4f}, {by.difference:+.4f} "
            f"({by.low:+.4f} to {by.high:+.4f}) on {len(ours):,} samples",
            figures={
                **{"auc": ours.auc, "baseline_auc": other.auc, "samples": len(ours)},
                **{"difference": by.difference, "low": by.low, "high": by.high},
            },
        )

    def _value(self, wanted: QualityCheck) -> Verdict:
        assert wanted.value is not None
        assert wanted.tolerance is not None
        ours = self._score(self._configured(wanted.config, wanted))
        found = float(getattr(ours, wanted.metric))
        return Verdict(
            holds=abs(found - wanted.value) <= wanted.tolerance,
            found=f"{wanted.metric} {found:.4f}, expected {wanted.value:.4f} within "
            f"{wanted.tolerance:g}, on {len(ours):,} samples",
            figures={
                **{wanted.metric: found, "value": wanted.value},
                **{"tolerance": wanted.tolerance, "samples": len(ours)},
            },
        )

    def _configured(
        self, name: str, wanted: QualityCheck, of_baseline: bool = False
    ) -> TrainConfig:
        config = load_config(self.folder / name)
        asked = {key: getattr(wanted, key) for key in _OF_DATA}
        data = {"path": wanted.data, **asked}
        sizes = wanted.baseline_sizes if of_baseline else wanted.sizes
        return dataclasses.replace(
            config,
            steps=wanted.steps,
            seed=config.seed if self.seed is None else self.seed,
            data=dataclasses.replace(
                config.data, **{key: value for key, value in data.items() if value is not None}
            ),
            model=dataclasses.replace(
                config.model, sizes={**(config.model.sizes or {}), **(sizes or {})} or None
            ),
            optimizer=wanted.optimizer,
        )

    def _score(self, config: TrainConfig) -> Scores:
        for known, scores in self._known:
            if known == config:
                return scores
        check_run(config, config.ranks)
        scores = run_ranks(score_on_rank, config.ranks, config, timeout_s=config.timeout_s)[0]
        self._known.append((config, scores))
        return scores
