"""Finds hooks and backward steps whose code would see activations or gradients of micro-batches."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

__all__ = [
    "ADVICE",
    "GLOBAL_HOOKS",
    "HOOKS",
    "accumulation_hooks",
    "why_backward_is_unknown",
    "why_parameter_hooked",
]

HOOKS = {
    "_forward_hooks": "forward hook",
    "_forward_pre_hooks": "forward pre-hook",
    "_backward_hooks": "backward hook",
    "_backward_pre_hooks": "backward pre-hook",
}
"""Attributes of a module that hold hooks."""
GLOBAL_HOOKS = tuple(f"_global{name}" for name in HOOKS)
"""Names in ``torch.nn.modules.module`` of hooks on all modules."""
ADVICE = "it would run once per micro-batch"


def accumulation_hooks(parameter: Tensor) -> tuple[Node, list[Any]] | None:
    """Finds the node that accumulates a parameter's gradient, and the dictionaries of its hooks.

    A node does not show its hooks. A hook that is registered and removed again reveals the
    dictionary that holds all hooks of its kind; it stays the same while the node lives. ``None`` =
    the parameter gets no gradient.
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
    """Describes a step of the losses' backward that runs Python code or an unknown library's."""
    # walks the whole autograd graph, each node once
    todo = [loss.grad_fn for loss in tensors if loss.grad_fn is not None]
    seen = set(todo)
    while todo:
        node = todo.pop()
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            name = type(node).__name__.removesuffix("Backward")
            advice = "; use_reentrant=False can be followed" if name.startswith("Checkp") else ""
            return f"{name}, a torch.autograd.Function whose backward may do anything{advice}"
        if "CppNode" in node.name() and "fbgemm" not in node.name():
            return f"{node.name()}, whose backward is not known"
        nexts = [n for n, _ in node.next_functions if n is not None and n not in seen]
        seen.update(nexts)
        todo += nexts
    return None
