"""Numbers out of a curves file, which anybody may have written: finite and not below 0."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any, TypeVar

from torchrec_picasso.errors import PicassoError

__all__ = ["read_dataclass", "read_numbers", "shown_shortly"]

_LONGEST_SHOWN = 60
_LARGEST = 1e18  # far beyond what any time or number of bytes is

_Of = TypeVar("_Of")


def read_dataclass(cls: type[_Of], document: Mapping[str, Any], place: str, **read: Any) -> _Of:
    """Makes a dataclass of numbers.

    Args:
        cls: A dataclass; fields that ``read`` does not have are numbers.
        document: A number for each.
        place: Where they are, for the message.
        **read: Fields that were read already.

    Raises:
        PicassoError: If one is missing, unknown or no such number.
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
    """Refuses what is no number, not finite, below 0 or beyond any measurement.

    Args:
        values: Place and value.

    Raises:
        PicassoError: Names the place.
    """
    for place, value in values:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not 0 <= value <= _LARGEST:  # NaN is not
            raise PicassoError(
                f"{place} is {shown_shortly(value)}, expected a number from 0 to {_LARGEST:g}"
            )


def shown_shortly(value: Any) -> str:
    """A value for a message, on one line and cut short."""
    if isinstance(value, int) and value.bit_length() > 64:
        return "a huge number"
    return repr(value)[:_LONGEST_SHOWN]
