"""Cost of local work: milliseconds per row, lookup and element.

The cost of each phase of a step (input dist, forward, backward with the update) is linear in the
work. The coefficients are fitted to measured steps of the real sharded modules on one rank, so they
include Python, page faults and cache misses. ``torchrec-picasso calibrate`` measures on all ranks
at once, so that ranks that share cores slow each other down as in training.

Shape letters: M measurements, X terms.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations

import numpy as np

from torchrec_picasso.errors import PicassoError

__all__ = ["PHASES", "LocalCosts", "LocalWork", "PhaseCost", "SideCosts"]

PHASES = ("input_dist", "forward", "backward")
"""Phases of a step, in order; ``backward`` includes the update of the tables."""

_TERMS = (
    "fixed_ms",
    "feature_us",
    "lookup_ns",
    "row_ns",
    "lookup_element_ns",
    "row_element_ns",
    "paged_element_ns",
    "update_ns",
)

# glibc keeps up to this much freed memory for the next step. Memory beyond it is mapped again in
# every step, with a page fault per 4 KiB (mallopt(3), DEFAULT_MMAP_THRESHOLD_MAX on 64 bits).
_KEPT_BYTES = 32 << 20
_ELEMENT_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class LocalWork:
    """The work of one rank in one phase of a step.

    Args:
        features: Number of features.
        lookups: Lookups of the rank's batch.
        rows: Rows that are fetched, or whose gradients are summed.
        lookup_elements: Lookups x dim.
        row_elements: Rows x dim.
        buffer_elements: Elements of the large buffers that the phase allocates.
        updated: Rows that the optimizer updates on this rank: distinct rows over all ranks'
            lookups, home rows and replicas.
    """

    features: float = 0.0
    lookups: float = 0.0
    rows: float = 0.0
    lookup_elements: float = 0.0
    row_elements: float = 0.0
    buffer_elements: float = 0.0
    updated: float = 0.0

    def terms(self) -> tuple[float, ...]:
        """Returns the factors of the coefficients in ``_TERMS``, so that products are in ms."""
        return (
            1.0,
            self.features * 1e-3,
            self.lookups * 1e-6,
            self.rows * 1e-6,
            self.lookup_elements * 1e-6,
            self.row_elements * 1e-6,
            max(0.0, self.buffer_elements - _KEPT_BYTES / _ELEMENT_BYTES) * 1e-6,
            self.updated * 1e-6,
        )


@dataclass(frozen=True, kw_only=True)
class PhaseCost:
    """Coefficients of one phase, all at least 0.

    Args:
        fixed_ms: Milliseconds per step.
        feature_us: Microseconds per feature.
        lookup_ns: Nanoseconds per lookup.
        row_ns: Nanoseconds per row.
        lookup_element_ns: Nanoseconds per lookup and column.
        row_element_ns: Nanoseconds per row and column.
        paged_element_ns: Additional nanoseconds per buffer element beyond the kept memory.
        update_ns: Nanoseconds per updated row, for any dim.
        median_error: Median relative error of the fit.
        worst_error: Largest relative error of the fit.
    """

    fixed_ms: float = 0.0
    feature_us: float = 0.0
    lookup_ns: float = 0.0
    row_ns: float = 0.0
    lookup_element_ns: float = 0.0
    row_element_ns: float = 0.0
    paged_element_ns: float = 0.0
    update_ns: float = 0.0
    median_error: float = 0.0
    worst_error: float = 0.0

    def ms(self, work: LocalWork) -> float:
        """Returns the milliseconds of the phase."""
        return sum(getattr(self, term) * x for term, x in zip(_TERMS, work.terms()))

    def split_ms(self, work: LocalWork) -> tuple[float, float, float]:
        """Returns the milliseconds per call, for lookups, and for rows.

        Page faults count for lookups, because micro-batches reduce the buffers of lookups.
        """
        ms = {term: getattr(self, term) * x for term, x in zip(_TERMS, work.terms())}
        call_ms = ms["fixed_ms"] + ms["feature_us"]
        lookups_ms = ms["lookup_ns"] + ms["lookup_element_ns"] + ms["paged_element_ns"]
        return call_ms, lookups_ms, ms["row_ns"] + ms["row_element_ns"] + ms["update_ns"]

    @staticmethod
    def fit(works: Sequence[LocalWork], ms: Sequence[float]) -> PhaseCost:
        """Fits non-negative coefficients to measurements, minimizing relative errors.

        Raises:
            PicassoError: If there are no measurements, or a time is not above 0.
        """
        if not works or len(works) != len(ms) or min(ms) <= 0:
            raise PicassoError(
                f"expected one time above 0 for each of {len(works)} measurements, got {list(ms)}; "
                "measure again"
            )
        times_M = np.asarray(ms, dtype=float)
        # divided by the times, so that the target is 1 and residuals are relative errors
        design_MX = np.array([work.terms() for work in works]) / times_M[:, None]
        found_X = _non_negative_least_squares(design_MX, np.ones(len(works)))
        errors_M = np.abs(design_MX @ found_X - 1)
        return PhaseCost(
            **dict(zip(_TERMS, map(float, found_X))),
            median_error=float(np.median(errors_M)),
            worst_error=float(errors_M.max()),
        )


@dataclass(frozen=True, kw_only=True)
class SideCosts:
    """Costs of all phases for one kind of sharding."""

    input_dist: PhaseCost = field(default_factory=PhaseCost)
    forward: PhaseCost = field(default_factory=PhaseCost)
    backward: PhaseCost = field(default_factory=PhaseCost)


# Calibrated with 2 ranks on 2 cores of an Intel Xeon: FP32, row-wise Adagrad, torch 2.13,
# fbgemm-gpu-cpu 1.8. The update of a stock row takes 0.6 to 0.8 us for any dim, because FBGEMM's
# CPU kernel mixes SSE and AVX instructions.
_ASSUMED_HOT_COLD = SideCosts(
    input_dist=PhaseCost(fixed_ms=2.9, feature_us=18, lookup_ns=115, row_ns=60),
    forward=PhaseCost(
        fixed_ms=0.9, lookup_ns=1, row_ns=46, lookup_element_ns=1.0, row_element_ns=2.0
    ),
    backward=PhaseCost(
        fixed_ms=1.6, lookup_ns=16, lookup_element_ns=0.5, row_element_ns=3.7, update_ns=150
    ),
)
_ASSUMED_STOCK = SideCosts(
    input_dist=PhaseCost(fixed_ms=1.6, feature_us=5.5, lookup_ns=17),
    forward=PhaseCost(
        fixed_ms=1.5, feature_us=3.8, lookup_ns=21, lookup_element_ns=3.0, paged_element_ns=4.0
    ),
    backward=PhaseCost(
        fixed_ms=0.7,
        feature_us=10,
        lookup_ns=60,
        row_ns=50,
        lookup_element_ns=2.0,
        paged_element_ns=3.1,
        update_ns=600,
    ),
)


@dataclass(frozen=True, kw_only=True)
class LocalCosts:
    """Local costs of both kinds of sharding.

    Args:
        hot_cold: Costs of this package's exchange.
        stock: Costs of TorchRec's fused table-wise lookup.
        measured: Whether the costs were measured; the defaults are those of one core of a server
            CPU.
    """

    hot_cold: SideCosts = _ASSUMED_HOT_COLD
    stock: SideCosts = _ASSUMED_STOCK
    measured: bool = False


def _non_negative_least_squares(a_MX: np.ndarray, b_M: np.ndarray) -> np.ndarray:
    """Minimises ``|a x - b|`` over ``x >= 0``: the best set of terms, of all 2^X sets."""
    num_terms = a_MX.shape[1]
    # columns are scaled to length 1, because terms differ by orders of magnitude
    scale_X = np.linalg.norm(a_MX, axis=0)
    scale_X[scale_X == 0] = 1.0
    a_MX = a_MX / scale_X
    best_X, least = np.zeros(num_terms), float(np.linalg.norm(b_M))
    for size in range(1, num_terms + 1):
        for terms in map(list, combinations(range(num_terms), size)):
            x = np.zeros(num_terms)
            x[terms] = np.linalg.lstsq(a_MX[:, terms], b_M, rcond=None)[0]
            distance = float(np.linalg.norm(a_MX @ x - b_M))
            if (x >= 0).all() and distance < least:
                best_X, least = x, distance
    return best_X / scale_X
