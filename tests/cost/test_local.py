"""Local costs: coefficients found again, none negative; a dense part in other batches and cuts."""

import dataclasses
import json

import numpy as np
import pytest

from torchrec_picasso.cost.curves import read
from torchrec_picasso.cost.local import DenseTimes, LocalCosts, LocalWork, PhaseCost
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


MEASURED = DenseTimes(
    forward_ms=40.0,
    backward_ms=80.0,
    parameter_bytes=1000.0,
    batch_size=100,
    in_parts=((4, 30.0, 60.0), (16, 36.0, 100.0)),
)


@pytest.mark.parametrize(
    ("pieces", "forward_ms", "backward_ms"),
    [(1, 40.0, 80.0), (2, 35.0, 70.0), (4, 30.0, 60.0), (8, 33.0, 80.0), (16, 36.0, 100.0)],
)
def test_between_two_cuts_times_are_in_proportion(
    pieces: int, forward_ms: float, backward_ms: float
) -> None:
    found = MEASURED.cut(pieces)
    assert (found.forward_ms, found.backward_ms) == pytest.approx((forward_ms, backward_ms))
    assert found.parameter_bytes == MEASURED.parameter_bytes


def test_beyond_what_was_measured_times_stay() -> None:
    assert MEASURED.cut(32).total_ms == pytest.approx(136.0)
    given = DenseTimes.from_total(30.0)
    assert given.cut(8).total_ms == given.at(7).total_ms == pytest.approx(30.0)
    assert given.backward_ms == pytest.approx(2 * given.forward_ms)


def test_another_batch_scales_every_cut() -> None:
    assert MEASURED.at(50).cut(4).forward_ms == pytest.approx(15.0)
    assert MEASURED.at(100) is MEASURED


def test_it_survives_json() -> None:
    document = json.loads(json.dumps(dataclasses.asdict(MEASURED)))
    assert read(DenseTimes, document, "dense") == MEASURED
    del document["in_parts"]  # as earlier releases wrote it
    assert read(DenseTimes, document, "dense").in_parts == ()
