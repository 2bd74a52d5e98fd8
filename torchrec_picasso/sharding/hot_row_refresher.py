"""Changes of the hot set where no pipeline of this package trains: one call between steps."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torchrec_picasso.options.refresh import Refresh
from torchrec_picasso.refresh.refresher import Refreshed, Refresher
from torchrec_picasso.rows.group import RowGroup
from torchrec_picasso.sharding.sharded_module import HotColdModule
from torchrec_picasso.sharding.table_sharding import HotColdEmbeddingSharding

__all__ = ["HotRowRefresher"]


class HotRowRefresher:
    """Lets the hot rows of a model follow what it looks up, under any pipeline.

    Counting begins here. Batches that a pipeline has in flight are laid out anew when they are
    looked up. :class:`~torchrec_picasso.InterleavedTrainPipeline` does this by itself where it is
    given ``refresh``.

    Args:
        model: ``DistributedModelParallel``, or any model with hot/cold tables.
        refresh: When, and how readily.
    """

    def __init__(self, model: nn.Module, refresh: Refresh | None = None) -> None:
        self._groups = _groups_of(model)
        self._refresher = Refresher(self._groups, refresh or Refresh())

    def step(self) -> Refreshed | None:
        """Ends a training step. Collective: all ranks call it after each of their steps.

        Returns:
            What came of a look at the hot set; ``None`` in steps without one.
        """
        found = self._refresher.step()
        if found is not None and found.num_moved:
            for device in {group.device for group in self._groups if group.device.type != "cpu"}:
                torch.get_device_module(device).synchronize()  # whose streams read it is not known
        return found

    def hot_rows(self) -> dict[str, Tensor]:
        """The hot rows of each table by name, ascending int64; tables without any are left out."""
        return self._refresher.hot_rows()


def _groups_of(model: nn.Module) -> list[RowGroup]:
    """The hot/cold tables of a model, a group for each module."""
    return [
        sharding.group
        for module in model.modules()
        if isinstance(module, HotColdModule)
        for sharding in module.table_shardings()
        if isinstance(sharding, HotColdEmbeddingSharding)
    ]
