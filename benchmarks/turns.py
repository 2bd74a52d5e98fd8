"""The order in which variants take turns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

Each = TypeVar("Each")


def in_turns(variants: Sequence[Each], rounds: int) -> Iterator[tuple[int, Each]]:
    """Yields all variants in each round, with its number; each round begins with the next variant.

    A drift hits all alike. Of three or more none follows itself: caches would still hold its rows.
    """
    for turn in range(rounds):
        first = turn % len(variants)
        for variant in (*variants[first:], *variants[:first]):
            yield turn, variant
