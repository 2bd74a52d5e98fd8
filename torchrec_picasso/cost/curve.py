"""Time of one collective against bytes: measured points, and the line through them.

Times are read off the points, because links have kinks (socket buffers, token buckets, protocol
switches) that no line follows; the line ``latency + bytes / bandwidth`` and its error tell a reader
what the link is like. The line minimises relative error, since sizes span four decades.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np

from torchrec_picasso.cost.read_numbers import read_dataclass, read_numbers, shown_shortly
from torchrec_picasso.errors import PicassoError

__all__ = ["Curve"]

_BYTES_PER_MS_TO_GB_PER_S = 1e-6


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Milliseconds of a collective against the bytes that its busiest rank sends or receives.

    Args:
        sent_bytes: Measured sizes, ascending, at least one.
        ms: Median time of each, the slowest rank's.
        latency_ms: Of the fitted line, at least 0.
        ms_per_byte: Of the fitted line, at least 0.
        median_error: Median of ``|line - measured| / measured``.
        worst_error: The largest.
    """

    sent_bytes: tuple[int, ...]
    ms: tuple[float, ...]
    latency_ms: float
    ms_per_byte: float
    median_error: float
    worst_error: float

    @staticmethod
    def fit(sent_bytes: Sequence[int], ms: Sequence[float]) -> Curve:
        """Fits the line to measured points.

        Args:
            sent_bytes: Sizes, ascending.
            ms: Their times, above 0.

        Raises:
            PicassoError: If the points are no curve.
        """
        ascending = all(a < b for a, b in pairwise(sent_bytes))
        if not sent_bytes or len(sent_bytes) != len(ms) or not ascending or min(ms) <= 0:
            raise PicassoError(
                f"expected ascending sizes with one time above 0 each, got sizes {list(sent_bytes)}"
                f" and times {list(ms)}; measure the curve again"
            )
        x, t = np.asarray(sent_bytes, dtype=float), np.asarray(ms, dtype=float)
        latency, slope = _relative_least_squares(x, t)
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
    def from_dict(document: Mapping[str, Any], name: str) -> Curve:
        """Reads what ``dataclasses.asdict`` made of it.

        Args:
            document: Its fields.
            name: Of the curve, for messages.

        Raises:
            PicassoError: If a value is no number of at least 0, or the points are no curve.
        """
        sent_bytes, ms = tuple(document["sent_bytes"]), tuple(document["ms"])
        read_numbers((f"{name}.sent_bytes", number) for number in sent_bytes)
        read_numbers((f"{name}.ms", number) for number in ms)
        ascending = all(a < b for a, b in pairwise(sent_bytes))
        if not sent_bytes or len(sent_bytes) != len(ms) or not ascending:
            raise PicassoError(
                f"{name} has {len(ms)} times for sizes {shown_shortly(sent_bytes)}, expected "
                "ascending sizes with one time each"
            )
        return read_dataclass(Curve, document, name, sent_bytes=sent_bytes, ms=ms)

    @staticmethod
    def line(latency_ms: float, gbytes_per_s: float) -> Curve:
        """A curve that was assumed, not measured."""
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
        """Bandwidth of the fitted line, GB/s (10^9 bytes); infinite for a flat one."""
        return _BYTES_PER_MS_TO_GB_PER_S / self.ms_per_byte if self.ms_per_byte else float("inf")

    @property
    def _last_ms_per_byte(self) -> float:
        """Slope at the largest sizes, where latency no longer shows; the line's if that falls."""
        if len(self.ms) < 2 or self.ms[-1] <= self.ms[-2]:
            return self.ms_per_byte
        return (self.ms[-1] - self.ms[-2]) / (self.sent_bytes[-1] - self.sent_bytes[-2])

    def ms_at(self, num_bytes: float) -> float:
        """Time of a size: the first point's below the points, on along the last two beyond them.

        Args:
            num_bytes: Bytes that the busiest rank sends or receives, at least 0.

        Returns:
            Milliseconds.
        """
        right = bisect_right(self.sent_bytes, num_bytes)
        if right == 0:
            return self.ms[0]
        x0, t0 = self.sent_bytes[right - 1], self.ms[right - 1]
        if right == len(self.sent_bytes):
            return t0 + (num_bytes - x0) * self._last_ms_per_byte
        x1, t1 = self.sent_bytes[right], self.ms[right]
        return t0 + (t1 - t0) * (num_bytes - x0) / (x1 - x0)


def _relative_least_squares(x: np.ndarray, t: np.ndarray) -> tuple[float, float]:
    """``latency, slope >= 0`` that minimise the sum of ``((latency + slope x - t) / t)^2``."""
    design = np.stack([1 / t, x / t], axis=1)
    ones = np.ones_like(t)
    latency, slope = np.linalg.lstsq(design, ones, rcond=None)[0]
    if latency < 0 or len(t) == 1:
        latency, slope = 0.0, float((design[:, 1] @ ones) / max(design[:, 1] @ design[:, 1], 1e-30))
    if slope < 0:
        latency, slope = float((design[:, 0] @ ones) / (design[:, 0] @ design[:, 0])), 0.0
    return float(latency), float(slope)
