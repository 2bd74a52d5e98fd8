"""Builds the train pipeline of a configuration.

Automatic settings are tuned by time on the first training steps: another run may choose other
micro-batches, and then agrees to rounding, not bitwise.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torchrec.distributed.train_pipeline import TrainPipeline, TrainPipelineSparseDist

from torchrec_picasso.app.config import PipelineConfig
from torchrec_picasso.train_pipeline.interleaved import InterleavedTrainPipeline
from torchrec_picasso.train_pipeline.step_report import OnStep

MakePipeline = Callable[[torch.nn.Module, torch.optim.Optimizer, torch.device], TrainPipeline]
"""Builds a pipeline from sharded model, optimizer and device."""


def pipeline_maker(config: PipelineConfig, on_step: OnStep | None = None) -> MakePipeline:
    """Constructor of the configured pipeline.

    Args:
        config: Kind and settings.
        on_step: Called with the step reports of an interleaved pipeline.
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
    """Builds TorchRec's SparseDist pipeline."""
    return TrainPipelineSparseDist(model, optimizer, device, execute_all_batches=True)


def is_settled(pipeline: TrainPipeline) -> bool:
    """Whether the pipeline has chosen its settings, or has nothing to choose."""
    return not isinstance(pipeline, InterleavedTrainPipeline) or pipeline.is_settled


def describe_pipeline(pipeline: TrainPipeline) -> str:
    """Summary of an interleaved pipeline after a step; the type's name of any other."""
    if isinstance(pipeline, InterleavedTrainPipeline):
        return pipeline.summary()
    return type(pipeline).__name__
