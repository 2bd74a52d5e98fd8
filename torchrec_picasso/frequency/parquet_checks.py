"""What a statistics file may hold: types and ranges of the facts in its metadata, and its lines."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from torchrec_picasso.frequency.dependence import SHARES_HOT

__all__ = ["fact_problem", "lines_problem"]

_END_OF_NUMBERS = 2**62
_LEAST_NUMBER = 1e-200
"""Of counts that have faded; what is divided by it is finite still."""
_MOST_LEVELS = 63
_LONGEST_SHOWN = 60


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _END_OF_NUMBERS


def _is_number(value: Any) -> bool:
    is_finite = isinstance(value, float) and math.isfinite(value)
    if not (is_finite or _is_whole(value)):
        return False
    return value == 0 or _LEAST_NUMBER < value < _END_OF_NUMBERS


def _are_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_number, value))


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


_Rule = tuple[bool, str, Callable[[Any], bool]]
"""Whether a fact must be there, what is expected, and whether a value is that."""

_OF_FILE: Mapping[str, _Rule] = {
    "num_batches": (True, "a number of at least 0", _is_number),
    "num_samples": (True, "a number of at least 0", _is_number),
    "tables": (True, "a mapping of tables", lambda value: isinstance(value, dict)),
}
_OF_TABLE: Mapping[str, _Rule] = {
    "num_embeddings": (True, "a whole number above 0", lambda n: _is_whole(n) and n > 0),
    "feature_names": (True, "a list of names", _are_names),
    "decayed": (False, "true or false", lambda value: isinstance(value, bool)),
    "max_undercount": (False, "a number of at least 0", _is_number),
    "tail_level": (False, "a whole number up to 63", lambda n: _is_whole(n) and n <= _MOST_LEVELS),
    "total_lookups": (False, "a number of at least 0", _is_number),
    "feature_lookups": (False, "a list of numbers of at least 0", _are_numbers),
    "feature_bags": (False, "a list of numbers of at least 0", _are_numbers),
    "effective_share": (
        False,
        "a number above 0 and up to 1",
        lambda n: _is_number(n) and 0 < n <= 1,
    ),
    "persistence": (
        False,
        f"a list of {len(SHARES_HOT)} numbers of at least 0",
        lambda value: _are_numbers(value) and len(value) == len(SHARES_HOT),
    ),
}


def fact_problem(facts: Mapping[str, Any]) -> str | None:
    """What is wrong with the metadata; ``None`` = nothing.

    Args:
        facts: As JSON gave them.
    """
    problem = _first_problem(facts, _OF_FILE)
    if problem is not None:
        return problem
    for name, about in facts["tables"].items():
        problem = _table_problem(about)
        if problem is not None:
            return f"table {name[:_LONGEST_SHOWN]!r}: {problem}"
    return None


def lines_problem(about: Mapping[str, Any], rows: np.ndarray, counts: np.ndarray) -> str | None:
    """What is wrong with the lines of a table; ``None`` = nothing.

    Args:
        about: The table's facts.
        rows: Ascending, so the first and the last bound them.
        counts: Of each.
    """
    if not rows.size:
        return None
    num_embeddings = about["num_embeddings"]
    if rows[0] < 0 or rows[-1] >= num_embeddings:
        wrong = rows[0] if rows[0] < 0 else rows[-1]
        return f"row {wrong}, expected 0..{num_embeddings - 1}"
    repeated = rows[1:][rows[1:] == rows[:-1]]
    if repeated.size:
        return f"row {repeated[0]} twice, expected one line each"
    if not counts.min() > 0:
        return f"count {counts.min()}, expected more than 0"
    total = counts.sum(dtype=np.float64)
    if not total < _END_OF_NUMBERS:
        return f"counts of {total} together, expected less than 2**62"
    if not about.get("decayed", False) and (counts != np.floor(counts)).any():
        return "counts that are no whole numbers, expected them where nothing was decayed"
    return None


def _table_problem(about: Any) -> str | None:
    if not isinstance(about, dict):
        return "expected a mapping of facts"
    problem = _first_problem(about, _OF_TABLE)
    if problem is not None:
        return problem
    num_features = len(about["feature_names"])
    for name in ("feature_lookups", "feature_bags"):
        if name in about and len(about[name]) != num_features:
            return f"{name} has {len(about[name])} numbers for {num_features} features"
    if "feature_bags" in about and "feature_lookups" not in about:
        return "feature_lookups is missing, which feature_bags needs"
    return None


def _first_problem(facts: Mapping[str, Any], rules: Mapping[str, _Rule]) -> str | None:
    for name, (is_needed, expected, is_right) in rules.items():
        if name not in facts:
            if is_needed:
                return f"{name} is missing"
        elif not is_right(facts[name]):
            value = facts[name]
            got = "" if isinstance(value, int) and value.bit_length() > 64 else f" {value!r}"
            return f"{name} is {type(value).__name__}{got[:_LONGEST_SHOWN]}, expected {expected}"
    return None
