"""Which pipeline trains: from the ``pipeline`` section of a configuration to TorchRec's contract.

Automatic settings are tried on the first training steps, so they cost no step, but they are chosen
by time: another run may cut its batches otherwise and then agrees to rounding, not to the bit.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torchrec.distributed.train_pipeline import TrainPipeline, TrainPipelineSparseDist

from torchrec_picasso.app.config import PipelineConfig
from torchrec_picasso.train_pipeline.interleaved import InterleavedTrainPipeline
from torchrec_picasso.train_pipeline.step_report import OnStep

__all__ = ["MakePipeline", "describe_pipeline", "is_settled", "pipeline_maker", "sparse_dist"]

MakePipeline = Callable[[torch.nn.Module, torch.optim.Optimizer, torch.device], TrainPipeline]
"""From sharded model, optimizer and device to a pipeline with TorchRec's ``progress``."""


def pipeline_maker(config: PipelineConfig, on_step: OnStep | None = None) -> MakePipeline:
    """What makes the pipeline that a configuration asks for.

    Args:
        config: Kind and settings.
        on_step: Takes reports of an interleaved pipeline; other kinds give none.
    """
    if config.kind == "sparse_dist":
        return sparse_dist

    def interleaved(
        model: torch.nn.Module, optimizer: torch.optim.Optimizer, device: torch.device
    ) -> TrainPipeline:
        return InterleavedTrainPipeline(
            model,
            optimizer,
            device,
            num_micro_batches=config.num_micro_batches,
            lookahead=config.lookahead,
            refresh=config.refresh,
            verify_every=config.verify_every,
            on_step=on_step,
        )

    return interleaved


def sparse_dist(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, device: torch.device
) -> TrainPipeline:
    """TorchRec's SparseDist pipeline."""
    return TrainPipelineSparseDist(model, optimizer, device, execute_all_batches=True)


def is_settled(pipeline: TrainPipeline) -> bool:
    """Whether the pipeline has chosen its settings; one without a choice has."""
    return not isinstance(pipeline, InterleavedTrainPipeline) or pipeline.is_settled


def describe_pipeline(pipeline: TrainPipeline) -> str:
    """What the pipeline does with each sharded module, and its settings; after a step.

    Returns:
        A line per module and one on the settings; for other pipelines their type's name.
    """
    if isinstance(pipeline, InterleavedTrainPipeline):
        return pipeline.summary()
    return type(pipeline).__name__
