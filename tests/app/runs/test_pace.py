"""A busy loop tells of other programs, and of ranks that share cores."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from torchrec_picasso.app.launch.run_ranks import run_ranks
from torchrec_picasso.app.runs.pace import Pace


def _clocks(slowdown: float) -> tuple[Callable[[], float], Callable[[], float]]:
    """A wall clock that runs faster than the CPU clock."""
    times_s = [0.0]

    def cpu() -> float:
        times_s.append(times_s[-1] + 0.01)
        return times_s[-1]

    return lambda: slowdown * times_s[-1], cpu


@pytest.mark.parametrize(
    ("slowdowns", "cores", "sign"),
    [
        ((1.0, 1.0), 2, None),
        ((2.0, 2.0), 2, "took 2.0 to 2.0 times"),
        ((1.0, 3.0), 2, "took 1.0 to 3.0 times"),
        ((1.0, 1.0, 1.25), 2, None),  # in the mean less than a tenth
        ((1.0, 1.0, 1.5), 2, "took 1.0 to 1.5 times"),
        ((1.5, 1.5), 8, "took 1.5 to 1.5 times"),
        ((1.0, 1.0), 1, None),
        ((2.0, 2.0), 1, None),  # two ranks on one core slow each other down
        ((2.0, 4.0), 1, "took 2.0 to 4.0 times"),
    ],
)
def test_other_programs_are_told(
    slowdowns: tuple[float, ...], cores: int, sign: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchrec_picasso.app.runs.pace.num_cores", lambda: cores)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr("torchrec_picasso.app.runs.pace._most", lambda number: number)
    pace = Pace()
    pace.ratios = [Pace(*_clocks(slowdown)).own_ratio() for slowdown in slowdowns]
    warning = pace.warning()
    assert (warning is None) == (sign is None)
    assert warning is None or (sign in warning and "calibrate again" in warning)
    assert pace.slowdown() == max(1.0, min(2 / cores, *pace.ratios))


def _warnings_of_unlike_hosts(rank: int, world_size: int) -> list[str | None]:
    """Two ranks share 8 cores of rank 0's host, one of rank 1's: once alone, once beside other
    programs. Then each is alone on its host, beside other programs."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torchrec_picasso.app.runs.pace.num_cores", lambda: 8 if rank == 0 else 1)
        for slowdown in (2.0, 4.0):
            pace = Pace(*_clocks(slowdown if rank else 1.0))
            pace.sample()
            found.append(pace.warning())
        patch.setenv("LOCAL_WORLD_SIZE", "1")
        pace = Pace(*_clocks(2.0 if rank else 1.0))
        pace.sample()
        found.append(pace.warning())
    return found


def test_a_host_of_few_cores_is_no_other_program() -> None:
    by_rank = run_ranks(_warnings_of_unlike_hosts, 2, timeout_s=100)
    for alone, beside, on_own_host in by_rank:
        assert alone is None
        assert "took 2.0 to 2.0 times" in on_own_host
        assert "took 4.0 to 4.0 times" in beside
