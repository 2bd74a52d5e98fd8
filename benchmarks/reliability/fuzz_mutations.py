"""What is done to good files: to their bytes, to their lines, to what they hold.

Everything is drawn from a ``random.Random``, so a case is made again from its seed.
"""

from __future__ import annotations

import copy
import datetime
import math
import os
import pickle
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

__all__ = [
    "HOSTILE_VALUES",
    "RunsWhenUnpickled",
    "mutated_bytes",
    "mutated_document",
    "mutated_lines",
    "yaml_attack",
]


def _nested(depth: int, make: Callable[[Any], Any]) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = make(value)
    return value


HOSTILE_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 3.5, -0.0, 1e-320, 1e308, 2**31, 2**63, -(2**63), 2**64),
    *(10**30, 10**400, -(10**400), math.inf, -math.inf, math.nan),
    *("", "x", "1", "1e3", "nan", "../../etc", "\x00", "\ud7ff", "x" * 100_000, "true"),
    *([], [None], [1, "x"], [[]], [-1], [0, 0], {}, {"": None}, {"a": {"b": []}}, {"1": 1}),
    _nested(40, lambda inner: [inner]),
    _nested(40, lambda inner: {"a": inner}),
    list(range(20_000)),
)
"""Values of every type that JSON has, among them the ends of number ranges."""

_YAML_KEYS = (1, None, True, 2.5, datetime.date(2020, 1, 1), math.nan)
_MOST_FLIPS = 8


class RunsWhenUnpickled:
    """Unpickling it runs a command that makes a file.

    Args:
        marker: The file.
    """

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self._marker}",)


def mutated_bytes(draw: random.Random, content: bytes) -> tuple[str, bytes]:
    """Changes bytes.

    Returns:
        What was done, and what became of it.
    """
    changed = bytearray(content)
    size = len(changed)
    how = draw.choice(
        ("flip bits", "flip bits", "cut off", "cut out", "repeat", "overwrite", "insert", "whole")
    )
    start = draw.randrange(size + 1)
    length = min(draw.choice((1, 2, 8, 64, 1024)), size - start)
    noise = draw.choice((draw.randbytes(length), b"\xff" * length, b"\x00" * length))
    if how == "flip bits" and size:
        for _ in range(draw.randint(1, _MOST_FLIPS)):
            changed[draw.randrange(size)] ^= 1 << draw.randrange(8)
    elif how == "cut off":
        del changed[start:]
    elif how == "cut out":
        del changed[start : start + length]
    elif how == "repeat":
        changed[start:start] = changed[start : start + length] * draw.choice((1, 2, 50))
    elif how == "overwrite":
        changed[start : start + length] = noise
    elif how == "insert":
        changed[start:start] = noise
    else:
        whole = (b"", b"\x00", b"\xff\xfe", b"\x80abc", draw.randbytes(200), content * 2)
        changed = bytearray(draw.choice(whole))
    return f"{how} at {start} of {size}", bytes(changed)


def mutated_lines(draw: random.Random, content: bytes) -> tuple[str, bytes]:
    """Deletes, repeats, exchanges or indents lines."""
    lines = content.splitlines(keepends=True) or [b""]
    how = draw.choice(("delete", "repeat", "exchange", "indent", "tab", "without end"))
    place, other = draw.randrange(len(lines)), draw.randrange(len(lines))
    if how == "delete":
        del lines[place]
    elif how == "repeat":
        lines.insert(other, lines[place])
    elif how == "exchange":
        lines[place], lines[other] = lines[other], lines[place]
    elif how == "without end":
        lines[place] = lines[place].rstrip(b"\r\n")
    else:
        lines[place] = (b"  " if how == "indent" else b"\t") + lines[place]
    return f"{how} line {place}", b"".join(lines)


def mutated_document(draw: random.Random, document: Any, *, odd_keys: bool) -> tuple[str, Any]:
    """Changes a value somewhere in nested lists and mappings, or a key.

    Args:
        draw: Randomness.
        document: Stays as it is.
        odd_keys: Whether keys may be something else than text.
    """
    changed = copy.deepcopy(document)
    places = list(_places(changed, ""))
    if not places or draw.random() < 0.03:
        return "another document", copy.deepcopy(draw.choice(HOSTILE_VALUES))
    path, container, key = draw.choice(places)
    how = draw.choice(("value", "value", "value", "delete", "add", "rename", "near"))
    if how == "delete":
        del container[key]
    elif how == "near" and isinstance(container[key], (int, float)):
        container[key] = _near(draw, container[key])
    elif how == "rename" and isinstance(container, dict):
        names = ("", "x" * 5000, str(key)[:-1], "__class__", *(_YAML_KEYS if odd_keys else ()))
        container[draw.choice(names)] = container.pop(key)
    elif how == "add" and isinstance(container, list):
        container.insert(key, copy.deepcopy(draw.choice(HOSTILE_VALUES)))
    else:
        container[key] = copy.deepcopy(draw.choice(HOSTILE_VALUES))
    return f"{how} {path}", changed


