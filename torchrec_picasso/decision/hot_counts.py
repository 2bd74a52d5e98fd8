"""How many rows of each table are hot, under the schedule that will run.

A row's gain from being hot does not depend on other rows, but for the latencies that all share, so
hot sets are thresholds on the gain. What a row gains is a difference of two steps: fewer rows to
fetch, to send back and to update at home, fewer of them dirty, against sums over all ranks and an
update on each of them. Where the exchange is hidden, a row that is fetched costs little, and one
that every rank updates costs as much as ever: then none is hot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from torchrec_picasso.cost.exchange_totals import HotColdTotals, hot_cold_totals
from torchrec_picasso.cost.marginal import num_packs
from torchrec_picasso.cost.step_cost import StepCost
from torchrec_picasso.cost.step_price import StepPrice, StepPricer
from torchrec_picasso.cost.table_work import TableWork

__all__ = ["Beside", "best_hot_counts"]

_HOT_MARGIN = 0.005
"""A larger hot set must be predicted to take this share less than a smaller one."""
_SIZES = (0.0, 1 / 16, 1 / 4, 1 / 2, 3 / 4, 1.0)
"""Parts of the rows with a gain that are tried as hot set."""
_MOVED_SHARE = 0.1
"""Of a batch's rows: the step by which slopes are taken."""


@dataclass(frozen=True, kw_only=True)
class Beside:
    """What else is in the step than tables that travel as rows.

    Args:
        bags: Totals of tables that travel as bags.
        stock: Stock tables, nothing hidden.
        uneven_bags: Load of the busiest home of bags over the mean.
        num_bag_waves: Waves that bags travel in.
        num_packs: Packs of the tables that travel as bags.
    """

    bags: HotColdTotals = field(default_factory=HotColdTotals)
    stock: StepCost = field(default_factory=StepCost)
    uneven_bags: float = 1.0
    num_bag_waves: int = 1
    num_packs: int = 0


def best_hot_counts(
    works: Sequence[TableWork],
    pricer: StepPricer,
    replica_budget_bytes: float = float("inf"),
    may_have_hot_rows: Sequence[bool] | None = None,
    beside: Beside | None = None,
) -> list[int]:
    """How many rows of each table of one exchange should be hot.

    Args:
        works: The tables.
        pricer: Prices the step.
        replica_budget_bytes: Memory per rank that replicas may take.
        may_have_hot_rows: Which tables may have any; ``None`` = all.
        beside: What else is in the step.

    Returns:
        Hot rows of each table, its most frequent ones; possibly all 0.
    """
    none_hot = [0] * len(works)
    allowed = may_have_hot_rows or [True] * len(works)
    if not any(allowed) or pricer.world_size == 1:
        return none_hot
    slopes = _Slopes(works, pricer, beside or Beside())
    rows_with_gain = _rows_by_gain(works, allowed, slopes)
    best, best_ms = none_hot, slopes.base.step_ms
    if not rows_with_gain.rows_G.size:
        return none_hot
    for size in _SIZES[1:]:
        tried = _prefix(rows_with_gain, works, size, replica_budget_bytes)
        ms = slopes.price(hot_cold_totals(works, tried)).step_ms
        if ms < best_ms * (1 - _HOT_MARGIN):
            best, best_ms = tried, ms
    return best


class _Slopes:
    """What a row more or less of a kind changes in a step without hot rows."""

    def __init__(self, works: Sequence[TableWork], pricer: StepPricer, beside: Beside) -> None:
        self.pricer, self._beside = pricer, beside
        self._packs = num_packs(works) + beside.num_packs
        self.totals = hot_cold_totals(works, [0] * len(works))
        self.base = self.price(self.totals)
        self.rows = max(1.0, _MOVED_SHARE * self.totals.unique)
        self.dim = self.totals.unique_elements / max(self.totals.unique, 1e-9)

    def price(self, totals: HotColdTotals, pieces: Sequence[int] | None = None) -> StepPrice:
        """The step with some totals of the tables that travel as rows."""
        return self.pricer.price(
            totals.plus(self._beside.bags),
            self._beside.stock,
            num_packs=self._packs,
            uneven_bags=self._beside.uneven_bags,
            num_bag_waves=self._beside.num_bag_waves,
            pieces=pieces,
        )

    def of(self, sign: float, **fields: float) -> float:
        """Milliseconds per row of a step with some thousand rows more (or fewer)."""
        moved = HotColdTotals(**{name: self.rows * x for name, x in fields.items()})
        price = self.price(self.totals.plus(moved, sign), [self.base.num_micro_batches])
        return float((price.step_ms - self.base.step_ms) * sign / self.rows)

    def of_elements(self, name: str, early: Sequence[str] = ()) -> float:
        """Milliseconds per element that is fetched, or is dirty, less than now."""
        total = getattr(self.totals, name)
        if total <= 0:
            return 0.0
        # the first parts of a batch lose as much as all of it
        fields = {field: self.dim * getattr(self.totals, field) / total for field in early}
        return max(0.0, self.of(-1, **{name: self.dim}, **fields)) / self.dim


