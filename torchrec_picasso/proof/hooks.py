"""Finds hooks: code that would see activations or gradients of micro-batches."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.nn.modules import module as torch_module

from torchrec_picasso.proof.python_state import dense_modules

__all__ = [
    "accumulation_hooks",
    "hook_dicts",
    "why_backward_is_unknown",
    "why_hooked",
    "why_parameter_hooked",
]

_HOOKS = {
    "_forward_hooks": "forward hook",
    "_forward_pre_hooks": "forward pre-hook",
    "_backward_hooks": "backward hook",
    "_backward_pre_hooks": "backward pre-hook",
}
_GLOBAL_HOOKS = (
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
)
_ADVICE = "it would run once per micro-batch"


def hook_dicts(module: nn.Module, given: Collection[nn.Module]) -> Iterator[tuple[str, Any]]:
    """Yields the dictionaries that hold hooks, each with a description of its hooks.

    Args:
        module: The model.
        given: Sharded modules, whose outputs the proof replaced.
    """
    for name in _GLOBAL_HOOKS:
        yield f"a hook on all modules ({name})", getattr(torch_module, name)
    inside = dict(dense_modules(module, given))
    for path, hooked in {**inside, **_named(module, given)}.items():
        for name, words in _HOOKS.items():
            yield f"a {words} on {path or 'the model'}", vars(hooked)[name]


def _named(module: nn.Module, given: Collection[nn.Module]) -> dict[str, nn.Module]:
    """Maps the paths of the given modules to the modules."""
    return {path: m for path, m in module.named_modules() if any(m is one for one in given)}


def accumulation_hooks(parameter: Tensor) -> tuple[Node, list[Any]] | None:
    """Finds the node that accumulates a parameter's gradient, and the dictionaries of its hooks.

    A node does not show its hooks. A hook that is registered and removed again reveals the
    dictionary that holds all hooks of its kind; it stays the same while the node lives.

    Args:
        parameter: The parameter.

    Returns:
        The node and its dictionaries; ``None`` = the parameter gets no gradient.
    """
    if not (parameter.requires_grad and parameter.is_leaf):
        return None
    node = get_gradient_edge(parameter).node
    kept = []
    for register in (node.register_prehook, node.register_hook):
        handle = register(lambda *gradients: None)
        kept.append(handle.hooks_dict_ref())
        handle.remove()
    return node, kept


def why_hooked(module: nn.Module, given: Collection[nn.Module]) -> str | None:
    """Describes the first hook on a dense module, a given module or a parameter; ``None`` = none.

    Args:
        module: The model.
        given: Sharded modules, whose outputs the proof replaced.
    """
    for words, hooks in hook_dicts(module, given):
        if hooks:
            return f"{words}: {_ADVICE}"
    for path, inside in dense_modules(module, given):
        for name, parameter in inside._parameters.items():
            found = None if parameter is None else why_parameter_hooked(parameter)
            if found is not None:
                return f"{found} on the parameter {f'{path}.{name}' if path else name}: {_ADVICE}"
    return None


def why_parameter_hooked(parameter: Tensor) -> str | None:
    """Describes a hook on a parameter; ``None`` = it has none."""
    if parameter._backward_hooks:
        return "a hook"
    if parameter._post_accumulate_grad_hooks:
        return "a hook after its gradient has come"
    if getattr(parameter, "_in_backward_optimizers", None):
        return "an optimizer in backward"
    accumulation = accumulation_hooks(parameter)
    if accumulation is not None and any(accumulation[1]):
        return "a hook on the gradient's accumulation"
    return None


def why_backward_is_unknown(tensors: Collection[Tensor]) -> str | None:
    """Describes a step of the backward that runs Python code or another library's code.

    Args:
        tensors: Losses, with their graphs.

    Returns:
        A description of the first such step; ``None`` = there is none.
    """
    # walks the whole autograd graph, each node once
    todo = [loss.grad_fn for loss in tensors if loss.grad_fn is not None]
    seen = set(todo)
    while todo:
        node = todo.pop()
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            name = type(node).__name__.removesuffix("Backward")
            if name == "CheckpointFunction":
                return (
                    "a checkpoint with use_reentrant=True, whose backward runs the model again; "
                    "use_reentrant=False can be followed"
                )
            return f"{name}, a torch.autograd.Function whose backward may do anything"
        if "CppNode" in node.name() and "fbgemm" not in node.name():
            return f"{node.name()}, whose backward is not known"
        nexts = [n for n, _ in node.next_functions if n is not None and n not in seen]
        seen.update(nexts)
        todo += nexts
    return None
