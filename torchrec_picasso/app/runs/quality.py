"""Runs quality checks: trains both models of a check and compares their figures.

Both models are evaluated on the same held-out samples, so the interval of their AUC difference
comes from a paired bootstrap: samples are drawn with replacement, the same for both models. Figures
of several tasks are means over the tasks.

Source: Efron and Tibshirani, An Introduction to the Bootstrap (1993), chapter 13: percentiles.

Shape letters: F folds, N held-out samples, S steps, T tasks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchrec_picasso.app.config import ModelConfig, PipelineConfig, TrainConfig, load_config
from torchrec_picasso.app.config.quality import ABOVE, PARITY, QualityCheck
from torchrec_picasso.app.launch.quiet import quiet_upstream
from torchrec_picasso.app.launch.run_ranks import run_ranks
from torchrec_picasso.app.runs.evaluate import areas_under_curves, evaluate
from torchrec_picasso.app.runs.trainer import Trainer
from torchrec_picasso.app.zoo.registry import check_run, make_source

_DATA_KEYS = (
    *("batch_size", "heldout_steps", "cardinalities", "row_scale", "max_rows", "labels"),
    *("task_correlation", "window_steps", "num_candidates"),
)
"""Keys of a check that replace those of the same name in ``data``."""

_ROUNDING = 1e-6
"""Relative difference of losses from float32 sums in another order."""
_DRAWS = 400
_PERCENTILES = (2.5, 97.5)
_LEAST_CHANCE = 1e-7  # so one sample cannot make the log loss infinite


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Results of a training.

    Args:
        losses: Losses of the global batches.
        labels_NT: Labels of the held-out samples of all ranks.
        scores_NT: Predicted probabilities of these samples.
    """

    losses: list[float]
    labels_NT: NDArray[np.float32]
    scores_NT: NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.labels_NT)

    @property
    def aucs(self) -> list[float]:
        """Area under the ROC curve of each task."""
        return areas_under_curves(self.labels_NT, self.scores_NT)

    @property
    def auc(self) -> float:
        """Mean of :attr:`aucs`."""
        return float(np.mean(self.aucs))

    @property
    def log_loss(self) -> float:
        """Cross-entropy, averaged over samples and tasks."""
        chances_NT = np.clip(self.scores_NT.astype(np.float64), _LEAST_CHANCE, 1 - _LEAST_CHANCE)
        is_one_NT = self.labels_NT > 0.5
        return float(-np.log(np.where(is_one_NT, chances_NT, 1 - chances_NT)).mean())

    def take(self, samples_n: NDArray[np.int64]) -> Scores:
        """The scores of given samples."""
        return dataclasses.replace(
            self, labels_NT=self.labels_NT[samples_n], scores_NT=self.scores_NT[samples_n]
        )

    def first_tasks(self, num_tasks: int) -> Scores:
        """The scores of the first tasks, which another model learns too."""
        labels_NT, scores_NT = self.labels_NT[:, :num_tasks], self.scores_NT[:, :num_tasks]
        return dataclasses.replace(self, labels_NT=labels_NT, scores_NT=scores_NT)


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A difference with its 95 % interval."""

    difference: float
    low: float
    high: float


def as_hot_cold(config: TrainConfig, hot_rows: int, num_micro_batches: int) -> TrainConfig:
    """The same training with all tables hot/cold, micro-batches and lookahead."""
    return dataclasses.replace(
        config,
        sharding=dataclasses.replace(config.sharding, placement="hot_cold", hot_rows=hot_rows),
        pipeline=PipelineConfig(num_micro_batches=num_micro_batches, lookahead=True),
    )


def as_stock(config: TrainConfig) -> TrainConfig:
    """The same training with stock TorchRec: table-wise under ``TrainPipelineSparseDist``."""
    sharding = dataclasses.replace(config.sharding, placement="table_wise")
    return dataclasses.replace(
        config, sharding=sharding, pipeline=PipelineConfig(kind="sparse_dist")
    )


def score_on_rank(rank: int, world_size: int, config: TrainConfig) -> Scores:
    """Trains without checkpoints, and predicts samples that were not trained on.

    Collective: the main function of every rank.
    """
    quiet_upstream()
    source = make_source(config.data, config.seed)
    trainer = Trainer(config, source)
    losses = trainer.train(source.batches(rank, world_size), config.steps)
    labels_NT, scores_NT = evaluate(trainer, source, rank, config.data)
    return Scores(losses=trainer.mean_over_ranks(losses), labels_NT=labels_NT, scores_NT=scores_NT)


def paired_bootstrap(ours_F: Sequence[Scores], other_F: Sequence[Scores]) -> Interval:
    """The AUC difference of two models, averaged over folds, with its interval.

    Samples are drawn within their fold, since folds have different trainings.

    Args:
        ours_F: Scores of one model by fold.
        other_F: Scores of the other model for the same samples.
    """
    rng = np.random.default_rng(0)
    differences = []
    for _ in range(_DRAWS):
        draws_F = [rng.integers(len(ours), size=len(ours)) for ours in ours_F]
        differences.append(
            mean_auc([ours.take(draw_N) for ours, draw_N in zip(ours_F, draws_F)])
            - mean_auc([other.take(draw_N) for other, draw_N in zip(other_F, draws_F)])
        )
    low, high = np.percentile(differences, _PERCENTILES)
    difference = mean_auc(ours_F) - mean_auc(other_F)
    return Interval(difference=difference, low=float(low), high=float(high))


def mean_auc(scores_F: Sequence[Scores]) -> float:
    """AUC, averaged over folds."""
    return float(np.mean([scores.auc for scores in scores_F]))


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """Result of a check.

    Args:
        holds: Whether the check holds.
        summary: The measurements as text.
        figures: The measurements by name.
    """

    holds: bool
    summary: str
    figures: dict[str, float]


@dataclass
class Checker:
    """Runs checks; a training that several checks share is run once.

    Args:
        folder: Folder of the configurations.
        seed: Seed of weights and generated samples; ``None`` = as configured.
    """

    folder: Path
    seed: int | None = None
    _cache: list[tuple[TrainConfig, Scores]] = field(default_factory=list)

    def check(self, check: QualityCheck) -> CheckResult:
        """Trains the models and compares them.

        Raises:
            PicassoError: If a configuration or its data cannot be used.
            RankError: If a rank fails.
        """
        if check.kind == PARITY:
            return self._parity(check)
        return self._above(check) if check.kind == ABOVE else self._value(check)

    def _parity(self, check: QualityCheck) -> CheckResult:
        config = self._configured(check.config, check)
        ours = self._score(as_hot_cold(config, check.hot_rows, check.num_micro_batches))
        stock = self._score(as_stock(config))
        losses, stock_losses = np.array(ours.losses), np.array(stock.losses)
        difference_S = np.abs(losses - stock_losses) / np.abs(stock_losses)
        largest = float(difference_S.max())
        num_equal = int((difference_S <= _ROUNDING).cumprod().sum())
        return CheckResult(
            holds=largest <= check.max_loss_difference
            and abs(ours.auc - stock.auc) <= check.max_auc_difference,
            summary=f"{len(losses)} losses within {largest:.1e} of stock's, the first {num_equal} "
            f"within {_ROUNDING:.0e}, AUC {ours.auc:.4f} and {stock.auc:.4f}",
            figures={
                **{"loss_difference": largest, "steps_alike": num_equal},
                **{"auc": ours.auc, "stock_auc": stock.auc},
            },
        )

    def _above(self, check: QualityCheck) -> CheckResult:
        assert check.baseline is not None
        ours_F = self._folds(check, self._configured(check.config, check))
        other_F = self._folds(check, self._baseline(check.baseline, check))
        num_tasks = min(each.labels_NT.shape[1] for each in (*ours_F, *other_F))
        ours_F, other_F = (
            [each.first_tasks(num_tasks) for each in side] for side in (ours_F, other_F)
        )
        interval = paired_bootstrap(ours_F, other_F)
        auc, other_auc, num_samples = mean_auc(ours_F), mean_auc(other_F), _num_samples(ours_F)
        return CheckResult(
            holds=interval.low > check.least_margin,
            summary=f"AUC {auc:.4f} and {other_auc:.4f}, {interval.difference:+.4f} "
            f"({interval.low:+.4f} to {interval.high:+.4f}) on {num_samples:,} samples",
            figures={
                **{"auc": auc, "baseline_auc": other_auc, "samples": num_samples},
                **{"difference": interval.difference, "low": interval.low, "high": interval.high},
            },
        )

    def _value(self, check: QualityCheck) -> CheckResult:
        assert check.value is not None
        assert check.tolerance is not None
        ours_F = self._folds(check, self._configured(check.config, check))
        value = float(np.mean([getattr(ours, check.metric) for ours in ours_F]))
        return CheckResult(
            holds=abs(value - check.value) <= check.tolerance,
            summary=f"{check.metric} {value:.4f}, expected {check.value:.4f} within "
            f"{check.tolerance:g}, on {_num_samples(ours_F):,} samples",
            figures={
                **{check.metric: value, "value": check.value},
                **{"tolerance": check.tolerance, "samples": _num_samples(ours_F)},
            },
        )

    def _configured(self, name: str, check: QualityCheck) -> TrainConfig:
        config = load_config(self.folder / name)
        data = {"path": check.data, **{key: getattr(check, key) for key in _DATA_KEYS}}
        return dataclasses.replace(
            config,
            steps=check.steps,
            seed=config.seed if self.seed is None else self.seed,
            data=dataclasses.replace(
                config.data, **{key: value for key, value in data.items() if value is not None}
            ),
            model=_resized(config.model, check.sizes),
            optimizer=check.optimizer,
        )

    def _baseline(self, name: str, check: QualityCheck) -> TrainConfig:
        baseline = dataclasses.replace(
            check,
            sizes=check.baseline_sizes,
            steps=check.baseline_steps or check.steps,
            optimizer=check.baseline_optimizer or check.optimizer,
        )
        return self._configured(name, baseline)

    def _folds(self, check: QualityCheck, config: TrainConfig) -> list[Scores]:
        """Scores of one training per fold."""
        folds = check.folds or (config.data.heldout_fold,)
        data_F = [dataclasses.replace(config.data, heldout_fold=fold) for fold in folds]
        return [self._score(dataclasses.replace(config, data=data)) for data in data_F]

    def _score(self, config: TrainConfig) -> Scores:
        for cached, scores in self._cache:
            if cached == config:
                return scores
        check_run(config, config.ranks)
        scores = run_ranks(score_on_rank, config.ranks, config, timeout_s=config.timeout_s)[0]
        self._cache.append((config, scores))
        return scores


def _resized(model: ModelConfig, sizes: Mapping[str, Any] | None) -> ModelConfig:
    return dataclasses.replace(model, sizes={**(model.sizes or {}), **(sizes or {})} or None)


def _num_samples(scores_F: list[Scores]) -> int:
    return sum(map(len, scores_F))
