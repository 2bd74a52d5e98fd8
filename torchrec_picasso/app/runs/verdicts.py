"""What comes of a quality check: both of its sides are trained, and their figures are compared.

A training that several checks name is run once.

Shape letters: F folds, S steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from torchrec_picasso.app.config import ModelConfig, TrainConfig, load_config
from torchrec_picasso.app.config.quality import ABOVE, PARITY, QualityCheck
from torchrec_picasso.app.launch.run_ranks import run_ranks
from torchrec_picasso.app.runs.quality import (
    Scores,
    as_hot_cold,
    as_stock,
    mean_auc,
    paired_bootstrap,
    score_on_rank,
)
from torchrec_picasso.app.zoo.registry import check_run

__all__ = ["Checker", "Verdict"]

_OF_DATA = (
    *("batch_size", "heldout_steps", "cardinalities", "row_scale", "max_rows", "labels"),
    "task_correlation",
)
"""Keys of a check that change those of the same name in ``data``."""

_ROUNDING = 1e-6
"""Relative differences of losses that float32 sums in another order have."""


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
        apart_S = np.abs(losses - stock_losses) / np.abs(stock_losses)
        apart = float(apart_S.max())
        num_alike = int((apart_S <= _ROUNDING).cumprod().sum())
        return Verdict(
            holds=apart <= wanted.max_loss_difference
            and abs(ours.auc - stock.auc) <= wanted.max_auc_difference,
            found=f"{len(losses)} losses within {apart:.1e} of stock's, the first {num_alike} "
            f"within {_ROUNDING:.0e}, AUC {ours.auc:.4f} and {stock.auc:.4f}",
            figures={
                **{"loss_difference": apart, "steps_alike": num_alike},
                **{"auc": ours.auc, "stock_auc": stock.auc},
            },
        )

    def _above(self, wanted: QualityCheck) -> Verdict:
        assert wanted.baseline is not None
        ours_F = self._folds(wanted, self._configured(wanted.config, wanted))
        other_F = self._folds(wanted, self._baseline(wanted.baseline, wanted))
        by = paired_bootstrap(ours_F, other_F)
        auc, other_auc, num_samples = mean_auc(ours_F), mean_auc(other_F), _num_samples(ours_F)
        return Verdict(
            holds=by.low > wanted.least_margin,
            found=f"AUC {auc:.4f} and {other_auc:.4f}, {by.difference:+.4f} "
            f"({by.low:+.4f} to {by.high:+.4f}) on {num_samples:,} samples",
            figures={
                **{"auc": auc, "baseline_auc": other_auc, "samples": num_samples},
                **{"difference": by.difference, "low": by.low, "high": by.high},
            },
        )

    def _value(self, wanted: QualityCheck) -> Verdict:
        assert wanted.value is not None
        assert wanted.tolerance is not None
        ours_F = self._folds(wanted, self._configured(wanted.config, wanted))
        found = float(np.mean([getattr(ours, wanted.metric) for ours in ours_F]))
        return Verdict(
            holds=abs(found - wanted.value) <= wanted.tolerance,
            found=f"{wanted.metric} {found:.4f}, expected {wanted.value:.4f} within "
            f"{wanted.tolerance:g}, on {_num_samples(ours_F):,} samples",
            figures={
                **{wanted.metric: found, "value": wanted.value},
                **{"tolerance": wanted.tolerance, "samples": _num_samples(ours_F)},
            },
        )

    def _configured(self, name: str, wanted: QualityCheck) -> TrainConfig:
        config = load_config(self.folder / name)
        asked = {key: getattr(wanted, key) for key in _OF_DATA}
        data = {"path": wanted.data, **asked}
        return dataclasses.replace(
            config,
            steps=wanted.steps,
            seed=config.seed if self.seed is None else self.seed,
            data=dataclasses.replace(
                config.data, **{key: value for key, value in data.items() if value is not None}
            ),
            model=_resized(config.model, wanted.sizes),
            optimizer=wanted.optimizer,
        )

    def _baseline(self, name: str, wanted: QualityCheck) -> TrainConfig:
        alike = dataclasses.replace(
            wanted,
            sizes=wanted.baseline_sizes,
            steps=wanted.baseline_steps or wanted.steps,
            optimizer=wanted.baseline_optimizer or wanted.optimizer,
        )
        return self._configured(name, alike)

    def _folds(self, wanted: QualityCheck, config: TrainConfig) -> list[Scores]:
        """A training for each fold."""
        folds = wanted.folds or (config.data.heldout_fold,)
        of_folds = [dataclasses.replace(config.data, heldout_fold=fold) for fold in folds]
        return [self._score(dataclasses.replace(config, data=data)) for data in of_folds]

    def _score(self, config: TrainConfig) -> Scores:
        for known, scores in self._known:
            if known == config:
                return scores
        check_run(config, config.ranks)
        scores = run_ranks(score_on_rank, config.ranks, config, timeout_s=config.timeout_s)[0]
        self._known.append((config, scores))
        return scores


def _resized(model: ModelConfig, sizes: Mapping[str, Any] | None) -> ModelConfig:
    return dataclasses.replace(model, sizes={**(model.sizes or {}), **(sizes or {})} or None)


def _num_samples(scores_F: list[Scores]) -> int:
    return sum(map(len, scores_F))
