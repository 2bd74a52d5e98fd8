"""Tensors that only say they are on a GPU: where the code looks at a device, it takes that path.

Memory and operators are the CPU's, so values are real. What would make the host wait for a device
is noted: a value read, or a result whose size only its values tell.
"""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
_READS = {
    *(Tensor.tolist, Tensor.item, Tensor.cpu, Tensor.__bool__, Tensor.__int__, Tensor.__float__),
    *(Tensor.__index__, Tensor.nonzero, torch.nonzero, Tensor.unique, torch.unique),
    *(Tensor.masked_select, torch.masked_select),
}


class _OnGpu(Tensor):
    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return GPU

    def numpy(self, **kwargs: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")


def on_device(tensor: Tensor | None) -> Any:
    """The same memory as a tensor that says it is on the GPU."""
    return None if tensor is None else tensor.as_subclass(_OnGpu)


class PretendedDevice(TorchFunctionMode):
    """Within it a GPU may be asked for, and waits of the host are noted."""

    def __init__(self) -> None:
        super().__init__()
        self.syncs: list[str] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = (args, kwargs or {})
        devices = [leaf for leaf in tree_leaves(given) if isinstance(leaf, torch.device)]
        if func in _READS and any(isinstance(leaf, _OnGpu) for leaf in tree_leaves(given)):
            self.syncs.append(func.__name__)
        if func is Tensor.pin_memory:
            return args[0]
        args, kwargs = tree_map(lambda leaf: CPU if leaf == GPU else leaf, given)
        result = func(*args, **kwargs)
        if GPU in devices:
            return tree_map(
                lambda leaf: on_device(leaf) if isinstance(leaf, Tensor) else leaf, result
            )
        if func is Tensor.cpu or (func is Tensor.to and CPU in devices):
            return result.as_subclass(Tensor)
        return result
