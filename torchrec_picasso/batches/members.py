"""Lists the members of containers in a batch, rebuilds containers, and copies batches.

Members are fields or items, and attributes that were assigned to an instance: a per-sample weight
that was assigned to a dataclass is as much a part of the batch as its fields. Values that the
constructor computes from the fields are recomputed by it.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from inspect import getattr_static
from typing import Any

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from torchrec_picasso.errors import CompatError

JAGGED_TYPES = (KeyedJaggedTensor, JaggedTensor)
"""Types that hold lookups; a JaggedTensor is stored as the lookups of one feature."""


def children_of(value: Any) -> list[tuple[str, Any]] | None:
    """Lists a container's members with their suffix in a path; ``None`` for anything else.

    Containers are dataclasses, dicts, NamedTuples, and exactly tuples and lists: a subclass of
    tuple or list may have any constructor. A suffix is ``.name`` or ``[0]``, for example.
    """
    members = _items_of(value)
    if members is None:
        return None
    return members + [(f".{name}", getattr(value, name)) for name in _names_beside(value)]


def rebuild(container: Any, members: Sequence[Any], path: str, advice: str) -> Any:
    """Makes a container of the same type with new members, in the order of :func:`children_of`.

    If a dataclass's constructor refuses them, CompatError names the ``path`` of the container in
    the batch, and ends with ``advice``.
    """
    names = _names_beside(container)
    # children_of lists items first, then the attributes that were assigned to the instance
    num_items = len(members) - len(names)
    items = members[:num_items]
    if _is_dataclass(container):
        fields = [f.name for f in dataclasses.fields(container) if f.init]
        try:
            rebuilt = dataclasses.replace(container, **dict(zip(fields, items)))
        except Exception as error:  # any error of a user's __init__ or __post_init__
            raise CompatError(
                f"{path}: the constructor of {type(container).__name__} refused its own fields, "
                f"cut or joined ({type(error).__name__}: {error}); {advice}"
            ) from error
    elif isinstance(container, dict):
        rebuilt = copy.copy(container)  # keeps a subclass's state, such as a default factory
        rebuilt.update(zip(container, items))
    else:
        rebuilt = getattr(container, "_make", type(container))(items)
    for name, member in zip(names, members[num_items:]):
        object.__setattr__(rebuilt, name, member)  # works on frozen dataclasses too
    return rebuilt


def arguments_of(value: Any) -> dict[str, Any] | None:
    """Lists the constructor arguments of a keyed or jagged tensor; ``None`` for anything else.
    Values that the tensor cached meanwhile, perhaps on another stream, are not among them."""
    if isinstance(value, KeyedTensor):
        names = ("keys", "length_per_key", "values", "key_dim")
        return {name: getattr(value, name)() for name in names}
    if not isinstance(value, JAGGED_TYPES):
        return None
    weights, lengths = value.weights_or_none(), value.lengths()
    found = {"values": value.values(), "weights": weights, "lengths": lengths}
    if isinstance(value, KeyedJaggedTensor):
        found |= {"keys": value.keys(), "inverse_indices": value.inverse_indices_or_none()}
        if value.variable_stride_per_key():
            found["stride_per_key_per_rank"] = value.stride_per_key_per_rank()
        else:
            found["stride"] = value.stride()
    return found


def made_like(value: Any, kind: Any = None, **changes: Any) -> Any:
    """Makes a keyed or jagged tensor like another one, with some arguments or the type changed.
    Values that are not changed are not copied."""
    kinds = (KeyedTensor, *JAGGED_TYPES)
    kind = kind or next(kind for kind in kinds if isinstance(value, kind))
    return kind(**{**(arguments_of(value) or {}), **changes})


def copy_batch(value: Any) -> Any:
    """Copies a batch, so that a model may write into it; objects that cannot be copied are shared.
    Only the constructor's tensors are copied, on the current stream."""
    members = children_of(value)
    if members is not None:
        copied = [copy_batch(member) for _, member in members]
        return rebuild(value, copied, "batch", "let its constructor take its own fields")
    arguments = arguments_of(value)
    if arguments is not None:
        return made_like(value, **copy_batch(arguments))
    if isinstance(value, Tensor):
        return value.clone()
    try:
        return copy.deepcopy(value)
    except Exception:  # any error of a user's type
        return value


def _items_of(value: Any) -> list[tuple[str, Any]] | None:
    if _is_dataclass(value):
        return [(f".{f.name}", getattr(value, f.name)) for f in dataclasses.fields(value) if f.init]
    if isinstance(value, dict):
        return [(f"[{key!r}]", member) for key, member in value.items()]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return [(f".{name}", member) for name, member in zip(value._fields, value)]
    if type(value) in (tuple, list):
        return [(f"[{i}]", member) for i, member in enumerate(value)]
    return None


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _names_beside(container: Any) -> list[str]:
    """Names attributes that are no items, and that the constructor does not compute from items."""
    names = list(getattr(container, "__dict__", ()))
    if _is_dataclass(container):
        fields = dataclasses.fields(container)
        init = {field.name for field in fields if field.init}
        derived = [f.name for f in fields if not f.init and hasattr(container, f.name)]
        names = [name for name in dict.fromkeys([*derived, *names]) if name not in init]
    if not names:
        return []
    fresh = None
    with suppress(Exception):  # rebuild() will raise the same error, with its place
        fresh = dataclasses.replace(container) if _is_dataclass(container) else None
    # cached properties are computed on demand; equal values were computed by the constructor
    return [
        name
        for name in names
        if not isinstance(getattr_static(type(container), name, None), cached_property)
        and not (hasattr(fresh, name) and _is_same(getattr(fresh, name), getattr(container, name)))
    ]


def _is_same(one: Any, other: Any) -> bool:
    """Whether an attribute equals the constructor's value; ``True`` for types without ``==``."""
    if one is other or type(one) is not type(other):
        return one is other
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    members, others = (children_of(arguments_of(each) or each) for each in (one, other))
    if members is not None and others is not None:
        return len(members) == len(others) and all(
            name == other_name and _is_same(member, other_member)
            for (name, member), (other_name, other_member) in zip(members, others)
        )
    if type(one).__eq__ is object.__eq__:
        return True
    try:
        equal = one == other
        return bool(equal.all() if hasattr(equal, "all") else equal)  # arrays compare by entry
    except Exception:  # any error of a user's type
        return False
