"""Gives a model back to DistributedDataParallel after training that went around it.

DDP's hooks fire in every backward of the model inside. With ``static_graph``, as TorchRec wraps a
model, they count calls per parameter, and counts from backwards that DDP did not begin make it
leave gradients unreduced later on, without an error. A wrapper made anew counts from zero.
"""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.model_parallel import DistributedModelParallel

__all__ = ["renew_data_parallel"]


def renew_data_parallel(model: nn.Module) -> None:
    """Wraps the inside of a ``DistributedModelParallel`` again, by its own wrapper. Collective.

    Args:
        model: Anything else, or a model that is not wrapped in DDP, is left alone.
    """
    if not isinstance(model, DistributedModelParallel):
        return
    wrapped = model._dmp_wrapped_module
    if isinstance(wrapped, DistributedDataParallel):
        model._dmp_wrapped_module = wrapped.module
        model._data_parallel_wrapper.wrap(model, model._env, model.device)
        model._dmp_wrapped_module.training = wrapped.training
