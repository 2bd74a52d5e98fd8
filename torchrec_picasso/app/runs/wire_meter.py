"""Counts the collectives and bytes of this rank, of any sharding type, and the kernel's bytes.

The meter intercepts the ``c10d`` operators of the PyTorch dispatcher, which Python calls, autograd
and DDP's C++ reducer all use. It intercepts every tensor operation on the way, which costs time, so
do not time the steps that you count. (A training step itself reports what the exchanges of this
package note, see ``exchange/waiting.py``.)

Bytes follow the usual bandwidth-optimal algorithm of each collective, not the backend's own choice;
protocol headers are not counted. W = world size, all sizes in bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass(frozen=True, kw_only=True)
class WireCount:
    """The communication of one rank, in all and by operator, such as ``alltoall_base_``."""

    num_collectives: int
    """Calls that move tensor data, without barriers. A message to one rank is a call, so an
    all-to-all made of messages counts ``W - 1``."""
    sent_bytes: int
    """Bytes sent to other ranks."""
    calls_by_kind: dict[str, int] = field(default_factory=dict)
    bytes_by_kind: dict[str, int] = field(default_factory=dict)


class WireMeter(TorchDispatchMode):
    """Counts the collectives issued inside ``with WireMeter() as meter:``.

    Collectives of every process group count; groups of one rank send nothing and are skipped. Work
    that another thread issues is seen only if that thread inherited the caller's dispatch modes, as
    autograd's threads do.

    Raises:
        NotImplementedError: If a collective has no known byte count.
    """

    def __init__(self) -> None:
        super().__init__()
        self._calls: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()

    @property
    def count(self) -> WireCount:
        """The calls and bytes counted so far."""
        return WireCount(
            num_collectives=sum(self._calls.values()),
            sent_bytes=sum(self._bytes.values()),
            calls_by_kind=dict(sorted(self._calls.items())),
            bytes_by_kind=dict(sorted(self._bytes.items())),
        )

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Counts ``func`` if it is a collective, then runs it."""
        if func.namespace == "c10d":
            self._record(func, args, kwargs or {})
        # Compiled graphs use functional collectives, which have other arguments.
        elif func.namespace == "_c10d_functional" and "wait" not in func._schema.name:
            raise NotImplementedError(
                f"WireMeter does not see into functional collectives, got {func._schema.name!r}; "
                "count a step that is not compiled"
            )
        return func(*args, **(kwargs or {}))

    def _record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        kind = func._schema.name.removeprefix("c10d::")
        if kind in _NO_DATA:
            return
        if kind not in _KNOWN:
            raise NotImplementedError(
                f"WireMeter cannot tell the bytes of the collective {kind!r}; it knows "
                f"{', '.join(sorted(_KNOWN))}"
            )
        # Arguments by their name in the operator's schema, as the table of byte counts reads them.
        named = {arg.name: value for arg, value in zip(func._schema.arguments, args)} | kwargs
        group = dist.ProcessGroup.unbox(named["process_group"])
        if group.size() == 1:
            return
        self._calls[kind] += 1
        self._bytes[kind] += _sent_bytes(kind, named, group.size(), group.rank())


def _nbytes(tensors: Tensor | Iterable[Any]) -> int:
    if isinstance(tensors, Tensor):
        return tensors.numel() * tensors.element_size()
    return sum(_nbytes(tensor) for tensor in tensors)


def _sent_bytes(kind: str, call: dict[str, Any], world_size: int, rank: int) -> int:
    """Bytes that this rank sends in a collective with the given arguments."""
    if kind == "alltoall_base_":
        source, splits = call["input"], call["input_split_sizes"]
        # Without splits all blocks are equal; otherwise splits count rows of the first dimension.
        if not splits:
            return _nbytes(source) * (world_size - 1) // world_size
        num_rows = sum(splits)
        return _nbytes(source) * (num_rows - splits[rank]) // num_rows if num_rows else 0
    if kind == "alltoall_":
        return _nbytes(call["input_tensors"]) - _nbytes(call["input_tensors"][rank])
    argument, share = _SHARES[kind]
    return share(_nbytes(call[argument]), world_size, call.get("root_rank") == rank)


def _all_reduce(num_bytes: int, world_size: int, is_root: bool) -> int:
    """A ring: reduce-scatter, then all-gather, 2 (W-1)/W n."""
    return 2 * (world_size - 1) * num_bytes // world_size


def _reduce_scatter(num_bytes: int, world_size: int, is_root: bool) -> int:
    """A ring: (W-1)/W of the whole input."""
    return (world_size - 1) * num_bytes // world_size


def _all_gather(num_bytes: int, world_size: int, is_root: bool) -> int:
    """A ring: (W-1)/W of the whole output, which is W inputs."""
    return (world_size - 1) * num_bytes


def _from_root(num_bytes: int, world_size: int, is_root: bool) -> int:
    """The root sends the data once; a chain of ranks forwards it."""
    return num_bytes if is_root else 0


def _one_copy(num_bytes: int, world_size: int, is_root: bool) -> int:
    return num_bytes


_SHARES: dict[str, tuple[str, Callable[[int, int, bool], int]]] = {
    "allreduce_": ("tensors", _all_reduce),
    "_reduce_scatter_base_": ("input_tensor", _reduce_scatter),
    "reduce_scatter_": ("input_tensors", _reduce_scatter),
    "_allgather_base_": ("input_tensor", _all_gather),
    "allgather_": ("input_tensors", _all_gather),
    "broadcast_": ("tensors", _from_root),
    "send": ("tensors", _one_copy),
}
"""Argument that holds the data of a collective, and the bytes that a rank sends of it."""

_KNOWN = {"alltoall_base_", "alltoall_", *_SHARES}
_NO_DATA = {"barrier", "monitored_barrier_", "check_for_nan", "recv_", "recv_any_source_"}

_COUNTERS = Path("/proc/net/dev")
_SENT_BYTES_FIELD = 8  # after the colon: 8 receive fields, then bytes sent


def loopback_sent_bytes() -> int | None:
    """Bytes sent over ``lo`` in this network namespace, headers included; ``None`` if unknown."""
    if not _COUNTERS.is_file():
        return None
    for line in _COUNTERS.read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == "lo":
            return int(counters.split()[_SENT_BYTES_FIELD])
    return None
