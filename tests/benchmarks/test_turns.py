"""The order of turns favours no variant."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

from benchmarks.turns import in_turns


@pytest.mark.parametrize("names", ["ab", "abc", "abcde"])
def test_every_variant_has_every_place_as_often(names: str) -> None:
    turns = list(in_turns(names, len(names)))
    assert [turn for turn, _ in turns] == [t for t in range(len(names)) for _ in names]
    places = Counter((place % len(names), name) for place, (_, name) in enumerate(turns))
    assert places == {(place, name): 1 for place in range(len(names)) for name in names}


@pytest.mark.parametrize("names", ["abc", "abcde"])
def test_no_variant_follows_itself(names: str) -> None:
    assert all(one != other for (_, one), (_, other) in pairwise(in_turns(names, 7)))
