"""Predictions for held-out samples of all ranks, and the area under the ROC curve.

Shape letters: N held-out samples of all ranks, T tasks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import numpy as np
import pandas as pd
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torchrec.datasets.utils import Batch

from torchrec_picasso.app.config import DataConfig
from torchrec_picasso.app.runs.trainer import Trainer
from torchrec_picasso.app.zoo.data.source import BatchSource


def predict_all(
    trainer: Trainer, batches: Iterable[Batch]
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Labels and predicted probabilities of all ranks, both ``(N, T)``, on every rank.

    Collective: every rank of the default process group calls this, with as many batches.
    """
    labels, scores = (torch.cat(parts).cpu() for parts in zip(*trainer.predict(batches)))
    by_rank: list[tuple[Tensor, Tensor]] = [(labels, scores)] * dist.get_world_size()
    dist.all_gather_object(by_rank, (labels, scores))
    labels_NT, scores_NT = (torch.cat(parts).float().numpy() for parts in zip(*by_rank))
    return labels_NT, scores_NT


def evaluate(
    trainer: Trainer, source: BatchSource, rank: int, data: DataConfig
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """:func:`predict_all` of the window after the steps trained, or of the held-out samples.

    Collective.
    """
    world_size = dist.get_world_size()
    if data.window_steps is None:
        return predict_all(trainer, source.heldout(rank, world_size))
    following = source.batches(rank, world_size, start_step=trainer.num_trained)
    return predict_all(trainer, itertools.islice(following, data.window_steps))


def areas_under_curves(
    labels_NT: NDArray[np.float32], scores_NT: NDArray[np.float32]
) -> list[float]:
    """:func:`area_under_curve` of each task."""
    return [area_under_curve(*task) for task in zip(labels_NT.T, scores_NT.T)]


def area_under_curve(labels_N: NDArray[np.float32], scores_N: NDArray[np.float32]) -> float:
    """Area under the ROC curve, ties counted half; 0.5 if a class is missing."""
    rank_N = pd.Series(scores_N).rank().to_numpy()  # from 1; ties have their mean rank
    is_one_N = labels_N > 0.5
    num_ones = int(is_one_N.sum())
    num_zeros = len(labels_N) - num_ones
    if not num_ones or not num_zeros:
        return 0.5
    above = rank_N[is_one_N].sum() - num_ones * (num_ones + 1) / 2
    return float(above / (num_ones * num_zeros))
