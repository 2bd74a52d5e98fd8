"""Steps of a model without hot/cold tables: TorchRec's own pipeline takes them.

Nothing of such a model can be interleaved, so its step is TorchRec's, operator by operator. Around
it remain what users of the pipeline rely on: ranks may have different numbers of batches, losses
may be a ratio, and steps are reported.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from torchrec_picasso.batches.split import count_samples
from torchrec_picasso.batches.until_all_end import UntilAllEnd
from torchrec_picasso.sharding.sharded_module import HotColdModule
from torchrec_picasso.train_pipeline.data_parallel import no_gradients, note_reduction
from torchrec_picasso.train_pipeline.losses import Losses
from torchrec_picasso.train_pipeline.model_parts import inner_model, process_group_of
from torchrec_picasso.train_pipeline.options import PipelineOptions


class StockSteps:
    """Gives TorchRec's pipeline batches until the data of all ranks has ended, and a forward."""

    def __init__(
        self,
        model: nn.Module,
        options: PipelineOptions,
        device: torch.device,
        execute_all_batches: bool,
    ) -> None:
        self._model, self._options = model, options
        self._forward = options.custom_model_fwd or model
        self._device, self._execute_all_batches = device, execute_all_batches
        self._losses = Losses(options.loss_reduction)
        self._batches: UntilAllEnd | None = None
        self.num_samples = 0
        """Samples of the last batch, for reports; 0 if they cannot be counted."""

    @classmethod
    def find(cls, model: nn.Module, *arguments: Any) -> StockSteps | None:
        """Returns the steps of a model, by the arguments of this class; ``None`` if any of its
        tables is hot/cold."""
        modules = inner_model(model).modules()
        if any(isinstance(module, HotColdModule) and module.has_hot_cold for module in modules):
            return None
        return cls(model, *arguments)

    def batches(self, batches: Iterator[Any]) -> UntilAllEnd:
        """Returns the batches with empty ones after them; the same object for the same iterator."""
        before = self._batches
        if before is None or before.batches is not batches:
            self._batches = UntilAllEnd(
                batches,
                process_group_of(self._model),
                self._device,
                self._options.split,
                self._execute_all_batches,
                kept=None if before is None else before.kept,
            )
        assert self._batches is not None
        return self._batches

    def forward(self, batch: Any) -> tuple[Any, Any]:
        """Runs the model; the losses of an empty batch, which only fills up, count nothing."""
        losses, output = self._forward(batch)
        may_fill_up = self._batches is not None and self._batches.has_ended
        num_samples = None
        if may_fill_up or self._options.on_step is not None:
            num_samples = count_samples(batch)
            self.num_samples = num_samples or 0
        if not self._model.training:
            return losses, output
        note_reduction(self._model)
        losses = self._losses.checked(losses)
        # a batch whose samples cannot be counted was not cut to none: it is this rank's data
        if num_samples != 0 or not may_fill_up:
            return self._losses.whole(losses), output
        loss = self._losses.stand_in(losses)
        return (loss * 0.0 if loss.requires_grad else no_gradients(self._model)), output

    def forget(self) -> None:
        """Drops a batch that was kept."""
        self._batches = None
