"""Cost of local work on one rank: of the embedding part, and of the dense part of the model.

The cost of each phase of the embedding part (input dist, forward, backward with the update) is
linear in the work. The coefficients are fitted to measured steps of the real sharded modules, so
they include Python, page faults and cache misses. ``torchrec-picasso calibrate`` measures on all
ranks at once, so that ranks that share cores slow each other down as in training.

Shape letters: M measurements, X terms.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import combinations, pairwise

import numpy as np

from torchrec_picasso.cost.table_work import Summable
from torchrec_picasso.errors import PicassoError

PHASES = ("input_dist", "forward", "backward")
"""Phases of a step, in order; ``backward`` includes the update of the tables."""

# By default glibc keeps up to this much freed memory for the next step. Memory beyond it is mapped
# again in every step, with a page fault per 4 KiB (mallopt(3), DEFAULT_MMAP_THRESHOLD_MAX on 64
# bits). Ranks that the command line starts keep all of it (``KEEPS_FREED_MEMORY``).
_KEPT_BYTES = 32 << 20
_MOST_PAGED_NS = 8.0
"""Bound of a fitted cost of page faults: a fresh buffer takes 1.6 ns an element (docs/dev/log.md,
2026-11-28), and a phase touches several for each element it counts. Buffers of probes hardly exceed
the kept memory where a slow network leaves them few samples: a fit of noise gave 37 ns, so 460
fields, whose buffers are much larger, got stock tables."""
_ELEMENT_BYTES = 4

_SCALES = (1.0, 1e-3, *[1e-6] * 9, 1.0)
"""Milliseconds in the unit of each coefficient: ms, us, ns."""
_FORWARD_SHARE = 1 / 3
"""Assumed share of forward: backward has two matrix products for each product of forward."""


@dataclass(frozen=True, kw_only=True)
class LocalWork(Summable):
    """The work of one rank in one phase of a step."""

    calls: float = 1.0  # sharded modules: stock tables of each sharding type count as one
    features: float = 0.0
    lookups: float = 0.0
    bag_lookups: float = 0.0  # of owner-pooled tables: ids to send, and to sort in backward
    rows: float = 0.0  # rows that are fetched, or whose gradients are summed
    lookup_elements: float = 0.0  # lookups x dim
    bag_elements: float = 0.0  # pooled vectors x dim
    row_elements: float = 0.0  # rows x dim
    buffer_elements: float = 0.0  # elements of the large buffers that the phase allocates
    updated: float = 0.0  # home rows and replicas that the optimizer updates on this rank
    hashed: float = 0.0  # :func:`.stock.hashed_work` of stock's sequences
    packs: float = 0.0  # packs of the exchange after the first

    def terms(self) -> tuple[float, ...]:
        """Returns the factors of the coefficients of :class:`PhaseCost`, whose fields have the
        order of these; products are in ms."""
        paged_elements = max(0.0, self.buffer_elements - _KEPT_BYTES / _ELEMENT_BYTES)
        numbers = vars(self) | {"buffer_elements": paged_elements}
        return tuple(number * scale for number, scale in zip(numbers.values(), _SCALES))


@dataclass(frozen=True, kw_only=True)
class PhaseCost:
    """Coefficients of one phase, all at least 0."""

    fixed_ms: float = 0.0  # per call
    feature_us: float = 0.0
    lookup_ns: float = 0.0
    bag_lookup_ns: float = 0.0
    row_ns: float = 0.0
    lookup_element_ns: float = 0.0  # per lookup and column
    bag_element_ns: float = 0.0  # per pooled vector and column
    row_element_ns: float = 0.0  # per row and column
    paged_element_ns: float = 0.0  # added per buffer element beyond the kept memory
    update_ns: float = 0.0  # per updated row, for any dim
    hash_ns: float = 0.0  # per unit of ``hashed``
    pack_ms: float = 0.0  # per further pack

    def ms(self, work: LocalWork) -> float:
        """Returns the milliseconds of the phase."""
        return sum(self.split_ms(work))

    def split_ms(self, work: LocalWork) -> tuple[float, float, float]:
        """Returns the milliseconds per call, for lookups, and for rows; page faults count for
        lookups, because micro-batches reduce the buffers of lookups."""
        ms = {term: getattr(self, term) * x for term, x in zip(_TERMS, work.terms())}
        call_ms = ms["fixed_ms"] + ms["feature_us"] + ms["pack_ms"]
        rows_ms = ms["row_ns"] + ms["row_element_ns"] + ms["update_ns"] + ms["hash_ns"]
        return call_ms, sum(ms.values()) - call_ms - rows_ms, rows_ms

    @staticmethod
    def fit(works: Sequence[LocalWork], ms: Sequence[float]) -> PhaseCost:
        """Fits non-negative coefficients to measurements, minimizing relative errors.

        Raises PicassoError if there are no measurements, or a time is not above 0.
        """
        if not works or len(works) != len(ms) or min(ms) <= 0:
            raise PicassoError(
                f"expected one time above 0 for each of {len(works)} measurements, got {list(ms)}; "
                "measure again"
            )
        times_M = np.asarray(ms, dtype=float)
        # divided by the times, so that the target is 1 and residuals are relative errors
        design_MX = np.array([work.terms() for work in works]) / times_M[:, None]
        target_M = np.ones(len(works))
        found_X = non_negative_least_squares(design_MX, target_M)
        if found_X[_PAGED] > _MOST_PAGED_NS:
            paged_M = _MOST_PAGED_NS * design_MX[:, _PAGED]
            design_MX[:, _PAGED] = 0.0
            found_X = non_negative_least_squares(design_MX, target_M - paged_M)
            found_X[_PAGED] = _MOST_PAGED_NS
        return PhaseCost(**dict(zip(_TERMS, map(float, found_X))))


_TERMS = tuple(term.name for term in fields(PhaseCost))
_PAGED = _TERMS.index("paged_element_ns")


@dataclass(frozen=True, kw_only=True)
class SideCosts:
    """Costs of all phases for one kind of sharding."""

    input_dist: PhaseCost = field(default_factory=PhaseCost)
    forward: PhaseCost = field(default_factory=PhaseCost)
    backward: PhaseCost = field(default_factory=PhaseCost)
    step_ms: float = 0.0
    """What a step costs once, beside tables and dense part: the pipeline's own work, the dense
    optimizer, waits for small messages."""

    @property
    def call_ms(self) -> float:
        """Cost of a module, whatever its tables."""
        return sum(getattr(self, phase).fixed_ms for phase in PHASES)

    @property
    def once_ms(self) -> float:
        """Cost of a step with one module, whatever its tables."""
        return self.step_ms + self.call_ms


# Calibrated with 2 ranks on 2 cores of an Intel Xeon: FP32, row-wise Adagrad, torch 2.13,
# fbgemm-gpu-cpu 1.8. The update of a stock row takes 0.6 to 0.8 us for any dim, because FBGEMM's
# CPU kernel mixes SSE and AVX instructions. Bags had one lookup; with five lookups, elements cost
# per bag (docs/dev/log.md, 2026-11-24): what was measured per lookup element is assumed per bag
# element. Sequences were measured on AMD EPYCs (docs/dev/log.md, 2026-11-27, 28).
_ASSUMED_HOT_COLD = SideCosts(
    input_dist=PhaseCost(fixed_ms=2.9, feature_us=18, lookup_ns=115, bag_lookup_ns=17, row_ns=60),
    forward=PhaseCost(
        fixed_ms=0.9, lookup_ns=1, row_ns=46, bag_element_ns=1.0, row_element_ns=2.0, pack_ms=0.3
    ),
    backward=PhaseCost(
        fixed_ms=1.6,
        lookup_ns=16,
        bag_lookup_ns=57,
        bag_element_ns=0.5,
        row_element_ns=3.7,
        update_ns=150,
        pack_ms=0.3,
    ),
)
_ASSUMED_STOCK = SideCosts(
    input_dist=PhaseCost(fixed_ms=1.6, feature_us=5.5, lookup_ns=17),
    forward=PhaseCost(
        fixed_ms=1.5, feature_us=3.8, lookup_ns=21, bag_element_ns=3.0, paged_element_ns=4.0
    ),
    backward=PhaseCost(
        fixed_ms=0.7,
        feature_us=10,
        lookup_ns=60,
        row_ns=50,
        bag_element_ns=2.0,
        paged_element_ns=3.1,
        update_ns=600,
        hash_ns=7,
    ),
)

# Calibrated with 2 ranks on 2 idle cores of an AMD EPYC, same versions; whole steps (step_ms) by
# the sweep of docs/dev/log.md, 2026-11-24. Its update of a stock row takes 17 to 38 ns.
_NEWER_HOT_COLD = SideCosts(
    input_dist=PhaseCost(
        fixed_ms=1.5,
        feature_us=8.7,
        lookup_ns=26,
        bag_lookup_ns=2.8,
        bag_element_ns=0.06,
        update_ns=31,
        pack_ms=0.2,
    ),
    forward=PhaseCost(
        fixed_ms=0.35,
        lookup_element_ns=0.38,
        row_element_ns=0.76,
        paged_element_ns=2.0,
        update_ns=40,
        pack_ms=0.15,
    ),
    backward=PhaseCost(
        fixed_ms=0.68,
        lookup_ns=7.6,
        bag_lookup_ns=13,
        bag_element_ns=0.06,
        row_element_ns=3.0,
        paged_element_ns=0.62,
        update_ns=42,
        pack_ms=0.6,
    ),
    step_ms=5.2,
)
_NEWER_STOCK = SideCosts(
    input_dist=PhaseCost(
        fixed_ms=0.78, feature_us=1.5, lookup_ns=2.8, bag_element_ns=0.06, update_ns=3.1
    ),
    forward=PhaseCost(
        fixed_ms=0.58, lookup_ns=4.2, bag_element_ns=1.9, paged_element_ns=2.3, update_ns=17
    ),
    backward=PhaseCost(
        fixed_ms=0.22,
        feature_us=7.6,
        lookup_ns=7.9,
        bag_element_ns=1.2,
        row_element_ns=0.37,
        paged_element_ns=1.3,
        update_ns=38,
        hash_ns=7,
    ),
    step_ms=4.3,
)


@dataclass(frozen=True, kw_only=True)
class LocalCosts:
    """Local costs of this package's exchange, and of TorchRec's fused table-wise lookup; the
    defaults, which are not measured, are those of one core of a server CPU."""

    hot_cold: SideCosts = _ASSUMED_HOT_COLD
    stock: SideCosts = _ASSUMED_STOCK
    measured: bool = False

    @staticmethod
    def newer_core() -> LocalCosts:
        """Returns those of a core on which stock tables are faster relative to this package's."""
        return LocalCosts(hot_cold=_NEWER_HOT_COLD, stock=_NEWER_STOCK)


