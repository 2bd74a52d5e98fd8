"""Every message that one rank sends, with its type and its peer; what a byte meter adds up.

It listens where :class:`.WireMeter` does, but keeps messages apart, so that a test can tell ids
(integers) from rows and gradients (floats) and count both, whatever code sent them. An all-to-all
is one exchange, whether the backend's own or made of messages.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass(frozen=True)
class Message:
    """Elements that left this rank in one call, to a rank of the group or (-1) to all."""

    kind: str
    dtype: str
    num_elements: int
    peer: int
    to: int = -1
    """The peer by its number among all ranks."""


class MessageRecorder(TorchDispatchMode):
    """Records what is sent inside ``with MessageRecorder() as recorder:``, of one group or all."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self._group = group
        self.messages: list[Message] = []
        self.exchanges: Counter[str] = Counter()
        """Calls by kind; a message to one rank is ``send``."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func.namespace == "c10d":
            kind = func._schema.name.removeprefix("c10d::")
            named = {a.name: v for a, v in zip(func._schema.arguments, args)} | (kwargs or {})
            self._record(kind, named)
        return func(*args, **(kwargs or {}))

    def _record(self, kind: str, call: dict[str, Any]) -> None:
        if kind in ("recv_", "recv_any_source_", "barrier"):
            return
        group = dist.ProcessGroup.unbox(call["process_group"])
        if self._group is not None and group.group_name != self._group.group_name:
            return
        self.exchanges[kind] += 1
        if kind == "send":
            (tensor,) = call["tensors"]
            self._add(kind, tensor, tensor.numel(), call["dst"], group)
        elif kind == "alltoall_base_":
            source, rank = call["input"], group.rank()
            splits = call["input_split_sizes"] or [source.size(0) // group.size()] * group.size()
            width = source.numel() // source.size(0) if source.size(0) else 0
            for peer, num_rows in enumerate(splits):
                if peer != rank and num_rows:
                    self._add(kind, source, num_rows * width, peer, group)
        elif kind in ("allreduce_", "allreduce_coalesced_"):
            for tensor in call["tensors"]:
                self._add(kind, tensor, tensor.numel(), -1, group)
        else:
            raise NotImplementedError(f"MessageRecorder does not know {kind!r}; add it there")

    def _add(
        self, kind: str, tensor: Tensor, num_elements: int, peer: int, group: dist.ProcessGroup
    ) -> None:
        dtype = str(tensor.dtype).removeprefix("torch.")
        to = -1 if peer < 0 else dist.get_global_rank(group, peer)
        self.messages.append(Message(kind, dtype, num_elements, peer, to))


def elements(messages: list[Message], *dtypes: torch.dtype, reduced: bool = False) -> int:
    """Elements of some types, sent to other ranks, or summed over all of them."""
    names = {str(dtype).removeprefix("torch.") for dtype in dtypes}
    return sum(m.num_elements for m in messages if m.dtype in names and (m.peer == -1) is reduced)


def all_to_alls(exchanges: Counter[str], world_size: int) -> float:
    """All-to-alls among counted calls; one made of messages sends to ``W - 1`` peers."""
    return exchanges["alltoall_base_"] + exchanges["send"] / (world_size - 1)
