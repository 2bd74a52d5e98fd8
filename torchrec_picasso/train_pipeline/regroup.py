"""Pooled columns in the order of their consumers, in one copy, where a model says so.

A model says so by TorchRec's ``KTRegroupAsDict``. On the CPU FBGEMM's operator behind it takes tens
of times as long as a copy, in whatever order the columns come; with 130 fields that is more than
all the rest of a step. There the columns are put together by name instead, backward as well.
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
    """The regrouping modules of a model, until they are given back.

    Args:
        taken: Those that run :func:`regroup` from now on.
    """

    def __init__(self, taken: Sequence[KTRegroupAsDict] = ()) -> None:
        self._taken = taken
        for module in taken:
            module.forward = partial(regroup, module)

    @staticmethod
    def of(model: nn.Module, device: torch.device) -> Regroups:
        """Takes over those of a model that runs on the CPU; elsewhere none."""
        if device.type != "cpu":
            return Regroups()
        return Regroups([of for of in model.modules() if type(of) is KTRegroupAsDict])

    def give_back(self) -> None:
        """Gives them their own forward again."""
        for module in self._taken:
            vars(module).pop("forward", None)
        self._taken = ()


def regroup(module: KTRegroupAsDict, keyed_tensors: Sequence[KeyedTensor]) -> dict[str, Tensor]:
    """What a regrouping module gives, by concatenation.

    Args:
        module: Says the groups.
        keyed_tensors: Have their columns.

    Returns:
        As the module: by key ``(B, columns of the group)``. Where it may refuse, it is asked.
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
    if len(columns) != num_columns or not all(
        group and columns.keys() >= set(group) for group in groups
    ):
        return KTRegroupAsDict.forward(module, keyed_tensors)
    values = [torch.cat([columns[name] for name in group], dim=1) for group in groups]
    return dict(zip(module._keys, module.embedding_cast(values)))
