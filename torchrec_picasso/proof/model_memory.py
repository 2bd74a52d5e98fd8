"""Runs a model and then restores the state that its forward changed.

A forward may change buffers (running statistics), attributes of modules (a count, the last loss)
and random states. An attribute of a module is restored if it is a tensor, a plain value, a list, a
dict or a set; the state of an object inside one of these is not.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from torchrec_picasso.batches.split import PLAIN_TYPES
from torchrec_picasso.proof.dense_part import MODULE_ATTRIBUTES, dense_modules

__all__ = ["without_a_trace"]

_NOT_RESTORED = MODULE_ATTRIBUTES - {"training"}


@contextmanager
def without_a_trace(model: nn.Module, device: torch.device) -> Iterator[None]:
    """In this context the model may run; its state is restored at the end.

    Sharded modules inside the model are neither saved nor restored.

    Args:
        model: Any model.
        device: Device on which the model draws random numbers, beside the CPU.
    """
    modules = [module for _, module in dense_modules(model)]
    buffers = [
        (module, name, buffer, None if buffer is None else buffer.clone())
        for module in modules
        for name, buffer in module._buffers.items()
    ]
    attributes = [(module, _attributes(module)) for module in modules]
    states = random.getstate(), np.random.get_state()
    devices = [] if device.type == "cpu" else [device]
    try:
        with torch.random.fork_rng(devices=devices, device_type=_device_type(device)):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        with torch.no_grad():
            # the tensor objects stay the same: others may hold references to them
            for module, name, buffer, saved in buffers:
                module._buffers[name] = buffer
                if buffer is not None and saved is not None:
                    buffer.copy_(saved)
            for module, found in attributes:
                _put_back(module, found)


def _device_type(device: torch.device) -> str:
    """A device type that ``fork_rng`` accepts, even if it forks only the CPU's state."""
    return "cuda" if device.type == "cpu" else device.type


@dataclass(frozen=True)
class _Attribute:
    """An attribute and a copy of its content."""

    value: Any
    content: Any
    version: int = 0

    def put_back(self) -> None:
        """Restores the content, in the same object."""
        if isinstance(self.value, Tensor):
            # a copy only after a write: an unchanged version counter means unchanged data
            if self.value._version != self.version:
                self.value.detach().copy_(self.content)
        elif isinstance(self.value, list):
            self.value[:] = self.content
        elif isinstance(self.value, (dict, set)):
            self.value.clear()
            self.value.update(self.content)


_Attributes = dict[str, _Attribute | None]
"""Attributes by name; ``None`` = an attribute that is not restored."""


def _attributes(module: nn.Module) -> _Attributes:
    """Copies the attributes of one module that can be restored."""
    found: _Attributes = {}
    for name, value in vars(module).items():
        if name in _NOT_RESTORED:
            continue
        found[name] = None
        if isinstance(value, Tensor):
            found[name] = _Attribute(value, value.detach().clone(), value._version)
        elif isinstance(value, (list, dict, set)):
            found[name] = _Attribute(value, value.copy())
        elif isinstance(value, PLAIN_TYPES):
            found[name] = _Attribute(value, None)
    return found


def _put_back(module: nn.Module, found: _Attributes) -> None:
    """Restores the attributes of one module, and deletes those that are new."""
    for name in vars(module).keys() - found.keys() - _NOT_RESTORED:
        del vars(module)[name]
    for name, attribute in found.items():
        if attribute is not None:
            attribute.put_back()
            vars(module)[name] = attribute.value
