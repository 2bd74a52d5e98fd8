"""The fitted line, its stated error, and times read off the points."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrec_picasso.cost.curves import Curve
from torchrec_picasso.errors import PicassoError

SIZES = [4 << 10, 64 << 10, 1 << 20, 16 << 20]


@given(latency=st.floats(0.01, 10), gbytes_per_s=st.floats(0.01, 100))
def test_a_line_is_found_again(latency: float, gbytes_per_s: float) -> None:
    curve = Curve.fit(SIZES, [latency + n / gbytes_per_s * 1e-6 for n in SIZES])
    assert curve.latency_ms == pytest.approx(latency, rel=1e-6)
    assert curve.gbytes_per_s == pytest.approx(gbytes_per_s, rel=1e-6)


def test_times_go_through_the_points_and_on_along_the_last_two() -> None:
    curve = Curve.fit([100, 200, 400], [1.0, 3.0, 4.0])
    assert [curve.ms_at(n) for n in (0, 100, 150, 200, 400)] == [1.0, 1.0, 2.0, 3.0, 4.0]
    assert curve.ms_at(800) == pytest.approx(4.0 + 400 * (1.0 / 200))


@pytest.mark.parametrize("last_ms", [1.0, 0.5])
def test_points_that_do_not_rise_go_on_along_the_line(last_ms: float) -> None:
    """Noise among sizes too small to show the bandwidth must not make large ones free."""
    curve = Curve.fit([100, 200, 400], [0.2, 1.0, last_ms])
    assert curve.ms_per_byte > 0
    assert curve.ms_at(1e6) == pytest.approx(last_ms + (1e6 - 400) * curve.ms_per_byte)


@given(ms=st.lists(st.floats(0.001, 1e3), min_size=1, max_size=8))
def test_no_coefficient_is_negative(ms: list[float]) -> None:
    curve = Curve.fit([1000 * 4**i for i in range(len(ms))], ms)
    assert curve.latency_ms >= 0
    assert curve.ms_per_byte >= 0
    assert math.isfinite(curve.ms_at(1e9))
    assert curve.ms_at(1e9) >= 0


@pytest.mark.parametrize(
    ("sizes", "ms"), [([], []), ([1, 2], [1.0]), ([2, 1], [1.0, 2.0]), ([1, 2], [1.0, 0.0])]
)
def test_points_that_are_no_curve_are_refused(sizes: list[int], ms: list[float]) -> None:
    with pytest.raises(PicassoError, match=r"expected (ascending sizes with one time|times above)"):
        Curve.fit(sizes, ms)
