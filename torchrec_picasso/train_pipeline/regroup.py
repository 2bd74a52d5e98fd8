"""Regroups pooled columns for their consumers in one copy, in place of FBGEMM's CPU operator.

A model regroups columns with TorchRec's ``KTRegroupAsDict``. On the CPU FBGEMM's operator behind it
takes tens of times as long as a copy, for any order of the columns; with 130 fields that is more
than all the rest of a step. On the CPU the columns are therefore concatenated by name; backward is
that of the concatenation.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torchrec.modules.regroup import KTRegroupAsDict
from torchrec.sparse.jagged_tensor import KeyedTensor

__all__ = ["Regroups", "regroup"]


class Regroups:
    """The regrouping modules of a model whose forward is replaced.

    Args:
        taken: The modules; from now on their forward is :func:`regroup`.
    """

    def __init__(self, taken: Sequence[KTRegroupAsDict] = ()) -> None:
        self._taken = taken
        for module in taken:
            module.forward = partial(regroup, module)

    @staticmethod
    def find(model: nn.Module, device: torch.device) -> Regroups:
        """Finds the modules of a model on the CPU; on other devices none.

        Args:
            model: The model.
            device: Device of the model.
        """
        if device.type != "cpu":
            return Regroups()
        return Regroups([m for m in model.modules() if type(m) is KTRegroupAsDict])

    def release(self) -> None:
        """Restores the modules' own forward."""
        for module in self._taken:
            vars(module).pop("forward", None)
        self._taken = ()


def regroup(module: KTRegroupAsDict, keyed_tensors: Sequence[KeyedTensor]) -> dict[str, Tensor]:
    """Computes the result of a regrouping module by concatenation.

    Args:
        module: The module, which has the groups.
        keyed_tensors: The columns, ``(B, sum of D)`` each.

    Returns:
        The columns of each group by key, ``(B, columns of the group)``. Inputs that the module may
        refuse are passed to the module itself.
    """
    columns: dict[str, Tensor] = {}
    num_columns = 0
    for keyed in keyed_tensors:
        if keyed.key_dim() != 1:
            return KTRegroupAsDict.forward(module, keyed_tensors)
        found = keyed.to_dict()
        columns |= found
        num_columns += len(found)
    groups = module._groups
    # a name twice, an empty group or an unknown column: the module decides
    if len(columns) != num_columns or not all(
        group and columns.keys() >= set(group) for group in groups
    ):
        return KTRegroupAsDict.forward(module, keyed_tensors)
    values = [torch.cat([columns[name] for name in group], dim=1) for group in groups]
    return dict(zip(module._keys, module.embedding_cast(values)))
