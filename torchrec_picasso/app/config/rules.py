"""Checks of values: one rule per field, for the dataclasses and the YAML loader.

A rule lives in the field's metadata, next to its explanation, so a value is judged the same way
whether it came from Python or from a file. The price is one small interpreter for annotations.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from torchrec_picasso.errors import ConfigError

_LONGEST_SHOWN = 200
_END_OF_INTEGERS = 2**63
_WORDS = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "true or false",
    type(None): "null",
}


def rule(
    default: Any,
    help: str,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    multiple_of: int | None = None,
    choices: tuple[str, ...] | None = None,
) -> Any:
    """Declares a dataclass field with its explanation, one sentence with the unit, and the values
    that it may hold.

    Bounds apply to a number, or to each number of a list or mapping; ``above`` excludes the bound
    itself. ``choices`` are the only strings allowed.
    """
    bounds = {"at_least": at_least, "above": above, "at_most": at_most, "multiple_of": multiple_of}
    metadata = {"help": help, "choices": choices, **bounds}
    return dataclasses.field(default=default, metadata=metadata)


class Rules:
    """Base of the config dataclasses: checks every field when an object is made."""

    def __post_init__(self) -> None:
        problems = [
            f"{field.name}: {problem}"
            for field, annotation in field_types(type(self))
            for problem in value_problems(getattr(self, field.name), annotation, field.metadata)
        ]
        problems = problems or self.cross_problems()
        if problems:
            raise ConfigError(f"{type(self).__name__}: " + "; ".join(problems))

    def cross_problems(self) -> list[str]:
        """Problems between fields that are each fine alone, as ``field: problem``."""
        return []


def field_types(cls: type) -> list[tuple[dataclasses.Field[Any], Any]]:
    """The fields of a config dataclass with their resolved annotations, in order."""
    hints = typing.get_type_hints(cls)
    return [(field, hints[field.name]) for field in dataclasses.fields(cls)]


def value_problems(value: Any, annotation: Any, bounds: Mapping[str, Any]) -> Iterator[str]:
    """Yields what is wrong with one value, its type first, then its range: expected and found.

    ``annotation`` is ``int``, ``float``, ``str``, ``bool``, a tuple or mapping of those, or a
    union; ``bounds`` is the metadata that :func:`rule` stored.
    """
    if not _fits(value, annotation):
        yield f"expected {_spell(annotation)}, got {shown(value)} ({type(value).__name__})"
        return
    choices = bounds.get("choices")
    if choices is not None and value is not None and value not in choices:
        yield f"expected one of {', '.join(choices)}; got {shown(value)}"
    for number in _numbers(value):
        yield from _range_problems(number, bounds)


def _range_problems(number: float, bounds: Mapping[str, Any]) -> Iterator[str]:
    low, above, high = bounds.get("at_least"), bounds.get("above"), bounds.get("at_most")
    divisor = bounds.get("multiple_of")
    if isinstance(number, int) and abs(number) >= _END_OF_INTEGERS:
        yield f"expected a number of 64 bits at most, got one of {number.bit_length()}"
    elif not math.isfinite(number):
        yield f"expected a finite number, got {number}"
    elif low is not None and number < low:
        yield f"expected at least {low}, got {number}"
    elif above is not None and number <= above:
        yield f"expected more than {above}, got {number}"
    elif high is not None and number > high:
        yield f"expected at most {high}, got {number}"
    elif divisor is not None and number % divisor:
        yield f"expected a multiple of {divisor}, got {number}"


def shown(value: Any, *, quoted: bool = True) -> str:
    """Formats plain data for a message: on one line, and cut short if it is long."""
    if isinstance(value, str):
        value = value if len(value) <= _LONGEST_SHOWN else value[:_LONGEST_SHOWN] + "..."
        return repr(value) if quoted else repr(value)[1:-1]
    text = repr(value)
    return text if len(text) <= _LONGEST_SHOWN else text[:_LONGEST_SHOWN] + "..."


def _numbers(value: Any) -> list[float]:
    """Lists the numbers in a value, at any depth."""
    if isinstance(value, (int, float)):
        return [] if isinstance(value, bool) else [value]
    items = value.values() if isinstance(value, Mapping) else value
    if isinstance(value, (Mapping, tuple, list)):
        return [number for item in items for number in _numbers(item)]
    return []


def _fits(value: Any, annotation: Any) -> bool:
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, arm) for arm in args)
    if origin is tuple:
        if not isinstance(value, (tuple, list)):
            return False
        arms = args[:1] * len(value) if args[-1] is Ellipsis else args
        return len(arms) == len(value) and all(map(_fits, value, arms))
    if origin is not None and issubclass(origin, Mapping):
        return isinstance(value, Mapping) and all(
            _fits(key, args[0]) and _fits(item, args[1]) for key, item in value.items()
        )
    if annotation in (int, float):  # a bool is no number, a whole number is a float
        kinds = (int, float) if annotation is float else int
        return isinstance(value, kinds) and not isinstance(value, bool)
    return isinstance(value, annotation)


def _spell(annotation: Any) -> str:
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_spell(arm) for arm in args)
    if origin is tuple and args[-1] is Ellipsis:
        return f"a list, each item {_spell(args[0])}"
    if origin is tuple:
        return f"a list of {', '.join(map(_spell, args))}"
    if origin is not None and issubclass(origin, Mapping):
        return f"a mapping from {_spell(args[0])} to {_spell(args[1])}"
    return _WORDS.get(annotation, "a mapping")
