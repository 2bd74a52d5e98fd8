"""What calibration says on a machine that others use."""

from collections.abc import Callable

import pytest

from torchrec_picasso.app.runs.pace import Pace


def _clocks(slowdown: float) -> tuple[Callable[[], float], Callable[[], float]]:
    """A wall clock that runs faster than the CPU clock."""
    times_s = [0.0]

    def cpu() -> float:
        times_s.append(times_s[-1] + 0.01)
        return times_s[-1]

    return lambda: slowdown * times_s[-1], cpu


@pytest.mark.parametrize(
    ("slowdowns", "load", "signs"),
    [
        ((1.0, 1.0), 0.3, ()),
        ((2.0, 2.0), 0.3, ("took 2.0 to 2.0 times",)),
        ((1.0, 3.0), 0.3, ("took 1.0 to 3.0 times",)),
        ((1.0, 3.0), 1.9, ("load average was 1.9 before 2 ranks", "took 1.0 to 3.0 times")),
    ],
)
def test_a_busy_clock_and_a_busy_machine_are_told(
    slowdowns: tuple[float, ...],
    load: float,
    signs: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr("torchrec_picasso.app.runs.pace.num_cores", lambda: 2)
    pace = Pace()
    pace.ratios = [Pace(*_clocks(slowdown)).own_ratio() for slowdown in slowdowns]
    warning = pace.warning(num_ranks=2)
    if not signs:
        assert warning is None
    else:
        assert "calibrate again" in warning
        assert all(sign in warning for sign in signs)
    # two ranks on two cores do not slow each other down, whatever else runs
    assert pace.slowdown(2) == 1.0
    assert pace.slowdown(4) == min(2.0, *pace.ratios)
    # two ranks on one core do, and that is no sign
    monkeypatch.setattr("torchrec_picasso.app.runs.pace.num_cores", lambda: 1)
    assert slowdowns[0] < 2 or "busy loop" not in (pace.warning(num_ranks=2) or "")
    # with cores to spare, a load is no sign
    monkeypatch.setattr("torchrec_picasso.app.runs.pace.num_cores", lambda: 8)
    assert "load average" not in (pace.warning(num_ranks=2) or "")
