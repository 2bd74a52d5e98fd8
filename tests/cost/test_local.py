"""Local costs: coefficients found again, none negative, errors stated."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from torchrec_picasso.cost.local import LocalCosts, LocalWork, PhaseCost
from torchrec_picasso.errors import PicassoError

RNG = np.random.default_rng(0)


def _works(num: int) -> list[LocalWork]:
    return [
        LocalWork(
            features=float(RNG.integers(1, 100)),
            lookups=float(n := RNG.integers(1_000, 100_000)),
            rows=float(u := RNG.integers(1, n)),
            lookup_elements=float(n * (d := RNG.integers(4, 128))),
            row_elements=float(u * d),
            buffer_elements=float((n + 2 * u) * d),
            updated=float(RNG.integers(1, u + 1)),
        )
        for _ in range(num)
    ]


def test_a_phase_in_three_adds_up() -> None:
    cost = LocalCosts().hot_cold.backward
    work = dataclasses.replace(_works(1)[0], updated=500.0)
    call_ms, lookups_ms, rows_ms = cost.split_ms(work)
    assert call_ms + lookups_ms + rows_ms == pytest.approx(cost.ms(work))
    assert cost.split_ms(dataclasses.replace(work, updated=501.0))[2] > rows_ms
    assert cost.split_ms(LocalWork())[0] == cost.fixed_ms


def test_coefficients_are_found_again() -> None:
    true = PhaseCost(
        fixed_ms=1.5,
        feature_us=20,
        lookup_ns=80,
        row_element_ns=3,
        paged_element_ns=2,
        update_ns=700,
    )
    works = _works(40)
    found = PhaseCost.fit(works, [true.ms(work) for work in works])
    assert dataclasses.asdict(found) == pytest.approx(dataclasses.asdict(true), rel=1e-4, abs=1e-5)


def test_no_coefficient_is_negative() -> None:
    works = _works(12)
    noisy = [float(ms) for ms in RNG.uniform(1, 100, len(works))]
    found = PhaseCost.fit(works, noisy)
    assert min(dataclasses.asdict(found).values()) >= 0


def test_memory_beyond_what_is_kept_costs_extra() -> None:
    cost = PhaseCost(paged_element_ns=1.0)
    kept = (32 << 20) / 4
    assert cost.ms(LocalWork(buffer_elements=kept)) == 0
    assert cost.ms(LocalWork(buffer_elements=kept + 1e6)) == pytest.approx(1.0)


def test_measurements_that_are_none_are_refused() -> None:
    for works, ms in (([], []), (_works(2), [1.0]), (_works(1), [0.0])):
        with pytest.raises(PicassoError, match="expected one time above 0"):
            PhaseCost.fit(works, ms)