@dataclass(frozen=True, kw_only=True)
class DenseTimes:
    """The dense part of one step on one rank: forward and backward without tables."""

    forward_ms: float = 0.0
    backward_ms: float = 0.0
    parameter_bytes: float = 0.0
    """Bytes of the parameters whose gradients are summed over ranks."""
    batch_size: int = 0
    """Number of samples of the measured step; 0 = the planned number."""
    in_parts: tuple[tuple[int, float, float], ...] = ()
    """Measured times of the same samples in micro-batches, which fit into caches: (number of
    micro-batches, forward ms, backward ms), ascending."""

    def __post_init__(self) -> None:
        counts = [1, *(count for count, _, _ in self.in_parts)]
        if any(a >= b for a, b in pairwise(counts)):
            raise PicassoError(
                f"dense.in_parts is {str(self.in_parts)[:60]}, expected ascending numbers of "
                "micro-batches from 2, each with two times"
            )

    @staticmethod
    def from_total(total_ms: float, parameter_bytes: float = 0.0) -> DenseTimes:
        """Splits a known total time of forward and backward."""
        forward_ms = _FORWARD_SHARE * total_ms
        return DenseTimes(
            forward_ms=forward_ms,
            backward_ms=total_ms - forward_ms,
            parameter_bytes=parameter_bytes,
        )

    @property
    def total_ms(self) -> float:
        """Forward and backward, in milliseconds."""
        return self.forward_ms + self.backward_ms

    def cut(self, num_micro_batches: int) -> DenseTimes:
        """Returns the times of the same samples in micro-batches, interpolated if not measured."""
        known = ((1, self.forward_ms, self.backward_ms), *self.in_parts)
        counts, *columns_ms = zip(*known)
        # linear in the logarithm of the number; constant beyond the largest measured number
        x, xs = math.log(num_micro_batches), np.log(counts)
        forward_ms, backward_ms = (float(np.interp(x, xs, y_ms)) for y_ms in columns_ms)
        return replace(self, forward_ms=forward_ms, backward_ms=backward_ms, in_parts=())

    def at(self, batch_size: int) -> DenseTimes:
        """Returns the times of another number of samples, in proportion."""
        if not self.batch_size or self.batch_size == batch_size:
            return self
        factor = batch_size / self.batch_size
        in_parts = tuple((count, a * factor, b * factor) for count, a, b in self.in_parts)
        return replace(
            self,
            forward_ms=self.forward_ms * factor,
            backward_ms=self.backward_ms * factor,
            batch_size=batch_size,
            in_parts=in_parts,
        )


def non_negative_least_squares(a_MX: np.ndarray, b_M: np.ndarray) -> np.ndarray:
    """Minimizes ``|a x - b|`` over ``x >= 0``: the best set of terms, of all 2^X sets."""
    num_terms = a_MX.shape[1]
    # columns are scaled to length 1, because terms differ by orders of magnitude
    scale_X = np.linalg.norm(a_MX, axis=0)
    used = np.flatnonzero(scale_X).tolist()
    scale_X[scale_X == 0] = 1.0
    a_MX = a_MX / scale_X
    best_X, least = np.zeros(num_terms), float(np.linalg.norm(b_M))
    for size in range(1, len(used) + 1):
        for terms in map(list, combinations(used, size)):
            x = np.zeros(num_terms)
            x[terms] = np.linalg.lstsq(a_MX[:, terms], b_M, rcond=None)[0]
            distance = float(np.linalg.norm(a_MX @ x - b_M))
            if (x >= 0).all() and distance < least:
                best_X, least = x, distance
    return best_X / scale_X
