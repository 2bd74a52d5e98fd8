"""How the pipeline goes around DistributedDataParallel, and gives the model back to it.

DDP reduces in every backward and expects one forward before it; a step of K micro-batches has K of
each. So the pipeline calls the model inside, and reduces the gradients itself: exactly those that
DDP would reduce. DDP's hooks fire all the same in every backward of the model inside. With
``static_graph``, as TorchRec wraps a model, they count calls per parameter, and counts from
backwards that DDP did not begin make it leave gradients unreduced later on, without an error. A
wrapper made anew counts from zero.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.model_parallel import DistributedModelParallel

__all__ = ["around_data_parallel", "reduced_elsewhere", "renew_data_parallel", "wrapper_of"]


def wrapper_of(model: nn.Module) -> DistributedDataParallel | None:
    """The wrapper that reduces a ``DistributedModelParallel``'s dense gradients; ``None`` = none.

    TorchRec's pipelines reduce nothing themselves, so without it nobody does.
    """
    wrapped = model._dmp_wrapped_module if isinstance(model, DistributedModelParallel) else None
    return wrapped if isinstance(wrapped, DistributedDataParallel) else None


def reduced_elsewhere(model: nn.Module) -> Collection[str]:
    """Names of parameters that the wrapper was told to leave to others."""
    wrapper = wrapper_of(model)
    return frozenset() if wrapper is None else frozenset(wrapper.parameters_to_ignore)


@contextmanager
def around_data_parallel(model: nn.Module) -> Iterator[None]:
    """Within it, a call of the model is one of the model inside DDP."""
    wrapper = wrapper_of(model)
    if wrapper is None:
        yield
        return
    model._dmp_wrapped_module = wrapper.module
    try:
        yield
    finally:
        model._dmp_wrapped_module = wrapper


def renew_data_parallel(model: nn.Module) -> None:
    """Wraps the inside of a ``DistributedModelParallel`` again, by its own wrapper. Collective.

    Args:
        model: Anything else, or a model that is not wrapped in DDP, is left alone.
    """
    wrapper = wrapper_of(model)
    if wrapper is None or not isinstance(model, DistributedModelParallel):
        return
    model._dmp_wrapped_module = wrapper.module
    model._data_parallel_wrapper.wrap(model, model._env, model.device)
    model._dmp_wrapped_module.training = wrapper.training
