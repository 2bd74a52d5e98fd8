"""Reads dataclasses from JSON, which may be damaged or edited: values are checked by type."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Union, get_args, get_origin, get_type_hints

from torchrec_picasso.errors import PicassoError

__all__ = ["read", "shown_shortly"]

_LONGEST_SHOWN = 60
_LARGEST = 1e18  # far beyond any time or number of bytes


def read(kind: Any, value: Any, place: str) -> Any:
    """Reads a value from the output of ``dataclasses.asdict``.

    Args:
        kind: Type of the value: a dataclass, mapping, tuple, union or plain type; numbers are
            finite and at least 0.
        value: The value of the document.
        place: Path of the value, for messages.

    Raises:
        PicassoError: If the value is of another type, or a field is unknown or missing.
    """
    arguments = get_args(kind)
    if get_origin(kind) in (Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        other = [option for option in arguments if option is not type(None)][-1]
        return read(str if isinstance(value, str) and str in arguments else other, value, place)
    if is_dataclass(kind):
        return _read_fields(kind, _mapping(value, place), place)
    if get_origin(kind) is Mapping:
        items = _mapping(value, place).items()
        return {
            name: read(arguments[1], item, f"{place}.{str(name)[:_LONGEST_SHOWN]}")
            for name, item in items
        }
    if get_origin(kind) is tuple:
        kinds = arguments
        if arguments[-1] is Ellipsis:
            kinds = arguments[:1] * (len(value) if isinstance(value, list) else 0)
        if not isinstance(value, list) or len(value) != len(kinds):
            raise PicassoError(f"{place} is {shown_shortly(value)}, expected a list of numbers")
        return tuple(read(one, item, place) for one, item in zip(kinds, value))
    if kind in (str, bool):
        if not isinstance(value, kind):
            raise PicassoError(f"{place} is {shown_shortly(value)}, expected a {kind.__name__}")
        return value
    is_number = isinstance(value, (int, kind)) and not isinstance(value, bool)
    # NaN fails the comparison
    if not is_number or not 0 <= value <= _LARGEST:
        raise PicassoError(
            f"{place} is {shown_shortly(value)}, expected a number from 0 to {_LARGEST:g}"
        )
    return value


def _read_fields(kind: Any, document: Mapping[str, Any], place: str) -> Any:
    hints = get_type_hints(kind)
    unknown = sorted(map(str, document.keys() - {field.name for field in fields(kind)}))
    if unknown:
        raise PicassoError(f"{place}.{unknown[0][:_LONGEST_SHOWN]} is unknown")
    values = {name: read(hints[name], item, f"{place}.{name}") for name, item in document.items()}
    try:
        return kind(**values)
    except TypeError as error:
        raise PicassoError(f"{place} lacks a field ({error})") from error


def _mapping(value: Any, place: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise PicassoError(f"{place} is {shown_shortly(value)}, expected a mapping")
    return value


def shown_shortly(value: Any) -> str:
    """Formats a value for a message, on one line of limited length."""
    if isinstance(value, int) and value.bit_length() > 64:
        return "a huge number"
    return repr(value)[:_LONGEST_SHOWN]