@dataclass(frozen=True)
class _RowGroups:
    """Rows of one table with the same count, by what each gains from being hot; G groups.

    Args:
        tables_G: Which table.
        rows_G: How many rows.
    """

    tables_G: np.ndarray
    rows_G: np.ndarray


def _rows_by_gain(
    works: Sequence[TableWork], allowed: Sequence[bool], slopes: _Slopes
) -> _RowGroups:
    """Groups of rows with a gain, largest first, of the tables that may have hot rows.

    A cold row costs by how often one rank uses it, and by how often it is dirty then; a hot row by
    how often any rank uses it.
    """
    pricer, dim = slopes.pricer, slopes.dim
    cold_row_ms = slopes.of(-1, cold=1.0)
    cold_element_ms = slopes.of_elements(
        "cold_elements", ("cold_early0", "cold_early1", "cold_early2")
    )
    dirty_element_ms = slopes.of_elements(
        "dirty_elements", ("dirty_early0", "dirty_early1", "dirty_early2")
    )
    updated_row_ms = slopes.of(-1, updated=1.0) / pricer.world_size
    # with a reduction already running, so that its latency is not charged to each row
    latency_ms = pricer.curves.ms("all_reduce", 0, pricer.world_size)
    hot_row_ms = slopes.of(1, touched=1.0)
    all_of_it_ms = slopes.of(1, touched_elements=dim) - latency_ms / slopes.rows
    hot_element_ms = max(0.0, all_of_it_ms) / max(dim, 1e-9)
    bit_ms = max(0.0, slopes.of(1, hot=1.0))
    tables, rows_of, gains, positions = [], [], [], []
    for table, work in enumerate(works):
        dim = work.load.dim
        cold_ms = cold_row_ms + dim * cold_element_ms
        hot_ms = hot_row_ms + dim * hot_element_ms - updated_row_ms
        dirty_ms = dim * dirty_element_ms
        gain_K = work.used_K * (cold_ms + work.touched_K * dirty_ms) - work.touched_K * hot_ms
        gain_K -= bit_ms
        position_g = np.flatnonzero((gain_K > 0) & allowed[table])
        tables.append(np.full(position_g.size, table))
        positions.append(position_g)
        gains.append(gain_K[position_g])
        rows_of.append(work.rows_K[position_g])
    tables_G, rows_G = np.concatenate(tables), np.concatenate(rows_of)
    order_G = np.lexsort((np.concatenate(positions), tables_G, -np.concatenate(gains)))
    return _RowGroups(tables_G[order_G], rows_G[order_G])


def _prefix(
    groups: _RowGroups, works: Sequence[TableWork], share: float, budget_bytes: float
) -> list[int]:
    """Hot counts when the first ``share`` of the rows with a gain are hot, as memory allows."""
    rows_G, tables_G = groups.rows_G, groups.tables_G
    bytes_G = np.array([work.load.row_bytes for work in works])[tables_G]
    wanted = share * sum(rows_G.tolist())
    left_G1 = np.subtract.accumulate([wanted, *rows_G])
    budget_G1 = np.subtract.accumulate([budget_bytes, *(rows_G * bytes_G)])
    whole_G = (rows_G <= left_G1[:-1]) & (rows_G <= budget_G1[:-1] / bytes_G) & (rows_G >= 1)
    num_whole = len(rows_G) if whole_G.all() else int(whole_G.argmin())
    counts = np.bincount(tables_G[:num_whole], rows_G[:num_whole], minlength=len(works))
    wanted, budget_bytes = float(left_G1[num_whole]), float(budget_G1[num_whole])
    for rows, table, row_bytes in zip(
        rows_G[num_whole:].tolist(), tables_G[num_whole:].tolist(), bytes_G[num_whole:].tolist()
    ):
        taken = min(rows, wanted, budget_bytes / row_bytes)
        if taken < 1:
            break
        counts[table] += taken
        wanted -= taken
        budget_bytes -= taken * row_bytes
    return [int(count) for count in counts]
