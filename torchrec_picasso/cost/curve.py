"""Time of one collective as a function of bytes: measured points and a fitted line.

Times are interpolated between measured points, because no line fits the steps of real links (socket
buffers, token buckets, protocol switches). The line ``latency + bytes / bandwidth`` and its error
describe the link to a reader. The fit minimizes relative errors, because sizes span four decades.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

import numpy as np

from torchrec_picasso.cost.local import non_negative_least_squares
from torchrec_picasso.errors import PicassoError

__all__ = ["Curve"]

_BYTES_PER_MS_TO_GB_PER_S = 1e-6


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Milliseconds of a collective by the bytes that its busiest rank sends or receives."""

    sent_bytes: tuple[int, ...]  # measured sizes, ascending, at least one
    ms: tuple[float, ...]  # median time of each size on the slowest rank
    latency_ms: float  # of the fitted line, at least 0
    ms_per_byte: float  # slope of the fitted line, at least 0
    median_error: float  # of |line - measured| / measured
    worst_error: float

    def __post_init__(self) -> None:
        if not _are_points(self.sent_bytes, self.ms):
            raise PicassoError(
                f"a curve has {len(self.ms)} times for sizes {str(self.sent_bytes)[:60]}, expected "
                "ascending sizes with one time each"
            )

    @staticmethod
    def fit(sent_bytes: Sequence[int], ms: Sequence[float]) -> Curve:
        """Fits the line to measured points; refuses sizes that do not ascend, and times of 0."""
        if not _are_points(sent_bytes, ms) or min(ms) <= 0:
            raise PicassoError(
                f"expected ascending sizes with one time above 0 each, got sizes {list(sent_bytes)}"
                f" and times {list(ms)}; measure the curve again"
            )
        x, t = np.asarray(sent_bytes, dtype=float), np.asarray(ms, dtype=float)
        # divided by the times, so that residuals are relative errors; one point is a pure slope
        design = np.stack([1 / t if len(t) > 1 else 0 * t, x / t], axis=1)
        latency, slope = map(float, non_negative_least_squares(design, np.ones_like(t)))
        errors = np.abs(latency + slope * x - t) / t
        return Curve(
            sent_bytes=tuple(int(n) for n in sent_bytes),
            ms=tuple(float(value) for value in ms),
            latency_ms=latency,
            ms_per_byte=slope,
            median_error=float(median(errors)),
            worst_error=float(errors.max()),
        )

    @staticmethod
    def line(latency_ms: float, gbytes_per_s: float) -> Curve:
        """Returns a curve with a given latency and bandwidth, without measured points."""
        slope = _BYTES_PER_MS_TO_GB_PER_S / gbytes_per_s
        return Curve(
            sent_bytes=(0,),
            ms=(latency_ms,),
            latency_ms=latency_ms,
            ms_per_byte=slope,
            median_error=0.0,
            worst_error=0.0,
        )

    @property
    def gbytes_per_s(self) -> float:
        """Bandwidth of the fitted line, GB/s (10^9 bytes); infinite if the slope is 0."""
        return _BYTES_PER_MS_TO_GB_PER_S / self.ms_per_byte if self.ms_per_byte else float("inf")

    @property
    def _last_ms_per_byte(self) -> float:
        """Slope between the two largest sizes, which latency hardly affects; the slope of the line
        if time does not grow there."""
        if len(self.ms) < 2 or self.ms[-1] <= self.ms[-2]:
            return self.ms_per_byte
        return (self.ms[-1] - self.ms[-2]) / (self.sent_bytes[-1] - self.sent_bytes[-2])

    def ms_at(self, num_bytes: float) -> float:
        """Interpolates the time of a size, in milliseconds.

        Sizes below the first point take the time of the first point; sizes above the last point
        are extrapolated.
        """
        beyond = num_bytes - self.sent_bytes[-1]
        if beyond > 0:
            return self.ms[-1] + beyond * self._last_ms_per_byte
        return float(np.interp(num_bytes, self.sent_bytes, self.ms))


def _are_points(sent_bytes: Sequence[int], ms: Sequence[float]) -> bool:
    """Whether there is a time for each size, and sizes ascend."""
    ascending = all(a < b for a, b in pairwise(sent_bytes))
    return bool(sent_bytes) and len(sent_bytes) == len(ms) and ascending
