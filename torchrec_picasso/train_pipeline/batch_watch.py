"""Finds writes of a model into its batch while inputs of tables are made ahead.

The model's forward makes the inputs again, so it would write a second time.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchrec_picasso.batches.members import arguments_of, children_of
from torchrec_picasso.errors import CompatError

WRITES = "writes into the batch"
"""Reason of a refusal."""

_BESIDE_VERSIONS = (
    *("data", "numpy", "__array__", "__dlpack__", "data_ptr", "untyped_storage", "storage"),
    *("apply_", "map", "_foreach_", "_fused_"),
)
"""Beginnings of the names of functions that write, or let others write, without a new version."""


class WrittenBatchError(CompatError):
    """The model wrote into a batch, or into a micro-batch, which is a view of it."""


class BatchWatch:
    """Tells whether a batch, or a micro-batch, has been written since this object was made."""

    def __init__(self, batch: Any) -> None:
        self._batch = batch
        # an array has no version, so its content is kept; not that of a file
        self._members = {
            path: value.copy() if type(value) is np.ndarray else value
            for path, value in _members_of(batch)
        }
        self._tensors = [each for each in self._members.values() if isinstance(each, Tensor)]
        # asked once; a version is read after each function of the model
        self._versioned = [each for each in self._tensors if not each.is_inference()]
        self._versions = [each._version for each in self._versioned]
        self._copies: list[Tensor] | None = None

    def note(self, function: Any) -> None:
        """Notes a function of PyTorch that is about to be called; copies the batch if the function
        may lead to a write without a new version."""
        name = getattr(function, "__name__", "")
        if name in ("__get__", "__set__"):
            name = getattr(function.__self__, "__name__", "")
        if self._copies is None and name.startswith(_BESIDE_VERSIONS):
            self.keep_copies()

    def keep_copies(self) -> None:
        """Copies the batch, to find writes by its content; of tensors that are not dense versions
        tell."""
        self._copies = [each.clone() if _is_dense(each) else each for each in self._tensors]

    def is_written(self) -> bool:
        """Whether a tensor was written; without copies by versions, in microseconds."""
        if [each._version for each in self._versioned] != self._versions:
            return True
        return self._copies is not None and not all(map(_are_equal, self._tensors, self._copies))

    def is_replaced(self) -> bool:
        """Whether another value is in the place of a member, or an array was written; takes longer.
        New members, such as a result that the batch keeps, replace nothing."""
        now = dict(_members_of(self._batch))
        return any(
            value is not None and not _are_equal(now.get(path), value)
            for path, value in self._members.items()
        )


def described(value: Any) -> Hashable:
    """Describes a value so that equal descriptions mean unchanged tensors and equal numbers."""
    if isinstance(value, Tensor):
        return "tensor", id(value), None if value.is_inference() else value._version
    if isinstance(value, tuple | list):
        return tuple, *map(described, value)
    if isinstance(value, dict):
        return dict, *map(described, value.items())
    if isinstance(value, slice):
        return slice, *map(described, (value.start, value.stop, value.step))
    return type(value), value if isinstance(value, Hashable) else id(value)


def _members_of(value: Any, path: str = "", is_opaque: bool = False) -> Iterator[tuple[str, Any]]:
    """Yields all values in a batch that have no members, each with its path. Objects of a user's
    type have those of their attributes, unless they are inside such an object (``is_opaque``)."""
    members = children_of(arguments_of(value) or value)
    has_attributes = hasattr(value, "__dict__") and not isinstance(value, Tensor)
    if members is None and has_attributes and not is_opaque:
        members, is_opaque = children_of(vars(value)), True
    if members is None:
        yield path, value
    for suffix, member in members or ():
        yield from _members_of(member, path + suffix, is_opaque)


def _are_equal(one: Any, other: Any) -> bool:
    """Whether two values are equal, dense tensors and arrays by entry; undefined numbers (NaN) are
    equal here."""
    if type(one) is type(other) is np.ndarray:
        is_alike = one.shape == other.shape and one.dtype == other.dtype
        return is_alike and one.tobytes() == other.tobytes()
    if one is other or not (isinstance(one, Tensor) and isinstance(other, Tensor)):
        return one is other or described(one) == described(other)
    are_dense = _is_dense(one) and _is_dense(other)
    is_alike = are_dense and one.shape == other.shape and one.dtype == other.dtype
    return is_alike and torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


def _is_dense(tensor: Tensor) -> bool:
    """Whether a tensor's entries can be compared."""
    is_strided = tensor.layout is torch.strided and not tensor.is_nested
    return is_strided and not (tensor.is_quantized or tensor.is_meta)
