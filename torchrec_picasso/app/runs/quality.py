"""Figures of a training on held-out samples, and a paired bootstrap of their difference.

Two models are compared on the same held-out samples, so the interval of their AUC difference comes
from a paired bootstrap: samples are drawn with replacement, and both models are evaluated on the
same draw. Figures of several tasks are means over the tasks.

Source: Efron and Tibshirani, An Introduction to the Bootstrap (1993), chapter 13: percentiles.

Shape letters: F folds, N held-out samples, T tasks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from torchrec_picasso.app.config import PipelineConfig, TrainConfig
from torchrec_picasso.app.launch.quiet import quiet_upstream
from torchrec_picasso.app.runs.evaluate import areas_under_curves, predict_all
from torchrec_picasso.app.runs.trainer import Trainer
from torchrec_picasso.app.zoo.registry import make_source

__all__ = [
    "Interval",
    "Scores",
    "as_hot_cold",
    "as_stock",
    "mean_auc",
    "paired_bootstrap",
    "score_on_rank",
]

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
    """Trains without checkpoints, and predicts the held-out samples.

    Collective: the main function of every rank.
    """
    quiet_upstream()
    source = make_source(config.data, config.seed)
    trainer = Trainer(config, source)
    losses = trainer.train(source.batches(rank, world_size), config.steps)
    labels_NT, scores_NT = predict_all(trainer, source.heldout(rank, world_size))
    return Scores(losses=trainer.mean_over_ranks(losses), labels_NT=labels_NT, scores_NT=scores_NT)


def paired_bootstrap(
    ours_F: Sequence[Scores], other_F: Sequence[Scores], seed: int = 0
) -> Interval:
    """The AUC difference of two models, averaged over folds, with its interval.

    Samples are drawn within their fold, since folds have different trainings.

    Args:
        ours_F: Scores of one model by fold.
        other_F: Scores of the other model for the same samples.
        seed: Seed of the draws.
    """
    rng = np.random.default_rng(seed)
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
