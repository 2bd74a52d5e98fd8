"""What is known of a dense part, for other batches and other cuts."""

from __future__ import annotations

import dataclasses
import json

import pytest

from torchrec_picasso.cost.curves import read
from torchrec_picasso.cost.local import DenseTimes

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
