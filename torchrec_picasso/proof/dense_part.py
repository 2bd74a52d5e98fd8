"""The part of a model outside its sharded modules: listed, copied, restored, and its hooks."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torchrec.distributed.types import ShardedModule

from torchrec_picasso.proof.content import CONTAINERS, Kept, restored_randomness

MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
"""Attributes that every ``nn.Module`` has."""


def outside_of_sharded(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yields a module and its submodules by path, but no submodules of sharded modules. The paths
    begin with ``path``, that of the module itself."""
    yield path, module
    if not isinstance(module, ShardedModule):
        for name, child in module.named_children():
            yield from outside_of_sharded(child, f"{path}.{name}" if path else name)


def dense_modules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields a module and its submodules by path, without sharded modules and their submodules."""
    for path, part in outside_of_sharded(module):
        if not isinstance(part, ShardedModule):
            yield path, part


def dense_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yields the parameters of a module outside its sharded modules, by path."""
    for path, part in dense_modules(module):
        yield from part.named_parameters(path, recurse=False)


def copy_model(model: nn.Module, shared: Iterable[nn.Module] = ()) -> nn.Module:
    """Copies a model except its sharded modules and the ``shared`` ones, which the copy uses too.

    Parameters are copied too: DistributedDataParallel with a static graph counts every gradient
    of a parameter, also in a backward that did not go through DDP. The error of an object that
    cannot be copied is raised.
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


@contextmanager
def without_a_trace(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Restores at its end what the model's forward changes in its dense part.

    This covers buffers, tensors in attributes, the attributes themselves, the lists, dicts, sets
    and deques in them, and the random states of Python, NumPy, the CPU and the device. The state of
    any other object is not restored.
    """
    modules = [module for _, module in dense_modules(model)]
    # the containers that every module has, beside its buffers, are those of its structure
    values = [v for m in modules for n, v in vars(m).items() if n not in MODULE_ATTRIBUTES]
    places = [place for module in modules for place in (vars(module), module._buffers)]
    places += [value for value in values if isinstance(value, CONTAINERS)]
    kept = [Kept("", place) for place in places]
    # the tensor objects stay the same, since others may hold references to them; a tensor of an
    # attribute gets its data back after a write only, which its version shows
    buffers = [b for module in modules for b in module._buffers.values() if b is not None]
    tensors = [value for value in values if isinstance(value, Tensor)]
    data: list[tuple[Tensor, Tensor, int | None]] = [(b, b.detach().clone(), None) for b in buffers]
    data += [(tensor, tensor.detach().clone(), tensor._version) for tensor in tensors]
    try:
        with restored_randomness(device):
            yield
    finally:
        for container in kept:
            if container.has_changed():
                container.restore()
        with torch.no_grad():
            for tensor, saved, version in data:
                if version is None or tensor._version != version:
                    tensor.detach().copy_(saved)


def accumulation_hooks(parameter: Tensor) -> tuple[Node | None, list[Any]]:
    """Finds the node that accumulates a parameter's gradient, and the dictionaries of its hooks.

    A node does not show its hooks. A hook that is registered and removed again reveals the
    dictionary that holds all hooks of its kind; it stays the same while the node lives.
    """
    if not (parameter.requires_grad and parameter.is_leaf):
        return None, []
    node = get_gradient_edge(parameter).node
    kept = []
    for register in (node.register_prehook, node.register_hook):
        handle = register(lambda *gradients: None)
        kept.append(handle.hooks_dict_ref())
        handle.remove()
    return node, kept


def why_parameter_hooked(parameter: Tensor) -> str | None:
    """Describes a hook on a parameter; ``None`` = it has none."""
    if parameter._backward_hooks:
        return "a hook"
    if parameter._post_accumulate_grad_hooks:
        return "a hook after its gradient has come"
    if getattr(parameter, "_in_backward_optimizers", None):
        return "an optimizer in backward"
    if any(accumulation_hooks(parameter)[1]):
        return "a hook on the gradient's accumulation"
    return None


def backward_steps(tensors: Collection[Tensor]) -> Iterator[Node]:
    """Yields each step of the backward of some tensors once."""
    todo, seen = [tensor.grad_fn for tensor in tensors], set[Node]()
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            yield node
            seen.add(node)
            todo += [following for following, _ in node.next_functions]
