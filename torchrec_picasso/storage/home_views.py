"""Home rows as users hold them: parameters and tensors whose ``.data`` counts writes as well.

torch counts writes into a tensor and its views (its version). ``.data`` of a tensor is the same
memory with a count of its own, so a write through it would show nowhere. Here it is a view of one
tensor that the storage keeps and looks at, whenever it was taken and however long it is kept.

``.data`` of what is made from these (``parameter.detach().data``), memory that numpy or a storage
reaches, and ``.data`` of optimizer state stay unseen.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from torchrec_picasso._torchrec import TableBatchedEmbeddingSlice

__all__ = ["HomeParameter", "HomeRows", "HomeSlice"]


class _CountedData:
    """A tensor of home rows, beside the same rows as the storage sees them through ``.data``."""

    _data: Tensor

    def with_data(self, data: Tensor) -> Any:
        """Gives this as ``.data``.

        Args:
            data: The same rows by another count of writes.
        """
        self._data = data
        return self

    @property
    def data(self) -> Tensor:
        """The rows without their graph; writes are counted."""
        return self._data.detach()

    @data.setter
    def data(self, value: Tensor) -> None:  # as nn.Module.to does with what it converted
        torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        if value.data_ptr() != self._data.data_ptr():
            self._data = value.detach()


class HomeSlice(_CountedData, TableBatchedEmbeddingSlice):
    """TorchRec's slice of a TBE."""


class HomeParameter(_CountedData, nn.Parameter):
    """A parameter that is a view of the homes."""


class HomeRows(_CountedData, torch.Tensor):
    """A tensor of a state dict. Whatever is made of it, copied or saved is a plain tensor."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copied: Tensor = copy.deepcopy(self.detach(), memo)
        return memo.setdefault(id(self), copied)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.detach().__reduce_ex__(protocol)