def _near(draw: random.Random, number: float) -> float:
    changes: tuple[float, ...] = (-number, number + 1, number - 1, 0, number * 1000)
    return draw.choice((*changes, float(number) / 3, float(number)))


def _places(value: Any, path: str) -> list[tuple[str, Any, Any]]:
    """Path, container and key of everything in it."""
    keys = list(value) if isinstance(value, Mapping) else range(len(value))
    found = [(f"{path}.{key}", value, key) for key in keys]
    for key in keys:
        if isinstance(value[key], (dict, list)):
            found += _places(value[key], f"{path}.{key}")
    return found


def yaml_attack(draw: random.Random, marker: Path) -> tuple[str, bytes]:
    """A document that a careless reader of YAML runs, swells to or drowns in."""
    command = f'["touch {marker}"]'
    laughs = "".join(
        f"l{level}: &l{level} [{', '.join([f'*l{level - 1}'] * 9)}]\n" for level in range(1, 10)
    )
    pickled = pickle.dumps(RunsWhenUnpickled(marker), 0).hex()
    attacks = {
        "object/apply": f"steps: !!python/object/apply:os.system {command}\n",
        "object/new": f"steps: !!python/object/new:os.system {command}\n",
        "object": "steps: !!python/object:os.system {}\n",
        "name": "steps: !!python/name:os.system\n",
        "module": "steps: !!python/module:os\n",
        "tuple": "model: {dense_layers: !!python/tuple [4, 4]}\n",
        "own tag": "steps: !own 3\n",
        "binary": f"steps: !!binary {pickled}\n",
        "bad binary": "steps: !!binary '%%%'\n",
        "laughs": f"l0: &l0 [x]\n{laughs}steps: *l9\n",
        "laughs in a known key": f"l0: &l0 [x]\n{laughs}model: *l9\n",
        "laughs in sizes": f"model:\n  kind: wide_deep\n  sizes:\n    l0: &l0 [x]\n"
        f"{''.join(f'    {line}' for line in laughs.splitlines(keepends=True))}",
        "merged laughs": "".join(
            f"m{level}: &m{level} {{<<: [{', '.join([f'*m{level - 1}'] * 9)}]}}\n"
            if level
            else "m0: &m0 {a: 1}\n"
            for level in range(9)
        ),
        "holds itself": "data: &a [*a]\n",
        "holds itself by key": "model: &a {sizes: *a}\n",
        "sizes hold themselves": "model: {kind: wide_deep, sizes: &a {x: *a}}\n",
        "merges itself": "data: &a {<<: *a}\n",
        "merges a number": "data: {<<: 3}\n",
        "unknown alias": "data: *nowhere\n",
        "list as key": "? [a]\n: 3\n",
        "mapping as key": "{? {a: 1} : 3}\n",
        "deep flow list": "steps: " + "[" * 20_000,
        "deep flow mapping": "steps: " + "{a: " * 20_000,
        "deep block": "".join(f"{' ' * level}a:\n" for level in range(1500)),
        "deep closed list": "steps: " + "[" * 400 + "]" * 400,
        "many digits": f"steps: {'9' * 5000}\n",
        "many digits of a float": f"optimizer: {{embedding_lr: 1{'0' * 5000}.0}}\n",
        "sixties": "steps: 1:99:99\n",
        "bad date": "steps: 2020-99-99\n",
        "date": "steps: 2020-02-02\n",
        "bad integer": "steps: !!int x\n",
        "empty integer": "steps: !!int ''\n",
        "bad float": "steps: !!float x\n",
        "bad boolean": "steps: !!bool maybe\n",
        "bad null": "steps: !!null x\n",
        "bad timestamp": "steps: !!timestamp never\n",
        "set": "data: !!set {a, b}\n",
        "ordered": "data: !!omap [a: 1]\n",
        "bad ordered": "data: !!omap {a: 1}\n",
        "pairs": "data: !!pairs [a: 1]\n",
        "mapping of a list": "data: !!map [1]\n",
        "text of a list": "data: {path: !!str [1]}\n",
        "two documents": "steps: 1\n---\nsteps: 2\n",
        "version": "%YAML 9.9\n---\nsteps: 1\n",
        "directive": "%NONE x\n---\nsteps: 1\n",
        "tag handle": "%TAG ! tag:x,2000:\n---\nsteps: !y 1\n",
        "control": "steps: \x07\n",
        "byte order": "\ufeffsteps: 3\n",
        "long key": f"{'k' * 200_000}: 1\n",
        "long text": f"data: {{path: {'x' * 1_000_000}}}\n",
        "value": "=: 3\n",
        "only a scalar": "3\n",
        "only a list": "[]\n",
        "surrogate": 'data: {path: "\\ud800"}\n',
        "null character": 'data: {path: "\\0"}\n',
    }
    name = draw.choice(sorted(attacks))
    encoding = draw.choice(("utf-8", "utf-8", "utf-8", "utf-8", "utf-16", "latin-1"))
    return f"{name}, {encoding}", attacks[name].encode(encoding, errors="replace")
