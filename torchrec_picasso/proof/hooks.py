"""Hooks: code that sees activations or gradients of micro-batches where it saw a batch's."""

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
    """What hooks are kept in, each with words for what it holds."""
    for name in _GLOBAL_HOOKS:
        yield f"a hook on all modules ({name})", getattr(torch_module, name)
    inside = dict(dense_modules(module, given))
    for path, of in {**inside, **_named(module, given)}.items():
        for name, words in _HOOKS.items():
            yield f"a {words} on {path or 'the model'}", vars(of)[name]


def _named(module: nn.Module, given: Collection[nn.Module]) -> dict[str, nn.Module]:
    return {path: of for path, of in module.named_modules() if any(of is one for one in given)}


def accumulation_hooks(parameter: Tensor) -> tuple[Node, list[Any]] | None:
    """The node that adds up a parameter's gradient, and what its hooks of Python are kept in.

    A node does not show its hooks; a hook that is registered and removed again does, since all
    hooks of a kind are in one dictionary. The dictionaries stay the same as long as the node lives.

    Args:
        parameter: ``None`` is returned for one without gradients.
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
    """The first hook on a dense module, on a given one or on a parameter."""
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
    """What is hooked on a parameter, in words."""
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
    """A step of the backward that Python code takes, or code of another library.

    Args:
        tensors: Losses, with their graphs.
    """
    todo = [of.grad_fn for of in tensors if of.grad_fn is not None]
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
        nexts = [of for of, _ in node.next_functions if of is not None and of not in seen]
        seen.update(nexts)
        todo += nexts
    return None
