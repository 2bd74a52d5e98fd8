"""Refreshes the hot set under any training loop: one call between steps."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torchrec_picasso.refresh.policy import Refresh
from torchrec_picasso.refresh.refresher import Refreshed, Refresher
from torchrec_picasso.sharding.sharded_module import HotColdModule

__all__ = ["HotRowRefresher"]


class HotRowRefresher:
    """Updates the hot rows of a model to what it looks up, under any pipeline.

    The constructor starts the counting of accesses. In-flight batches of a pipeline get a new
    layout when they are looked up. :class:`~torchrec_picasso.InterleavedTrainPipeline` refreshes by
    itself if it gets ``refresh``.

    Args:
        model: ``DistributedModelParallel``, or any model with hot/cold tables.
        refresh: Interval and thresholds of refreshes; ``None`` = the defaults.
    """

    def __init__(self, model: nn.Module, refresh: Refresh | None = None) -> None:
        self._groups = [
            sharding.group
            for module in model.modules()
            if isinstance(module, HotColdModule)
            for sharding in module.hot_cold_shardings
        ]
        self._refresher = Refresher(self._groups, refresh or Refresh())

    def step(self) -> Refreshed | None:
        """Ends a training step. Collective: all ranks call it after each of their steps.

        Returns:
            The result of a refresh evaluation; ``None`` in steps without one.
        """
        found = self._refresher.step()
        if found is not None and found.num_moved:
            # rows moved; a pipeline may read them on a stream that is not known here
            for device in {group.device for group in self._groups if group.device.type != "cpu"}:
                torch.get_device_module(device).synchronize()
        return found

    def hot_rows(self) -> dict[str, Tensor]:
        """The hot rows by table name, int64, ascending; tables without hot rows are left out."""
        return self._refresher.hot_rows()
