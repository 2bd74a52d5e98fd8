"""The benchmark of row updates measures both ways on both kinds of input."""

import pytest

from benchmarks import row_update


def test_a_small_table(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in (("_ROWS", 2_000), ("_LOOKUPS_OF_A_RANK", 500), ("_BAGS", 400)):
        monkeypatch.setattr(row_update, name, size)
    found = row_update.measure(8, times=1)
    assert found["distinct_rows"] <= found["rows"] <= found["lookups"] == 1_000
    assert all(value > 0 for value in found.values())
