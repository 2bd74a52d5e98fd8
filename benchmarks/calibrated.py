"""Curves of emulated links and of a core's work, measured once and kept in a file."""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.cluster import run_on_hosts
from torchrec_picasso import CommCurves
from torchrec_picasso.app.cli.calibrate import calibrate_on_rank

_MOST_BYTES, _SECONDS_PER_POINT, _WITH_LOCAL = 64 << 20, 0.3, True
"""Those of `torchrec-picasso calibrate` by default."""
_TIMEOUT_S = 600.0


def calibrated_curves(path: Path, hosts: int, rate_mbit: float | None) -> CommCurves:
    """Reads the curves of a file; measures and writes them first where there is none.

    Args:
        path: File of the curves.
        hosts: Hosts of one rank each.
        rate_mbit: Rate of every link, Mbit/s; ``None`` = loopback.
    """
    if not path.exists():
        arguments = _MOST_BYTES, _SECONDS_PER_POINT, _WITH_LOCAL
        by_rank = run_on_hosts(
            calibrate_on_rank, hosts, rate_mbit, *arguments, timeout_s=_TIMEOUT_S
        )
        by_rank[0].to_json(path)
        if "busy" in by_rank[0].measured_on:
            print(f"warning: {by_rank[0].measured_on['busy']}", file=sys.stderr)
    return CommCurves.from_json(path)
