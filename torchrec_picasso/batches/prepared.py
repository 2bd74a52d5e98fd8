"""A batch together with its ids, as a data loader read them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torchrec.streamable import Pipelineable

from torchrec_picasso.ops.id_reader import PreparedIds


@dataclass(frozen=True, eq=False)
class PreparedBatch(Pipelineable):
    """A batch and its ids, as read by a :class:`.Preparation`. A pipeline unpacks it: the model
    gets ``batch``. Ids that changed after the preparation are read again."""

    batch: Any
    """The user's batch."""
    plan: str
    """Name of the plan that the ids were read by."""
    ids_of: Mapping[tuple[str, ...], PreparedIds]
    """The ids by the names of the modules whose rows travel together."""

    def to(
        self,
        device: torch.device,
        non_blocking: bool = False,
        data_copy_stream: torch.Stream | None = None,
    ) -> PreparedBatch:
        """Copies batch and ids to a device; as TorchRec, on a stream if one is given."""
        stream = data_copy_stream
        on_stream = {} if stream is None else {"data_copy_stream": stream}
        batch = self.batch.to(device=device, non_blocking=non_blocking, **on_stream)
        with nullcontext() if stream is None else torch.get_device_module(device).stream(stream):
            return self._changed(batch, lambda ids: ids.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> PreparedBatch:
        """Copies batch and ids to pinned memory."""
        pinned = getattr(self.batch, "pin_memory", lambda: self.batch)()
        return self._changed(pinned, Tensor.pin_memory)

    def record_stream(self, stream: torch.Stream) -> None:
        """Records a stream on all memory of batch and ids."""
        self.batch.record_stream(stream)
        for ids in self.ids_of.values():
            ids.values.record_stream(stream)

    def _changed(self, batch: Any, change: Callable[[Tensor], Tensor]) -> PreparedBatch:
        changed = {n: replace(ids, values=change(ids.values)) for n, ids in self.ids_of.items()}
        return replace(self, batch=batch, ids_of=changed)
