"""Validates numbers of a curves file, which may be damaged or edited: finite and at least 0."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any, TypeVar

from torchrec_picasso.errors import PicassoError

__all__ = ["read_dataclass", "read_numbers", "shown_shortly"]

_LONGEST_SHOWN = 60
_LARGEST = 1e18  # far beyond any time or number of bytes

_T = TypeVar("_T")


def read_dataclass(cls: type[_T], document: Mapping[str, Any], place: str, **read: Any) -> _T:
    """Builds a dataclass from numbers.

    Args:
        cls: The dataclass; all fields outside ``read`` are numbers.
        document: Numbers by field name.
        place: Path of the document, for messages.
        **read: Values of the other fields.

    Raises:
        PicassoError: If a field is unknown, or a value is no number of at least 0.
        TypeError: If a required field is missing.
    """
    if not isinstance(document, Mapping):
        raise PicassoError(f"{place} is {shown_shortly(document)}, expected a mapping of numbers")
    known = {field.name for field in fields(cls)}  # type: ignore[arg-type]
    unknown = sorted(map(str, document.keys() - known))
    if unknown:
        raise PicassoError(f"{place}.{unknown[0][:_LONGEST_SHOWN]} is unknown")
    names = [name for name in document if name not in read]
    read_numbers((f"{place}.{name}", document[name]) for name in names)
    return cls(**{name: document[name] for name in names}, **read)


def read_numbers(values: Iterable[tuple[str, Any]]) -> None:
    """Refuses values that are no numbers, negative, not finite, or larger than any measurement.

    Args:
        values: Pairs of path and value.

    Raises:
        PicassoError: With the path and the value.
    """
    for place, value in values:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        # NaN fails the comparison
        if not is_number or not 0 <= value <= _LARGEST:
            raise PicassoError(
                f"{place} is {shown_shortly(value)}, expected a number from 0 to {_LARGEST:g}"
            )


def shown_shortly(value: Any) -> str:
    """Formats a value for a message, on one line of limited length."""
    if isinstance(value, int) and value.bit_length() > 64:
        return "a huge number"
    return repr(value)[:_LONGEST_SHOWN]
