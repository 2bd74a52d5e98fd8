"""Held-out AUC with TorchRec's own metric, over the samples of all ranks."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torchrec.datasets.utils import Batch
from torchrec.metrics.auc import AUCMetric
from torchrec.metrics.metrics_config import RecTaskInfo

from torchrec_picasso.runs.trainer import Trainer

__all__ = ["evaluate_auc"]


def evaluate_auc(trainer: Trainer, batches: Iterable[Batch], num_samples: int) -> float:
    """Area under the ROC curve of the model on held-out batches.

    Collective: every rank of the default process group calls this, in the same order.

    Args:
        trainer: The model; its weights stay as they are.
        batches: This rank's held-out batches, as many on each rank.
        num_samples: Samples of all ranks together: TorchRec's metric keeps that many and no more.

    Returns:
        The AUC over all ranks' samples, the same on every rank; 0.5 where one class is missing.
    """
    task = RecTaskInfo(
        name="click", label_name="label", prediction_name="prediction", weight_name="weight"
    )
    metric = AUCMetric(
        world_size=dist.get_world_size(),
        my_rank=dist.get_rank(),
        batch_size=1,
        tasks=[task],
        window_size=num_samples,
        compute_on_all_ranks=True,
    )
    for probabilities, labels in trainer.predict(batches):
        metric.update(
            predictions={task.name: probabilities.double()},
            labels={task.name: labels.double()},
            weights={task.name: torch.ones_like(labels, dtype=torch.float64)},
        )
    (auc,) = metric.compute().values()
    return float(auc)
