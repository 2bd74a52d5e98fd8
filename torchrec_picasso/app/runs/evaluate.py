"""Held-out AUC with TorchRec's own metric, over the samples of all ranks."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.datasets.utils import Batch
from torchrec.metrics.auc import AUCMetric
from torchrec.metrics.metrics_config import RecTaskInfo

from torchrec_picasso.app.runs.trainer import Trainer

__all__ = ["evaluate_auc"]

_TASK = RecTaskInfo(
    name="click", label_name="label", prediction_name="prediction", weight_name="weight"
)


def evaluate_auc(trainer: Trainer, batches: Iterable[Batch], num_samples: int) -> list[float]:
    """Areas under the ROC curves of the model's tasks on held-out batches.

    Collective: every rank of the default process group calls this, in the same order.

    Args:
        trainer: The model; its weights stay as they are.
        batches: This rank's held-out batches, as many on each rank.
        num_samples: Samples of all ranks together: TorchRec's metric keeps that many and no more.

    Returns:
        The AUC of each task over all ranks' samples, the same on every rank; 0.5 where one class is
        missing.
    """
    metrics: list[AUCMetric] = []
    for probabilities, labels in trainer.predict(batches):
        of_tasks = list(zip(_by_task(probabilities), _by_task(labels)))
        metrics = metrics or [_metric(num_samples) for _ in of_tasks]
        for metric, (probabilities_B, labels_B) in zip(metrics, of_tasks):
            metric.update(
                predictions={_TASK.name: probabilities_B.double()},
                labels={_TASK.name: labels_B.double()},
                weights={_TASK.name: torch.ones_like(labels_B, dtype=torch.float64)},
            )
    return [float(auc) for metric in metrics for auc in metric.compute().values()]


def _by_task(values: Tensor) -> list[Tensor]:
    return list(values.reshape(values.size(0), -1).unbind(dim=1))


def _metric(num_samples: int) -> AUCMetric:
    return AUCMetric(
        world_size=dist.get_world_size(),
        my_rank=dist.get_rank(),
        batch_size=1,
        tasks=[_TASK],
        window_size=num_samples,
        compute_on_all_ranks=True,
    )
