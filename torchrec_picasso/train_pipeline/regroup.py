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

__all__ = ["regroup", "replace_regroups", "restore_regroups"]


def replace_regroups(model: nn.Module, device: torch.device) -> list[KTRegroupAsDict]:
    """Makes :func:`regroup` the forward of a CPU model's regrouping modules; returns these."""
    if device.type != "cpu":
        return []
    replaced = [module for module in model.modules() if type(module) is KTRegroupAsDict]
    for module in replaced:
        module.forward = partial(regroup, module)
    return replaced


def restore_regroups(replaced: list[KTRegroupAsDict]) -> None:
    """Restores the own forward of the modules, once: it empties their list."""
    while replaced:
        vars(replaced.pop()).pop("forward", None)


def regroup(module: KTRegroupAsDict, keyed_tensors: Sequence[KeyedTensor]) -> dict[str, Tensor]:
    """Concatenates columns ``(B, sum of D)`` by key: ``(B, columns of the group)`` each.

    Inputs that the module may refuse are passed to the module itself.
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
