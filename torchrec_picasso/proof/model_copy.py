"""Copies a model to run in its place, and reads the state that a run leaves in it."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.distributed.types import ShardedModule

from torchrec_picasso.proof.dense_part import MODULE_ATTRIBUTES, dense_modules, outside_of_sharded
from torchrec_picasso.proof.difference import Tolerance, difference_of

__all__ = ["ModelState", "copy_model"]

_NO_STATE = MODULE_ATTRIBUTES - {"_buffers", "_parameters", "training"}
"""Attributes that are not the model's state."""


def copy_model(model: nn.Module, shared: Iterable[nn.Module] = ()) -> nn.Module:
    """Copies a model except its sharded modules.

    Parameters are copied too: DistributedDataParallel with a static graph counts every gradient
    of a parameter, also in a backward that did not go through DDP.

    Args:
        model: Any model, outside its wrapper.
        shared: Modules that the copy shares with the model, beside sharded ones.

    Returns:
        A model whose runs change nothing in the original.

    Raises:
        Exception: The error of any object that cannot be copied.
    """
    memo: dict[int, Any] = {id(module): module for module in shared}
    # deepcopy takes the objects in memo as already copied
    for _, module in outside_of_sharded(model):
        if isinstance(module, ShardedModule):
            memo[id(module)] = module
            continue
        for value in (*vars(module).values(), *module._buffers.values()):
            if isinstance(value, Tensor) and value.grad_fn is not None:
                memo[id(value)] = value.detach().clone()  # torch copies no tensor with a graph
    return copy.deepcopy(model, memo)


@dataclass(frozen=True)
class ModelState:
    """The state in the dense part of a model.

    Args:
        names: Names of the modules.
        parts: Python attributes of each module, as bytes.
        tensors: Copies of the tensors of each module.
    """

    names: Sequence[str]
    parts: Sequence[bytes]
    tensors: Sequence[Sequence[Tensor]]

    @staticmethod
    def of(model: nn.Module) -> ModelState:
        """Reads the state of a model.

        Raises:
            Exception: The error of any attribute that cannot be pickled.
        """
        modules = dict(dense_modules(model))
        found = [_Bytes.of(module) for module in modules.values()]
        return ModelState(
            [name or "the model" for name in modules],
            [part for part, _ in found],
            [tensors for _, tensors in found],
        )

    def difference(self, other: ModelState, tolerance: Tolerance) -> str | None:
        """Names a module whose state differs from another state's; ``None`` = none does.

        Args:
            other: State of the same model after another run.
            tolerance: Limits of the differences of float tensors.
        """
        for name, one, two, tensors, others in zip(
            self.names, self.parts, other.parts, self.tensors, other.tensors
        ):
            if one != two:
                return f"the attributes of {name} differ after the forward"
            for tensor, its in zip(tensors, others):
                if not _are_close(tensor, its, tolerance):
                    return f"a buffer or tensor of {name} differs after the forward"
        return None


def _are_close(one: Tensor, other: Tensor, tolerance: Tolerance) -> bool:
    """Whether floats differ within the limits; other tensors must be equal."""
    if one.is_floating_point() and one.shape == other.shape and not one.isnan().all():
        return difference_of(one, other, tolerance) is None
    return one.equal(other) or bool(one.isnan().all() and other.isnan().all())


class _Bytes(pickle.Pickler):
    """Pickles attributes; tensors are collected beside the bytes, code and modules are named."""

    def __init__(self, buffer: io.BytesIO) -> None:
        super().__init__(buffer, protocol=pickle.HIGHEST_PROTOCOL)
        self.fast = True  # no memo: equal values are equal bytes, shared or not
        self.tensors: list[Tensor] = []

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            self.tensors.append(value.detach().clone())
            return ("tensor", len(self.tensors))
        if isinstance(value, (type, FunctionType, BuiltinFunctionType, ModuleType)):
            return ("code", id(value))
        if isinstance(value, (nn.Module, torch.distributed.ProcessGroup)):
            return ("module", type(value).__qualname__)
        return None

    @staticmethod
    def of(module: nn.Module) -> tuple[bytes, list[Tensor]]:
        """Returns the attributes of one module as bytes, and the tensors in them."""
        buffer = io.BytesIO()
        writer = _Bytes(buffer)
        writer.dump({k: v for k, v in vars(module).items() if k not in _NO_STATE})
        return buffer.getvalue(), writer.tensors
