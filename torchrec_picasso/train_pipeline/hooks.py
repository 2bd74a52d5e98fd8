"""Finds hooks of the user's that would see micro-batches where they expect the batch."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.distributed._composable.contract import _get_registry

from torchrec_picasso.proof.dense_part import dense_modules
from torchrec_picasso.proof.hooks import why_parameter_hooked
from torchrec_picasso.train_pipeline.data_parallel import wrapper_of
from torchrec_picasso.train_pipeline.model_parts import inner_model

__all__ = ["on_wrappers", "why_whole_batches"]


def why_whole_batches(model: nn.Module) -> str | None:
    """Names a hook that micro-batches would call K times, with partial gradients or losses.

    The search covers hooks on gradients of dense parameters and modules, hooks on the wrappers, and
    ``replicate()``, which reduces gradients in hooks. Forward hooks inside the model are a part of
    its forward.

    Args:
        model: The model that was passed to the pipeline.

    Returns:
        A reason; ``None`` = there is no such hook.
    """
    return on_wrappers(model) or next(_inside(model), None)


def on_wrappers(model: nn.Module) -> str | None:
    """Names a wrapper around the model that has a hook; ``None`` = there is none."""
    inner = inner_model(model)
    for wrapper in (model, wrapper_of(model)):
        if wrapper is None or wrapper is inner:
            continue
        if wrapper._forward_hooks or wrapper._forward_pre_hooks or _hooks_backward(wrapper):
            return f"a hook is registered on the {type(wrapper).__name__} around the model"
    return None


def _inside(model: nn.Module) -> Iterator[str]:
    """Yields descriptions of hooks on gradients inside the wrappers."""
    for path, module in dense_modules(inner_model(model)):
        where = path or "the model"
        if _hooks_backward(module):
            yield f"a backward hook is registered on {where}"
        if "replicate" in (_get_registry(module) or {}):
            yield f"replicate() was applied to {where}"
        for name, parameter in module.named_parameters(path, recurse=False):
            if why_parameter_hooked(parameter) is not None:
                yield f"a gradient hook is registered on parameter {name}"


def _hooks_backward(module: nn.Module) -> bool:
    return bool(module._backward_hooks or module._backward_pre_hooks)
