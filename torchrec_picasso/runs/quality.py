"""Quality checks: a model trains as stock trains it, or learns more than another one.

Two models are compared on the same held-out samples, so an interval of the difference of their
areas under the ROC curve is drawn by a paired bootstrap: samples are drawn with replacement, and
both models are judged on the same draw.

Source: Efron and Tibshirani, An Introduction to the Bootstrap (1993), chapter 13: percentiles.

Shape letters: N held-out samples.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from torchrec_picasso.config import PipelineConfig, TrainConfig
from torchrec_picasso.launch.quiet import quiet_upstream
from torchrec_picasso.runs.trainer import Trainer
from torchrec_picasso.zoo.registry import make_source

__all__ = [
    "Interval",
    "Scores",
    "area_under_curve",
    "as_hot_cold",
    "as_stock",
    "paired_bootstrap",
    "score_on_rank",
]

_DRAWS = 400
_PERCENTILES = (2.5, 97.5)


@dataclass(frozen=True, kw_only=True)
class Scores:
    """What a training gave.

    Args:
        losses: Of every global batch.
        labels_N: Of the held-out samples of all ranks, of the first task.
        scores_N: Their predicted probabilities.
    """

    losses: list[float]
    labels_N: NDArray[np.float32]
    scores_N: NDArray[np.float32]

    @property
    def auc(self) -> float:
        """Area under the ROC curve."""
        return area_under_curve(self.labels_N, self.scores_N)


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A difference, and where it is by 95 %."""

    difference: float
    low: float
    high: float


def as_hot_cold(config: TrainConfig, hot_rows: int, num_micro_batches: int) -> TrainConfig:
    """The same training with every table hot/cold, in micro-batches, with lookahead.

    Args:
        config: What is trained.
        hot_rows: Over all tables.
        num_micro_batches: Of a batch.
    """
    return dataclasses.replace(
        config,
        sharding=dataclasses.replace(config.sharding, placement="hot_cold", hot_rows=hot_rows),
        pipeline=PipelineConfig(num_micro_batches=num_micro_batches, lookahead=True),
    )


def as_stock(config: TrainConfig) -> TrainConfig:
    """The same training by stock TorchRec: whole tables under ``TrainPipelineSparseDist``."""
    sharding = dataclasses.replace(config.sharding, placement="table_wise")
    return dataclasses.replace(
        config, sharding=sharding, pipeline=PipelineConfig(kind="sparse_dist")
    )


def score_on_rank(rank: int, world_size: int, config: TrainConfig) -> Scores:
    """Trains and predicts the held-out samples. Collective: the main function of every rank.

    Args:
        rank: This rank.
        world_size: Ranks in the default process group.
        config: What is trained; checkpoints are not written.
    """
    quiet_upstream()
    source = make_source(config.data, config.seed)
    trainer = Trainer(config, source)
    losses = trainer.train(source.batches(rank, world_size), config.steps)
    found = list(trainer.predict(source.heldout(rank, world_size)))
    mine = [
        torch.cat([of[place].reshape(len(of[place]), -1)[:, 0] for of in found]) for place in (0, 1)
    ]
    gathered: list[list[torch.Tensor]] = [[] for _ in range(world_size)]
    dist.all_gather_object(gathered, mine)
    scores_N, labels_N = (torch.cat(of).numpy() for of in zip(*gathered))
    return Scores(losses=trainer.mean_over_ranks(losses), labels_N=labels_N, scores_N=scores_N)


def area_under_curve(labels_N: NDArray[np.float32], scores_N: NDArray[np.float32]) -> float:
    """Chance that a sample with label 1 scores higher than one with label 0; ties count half.

    Returns:
        0.5 where one class is missing.
    """
    rank_N = pd.Series(scores_N).rank().to_numpy()  # from 1 on, equal scores their mean rank
    is_one_N = labels_N > 0.5
    num_ones = int(is_one_N.sum())
    num_zeros = len(labels_N) - num_ones
    if not num_ones or not num_zeros:
        return 0.5
    above = rank_N[is_one_N].sum() - num_ones * (num_ones + 1) / 2
    return float(above / (num_ones * num_zeros))


def paired_bootstrap(ours: Scores, other: Scores, seed: int = 0) -> Interval:
    """The difference of two models' areas under the curve, and its 95 % interval.

    Args:
        ours: One model's.
        other: The other's, of the same samples.
        seed: Draws.
    """
    rng = np.random.default_rng(seed)
    differences = []
    for _ in range(_DRAWS):
        drawn_N = rng.integers(len(ours.labels_N), size=len(ours.labels_N))
        labels_N = ours.labels_N[drawn_N]
        differences.append(
            area_under_curve(labels_N, ours.scores_N[drawn_N])
            - area_under_curve(labels_N, other.scores_N[drawn_N])
        )
    low, high = np.percentile(differences, _PERCENTILES)
    return Interval(difference=ours.auc - other.auc, low=float(low), high=float(high))
