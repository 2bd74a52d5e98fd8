"""A device that is not there: what the library asks of it is counted by the line that asks.

Tensors live in the CPU's memory and say that they are on ``meta`` (a build for the CPU has no other
device that it can guard), so the code takes the paths of an accelerator and values are real.
Known by it: launches, host syncs, copies, operators that mix devices. Not known: time, streams,
what a kernel of a real device computes.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._C import _disabled_torch_function_impl
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import torchrec_picasso
from torchrec_picasso.ops import streams
from torchrec_picasso.ops.ids import PackedTable

CPU, DEVICE = torch.device("cpu"), torch.device("meta")
_LIBRARY = str(Path(torchrec_picasso.__file__).parent)
_TESTS = str(Path(__file__).parents[1])

_FREE = (
    "empty",
    "new_empty",
    "view",
    "detach",
    "alias",
    "lift",
    "split",
    "_reshape_alias",
    "record_stream",
)
_KERNELS = {
    **dict.fromkeys(("sort", "argsort", "permute_1D_sparse_data", "unique_dim", "_unique2"), 6),
    **dict.fromkeys(("nonzero", "nonzero_static", "masked_select", "masked_scatter_"), 4),
    **dict.fromkeys(("cumsum", "cumsum_", "cummax", "asynchronous_complete_cumsum"), 2),
}
"""Kernels of an operator, where it is not one (of ``aten`` and FBGEMM on CUDA, read)."""
UPDATE = 27
"""Kernels of an update by FBGEMM's TBE."""
_READS = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "bincount", "equal")


class OnDevice(Tensor):
    """A tensor of the device: ``held`` is its memory."""

    held: Tensor
    is_meta = False  # TorchRec makes lengths up for tensors without memory
    __torch_function__ = _disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held: Tensor) -> OnDevice:
        size = held.shape, held.stride(), held.storage_offset()
        made = Tensor._make_wrapper_subclass(cls, *size, dtype=held.dtype, device=DEVICE)
        self: OnDevice = made
        self.held = held
        return self

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __repr__(self, **_: Any) -> str:
        return f"on_device({self.held})"


def on_device(value: Any) -> Any:
    """The same memory as a tensor of the device; of a tensor, or within any object."""
    if isinstance(value, Tensor):
        return value if isinstance(value, OnDevice) else OnDevice(value)
    if isinstance(value, PackedTable):
        return value  # plans stay on the host
    if isinstance(value, dict):
        return {key: on_device(member) for key, member in value.items()}
    if isinstance(value, (list, tuple)):
        moved = [on_device(item) for item in value]
        return type(value)(*moved) if hasattr(value, "_fields") else type(value)(moved)
    if isinstance(value, torch.device):
        return DEVICE
    if type(value).__module__.startswith("torchrec_picasso"):
        for name, member in vars(value).items():
            if (moved := on_device(member)) is not member:
                object.__setattr__(value, name, moved)
    return value


def on_host(value: Any) -> Any:
    """The memory of every tensor in a tree."""
    return tree_map(lambda leaf: leaf.held if isinstance(leaf, OnDevice) else leaf, value)


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    leaves = tree_leaves((args, kwargs))
    held = {id(leaf.held): leaf for leaf in leaves if isinstance(leaf, OnDevice)}
    device = kwargs.get("device") or (DEVICE if held else CPU)
    if "device" in kwargs:
        kwargs = {**kwargs, "device": CPU}
    if "pin_memory" in kwargs:
        kwargs = {**kwargs, "pin_memory": False}
    if func is torch.ops.aten.copy_.default and not isinstance(args[0], OnDevice):
        device = CPU
    result = func(*on_host(args), **on_host(kwargs))
    if device == CPU:
        return result
    return tree_map(
        lambda leaf: (
            held.get(id(leaf), leaf)
            if id(leaf) in held
            else (OnDevice(leaf) if isinstance(leaf, Tensor) else leaf)
        ),
        result,
    )


class PretendedDevice(TorchDispatchMode):
    """Within it there is the device, and what it is asked for is noted."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: Counter[str] = Counter()
        """By line of the library."""
        self.syncs: Counter[str] = Counter()
        self.copies: Counter[str] = Counter()
        """From the host to the device."""
        self.mixed: Counter[str] = Counter()
        """Operators with tensors of both."""
        self.operators: Counter[tuple[str, str]] = Counter()
        """By function of the library and operator."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        is_here = any(isinstance(leaf, OnDevice) for leaf in leaves)
        if is_here or kwargs.get("device") == DEVICE:
            place = _place()
            if place is not None:
                self._note(func, args, kwargs, leaves, is_here, place)
        return _run(func, args, kwargs)

    def note(self, launches: int) -> None:
        """Counts launches of what is not an operator."""
        if (place := _place(is_told=True)) is not None:
            self.launches[place] += launches

    def _note(
        self, func: Any, args: Any, kwargs: Any, leaves: list[Any], is_here: bool, place: str
    ) -> None:
        name = func._schema.name.split("::")[1]
        if func.is_view or name.startswith(_FREE):
            return
        self.operators[place.split()[1], name] += 1
        others = [x for x in leaves if isinstance(x, Tensor) and not isinstance(x, OnDevice)]
        masks = 0
        if name in ("index", "index_put_", "index_put"):
            masks = sum(x is not None and x.dtype == torch.bool for x in args[1])
        if name in ("copy_", "_to_copy"):
            target = kwargs.get("device") or (DEVICE if is_here else CPU)
            if name == "copy_":
                target = args[0].device
            if target == CPU:
                self.syncs[place] += 1
            elif others or not is_here:
                self.copies[place] += 1
        elif any(other.dim() for other in others):
            self.mixed[f"{place} {func}"] += 1
        sized = name == "repeat_interleave" and kwargs.get("output_size") is not None
        if name in _READS or masks or (name == "repeat_interleave" and not sized):
            self.syncs[place] += 1
        self.launches[place] += _KERNELS.get(name, 1) + 4 * masks

    @property
    def totals(self) -> tuple[int, int, int]:
        """Launches, host syncs, copies from the host."""
        launches, syncs, copies = self.launches, self.syncs, self.copies
        return launches.total(), syncs.total(), copies.total()

    def table(self, most: int = 15) -> str:
        """The lines that most launches come from, and every one that waits."""
        rows = ["{:>9}{:>7}{:>8}  line".format("launches", "syncs", "copies")]
        places = {place for place, _ in self.launches.most_common(most)} | {*self.syncs}
        for place in sorted(places, key=lambda place: -self.launches[place]):
            counts = self.launches[place], self.syncs[place], self.copies[place]
            rows.append("{:9}{:7}{:8}  {}".format(*counts, place))
        return "\n".join([*rows, "{:9}{:7}{:8}  in all".format(*self.totals)])


def _place(is_told: bool = False) -> str | None:
    """The innermost line of the library; ``None`` for what tests do themselves."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(_LIBRARY):
            return f"{path[len(_LIBRARY) + 1 :]}:{frame.f_lineno} {frame.f_code.co_name}"
        if path.startswith(_TESTS) and path != __file__ and not is_told:
            return None
        frame = frame.f_back
    return None


@contextmanager
def in_place_of_the_device() -> Iterator[None]:
    """Nobody asks for streams of the device."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streams, "_current_stream", lambda device: None)
        yield
