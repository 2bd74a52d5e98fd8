"""Home rows for users: parameters and tensors that count writes through ``.data`` as well.

torch counts writes into a tensor and its views in a version counter. ``.data`` of a tensor shares
the memory but has its own counter, so a write through it would not be detected. Here ``.data`` is a
view of one tensor that the storage keeps and whose counter it checks; the view may be taken at any
time and kept for any time.

Writes through ``.data`` of derived tensors (``parameter.detach().data``), through numpy or a
storage, and through ``.data`` of optimizer state are not detected.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from torchrec_picasso._torchrec import TableBatchedEmbeddingSlice

__all__ = ["HomeParameter", "HomeRows", "HomeSlice"]


class _CountedData:
    """A tensor of home rows, paired with the view that its ``.data`` returns."""

    _data: Tensor

    def with_data(self, data: Tensor) -> Any:
        """Sets the view of the same rows whose version counter the storage checks."""
        self._data = data
        return self

    @property
    def data(self) -> Tensor:
        """The rows without their graph; writes are counted."""
        return self._data.detach()

    @data.setter
    def data(self, value: Tensor) -> None:  # nn.Module.to assigns converted tensors
        torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        # Other memory: the rows were moved, so the old view would describe the old memory.
        if value.data_ptr() != self._data.data_ptr():
            self._data = value.detach()


class HomeSlice(_CountedData, TableBatchedEmbeddingSlice):
    """TorchRec's slice of a TBE, with counted ``.data``."""


class HomeParameter(_CountedData, nn.Parameter):
    """A parameter that is a view of the home rows."""


class HomeRows(_CountedData, torch.Tensor):
    """A tensor of a state dict. Results of operations, copies and saved files are plain tensors."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copied: Tensor = copy.deepcopy(self.detach(), memo)
        return memo.setdefault(id(self), copied)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.detach().__reduce_ex__(protocol)
