"""Makes DistributedDataParallel reduce dense gradients once per step, under micro-batches too.

A step of one micro-batch calls the wrapper and runs one backward, as any training loop does: all
features of the wrapper (communication hooks, buffers, a static graph, optimizers in backward) work
as usual. A step of K micro-batches runs K forwards and K backwards. The forwards run under
``no_sync``, and the last backward is announced to the wrapper's reducer, as in the schedules of
``torch.distributed.pipelining``. Gradients thus add up, and DDP reduces their sums once.

Work that DDP does per forward or per backward cannot be shared this way: see
:func:`why_one_backward`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.model_parallel import DistributedModelParallel

from torchrec_picasso.exchange.waiting import is_watched, note_all_reduce

_TABLES = (nn.Embedding, nn.EmbeddingBag)


def wrapper_of(model: nn.Module) -> DistributedDataParallel | None:
    """Finds the wrapper that reduces a ``DistributedModelParallel``'s dense gradients. TorchRec's
    pipelines reduce no gradients themselves, so without a wrapper nothing does."""
    wrapped = model._dmp_wrapped_module if isinstance(model, DistributedModelParallel) else None
    return wrapped if isinstance(wrapped, DistributedDataParallel) else None


def why_one_backward(model: nn.Module) -> str | None:
    """Reason why the wrapper needs one forward and one backward per step; ``None`` = none."""
    wrapper = wrapper_of(model)
    if wrapper is None:
        return None
    if any(hasattr(each, "_in_backward_optimizers") for each in wrapper._module_parameters):
        return "dense parameters have optimizers that step in backward"
    if wrapper.find_unused_parameters and not wrapper.static_graph:
        return "DistributedDataParallel looks for unused parameters in every backward"
    if wrapper.mixed_precision is not None:
        return "DistributedDataParallel casts parameters in every forward (mixed_precision)"
    if any(isinstance(m, _TABLES) and m.sparse for m in wrapper.module.modules()):
        return "DistributedDataParallel reduces sparse gradients of a table in the dense part"
    if wrapper._delay_all_reduce_params:
        return "DistributedDataParallel delays the reduction of some parameters"
    return None


def records_static_graph(model: nn.Module) -> bool:
    """Whether the next backward is the one in which the wrapper records its static graph.

    In that backward the wrapper counts how often each parameter gets a gradient, so it must be one
    of a whole batch.
    """
    wrapper = wrapper_of(model)
    if wrapper is None or not wrapper.static_graph:
        return False
    return not wrapper._static_graph_delay_allreduce_enqueued


def without_reduction(model: nn.Module) -> AbstractContextManager[None]:
    """In this context, forwards of the model do not prepare the wrapper for a backward."""
    wrapper = wrapper_of(model)
    return nullcontext() if wrapper is None else wrapper.no_sync()


@contextmanager
def instead_of_wrapped(model: nn.Module, module: nn.Module) -> Iterator[None]:
    """In this context, a ``DistributedModelParallel`` calls ``module``, which has no wrapper."""
    assert isinstance(model, DistributedModelParallel)
    wrapped = model._dmp_wrapped_module
    model._dmp_wrapped_module = module
    try:
        yield
    finally:
        model._dmp_wrapped_module = wrapped


def announce_last_backward(model: nn.Module) -> None:
    """Makes the wrapper reduce gradients in the next backward, unless its user set ``no_sync``."""
    wrapper = wrapper_of(model)
    if wrapper is None or not wrapper.require_backward_grad_sync:
        return
    # what DDP.forward does before a backward with reduction
    wrapper.require_forward_param_sync = True
    wrapper.reducer.prepare_for_forward()
    wrapper.reducer.prepare_for_backward([])


def note_reduction(model: nn.Module) -> None:
    """Counts the bytes of a reduction, if a step report counts bytes."""
    wrapper = wrapper_of(model)
    if is_watched() and wrapper is not None and wrapper.require_backward_grad_sync:
        num_bytes = sum(parameter.nbytes for parameter in wrapper._module_parameters)
        note_all_reduce(num_bytes, wrapper.process_group.size())


def no_gradients(model: nn.Module) -> Tensor:
    """Makes a loss of 0 that gives every reduced parameter a gradient of 0."""
    wrapper = wrapper_of(model)
    parameters = [] if wrapper is None else wrapper._module_parameters
    terms = [parameter.sum() * 0.0 for parameter in parameters]
    return torch.stack(terms).sum() if terms else torch.zeros((), requires_grad=True)
