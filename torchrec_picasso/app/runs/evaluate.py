"""Predictions of held-out samples on all ranks, and the area under their ROC curve.

Shape letters: N held-out samples of all ranks, T tasks.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pandas as pd
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torchrec.datasets.utils import Batch

from torchrec_picasso.app.runs.trainer import Trainer

__all__ = ["area_under_curve", "areas_under_curves", "predict_all"]


def predict_all(
    trainer: Trainer, batches: Iterable[Batch]
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Labels and predicted probabilities of the held-out samples of all ranks.

    Collective: every rank of the default process group calls this, in the same order.

    Args:
        trainer: The model; its weights stay as they are.
        batches: This rank's held-out batches, as many on each rank.

    Returns:
        Labels and probabilities, both ``(N, T)``, the same on every rank.
    """
    predicted = list(trainer.predict(batches))
    scores, labels = (
        torch.cat([_by_task(batch[place]) for batch in predicted]) for place in (0, 1)
    )
    by_rank: list[tuple[Tensor, Tensor]] = [(labels, scores)] * dist.get_world_size()
    dist.all_gather_object(by_rank, (labels, scores))
    labels_NT, scores_NT = (torch.cat(parts).float().numpy() for parts in zip(*by_rank))
    return labels_NT, scores_NT


def _by_task(values: Tensor) -> Tensor:
    """Shape ``(B, T)``, also of one task's ``(B,)``."""
    return values.reshape(len(values), -1).cpu()


def areas_under_curves(
    labels_NT: NDArray[np.float32], scores_NT: NDArray[np.float32]
) -> list[float]:
    """:func:`area_under_curve` of each task."""
    return [area_under_curve(*task) for task in zip(labels_NT.T, scores_NT.T)]


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
