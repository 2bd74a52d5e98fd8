"""Measures the local work of a step with the real sharded modules.

On the CPU the timer is the CPU time of the training thread, which excludes waiting for the network,
scaled by the slowdown of a busy loop on all ranks that share the cores (:mod:`.pace`). An
accelerator has no such timer: there each rank is a group of its own and waits for none. The probes
vary tables, batch size, columns, repetition, ids per bag and pooling, so that each coefficient of
:class:`.PhaseCost` can be fitted.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from statistics import median

import torch
import torch.distributed as dist

from torchrec_picasso.app.runs.exchange_step import ExchangeStep, make_batch, table_collection
from torchrec_picasso.app.runs.pace import Pace, times_fitting
from torchrec_picasso.app.runs.placements import make_placement, with_form
from torchrec_picasso.cost import hot_cold, stock
from torchrec_picasso.cost.hot_cold import HotColdTotals
from torchrec_picasso.cost.local import LocalCosts, LocalWork, PhaseCost, SideCosts
from torchrec_picasso.cost.stock import StockTotals
from torchrec_picasso.cost.table_work import TableLoad, TableWork
from torchrec_picasso.placement import FORMS, Form

_BUDGET_S = 13.0
_WARMUP_STEPS, _PASSES = 2, 4
"""Steps of a probe before and within the passes over all probes: memory on a shared machine is up
to four times as slow for seconds, which shall disturb no probe alone."""
_FEW, _GROWTH = 1 / 16, 4
"""Share of its samples that a probe begins with, and keeps on a slow core or network; where time
allows, it grows by this factor."""
_TABLES_BYTES = 1 << 25
"""Of each module, over its ranks: the modules of a pass together are larger than caches."""
_ELEMENT_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class _Probe:
    """Tables of one module, and the ids of a rank's batch."""

    tables: int
    batch_size: int
    dim: int
    rows_per_lookup: float
    """Rows in use of each table, over the lookups of a batch; a small ratio repeats ids."""
    ids: int = 1
    """Lookups of a bag, or of a sequence."""
    is_sequence: bool = False
    """Whether the output has the row of each lookup, not their sum."""
    packs: int = 1
    """Packs of the tables: columns are 1, 2, .. times ``dim``."""

    @property
    def used_rows(self) -> int:
        """Rows in use of each table."""
        return max(1, round(self.batch_size * self.ids * self.rows_per_lookup))

    @property
    def table_dims(self) -> tuple[int, ...]:
        """Columns of each table."""
        return tuple(self.dim * (1 + t * self.packs // self.tables) for t in range(self.tables))

    def part(self, share: float) -> _Probe:
        """The probe with this share of the samples and of the rows in use."""
        return replace(self, batch_size=round(self.batch_size * share))

    @property
    def module_key(self) -> tuple[bool, tuple[int, ...]]:
        """Probes with an equal one can share a sharded module."""
        return self.is_sequence, self.table_dims

    @property
    def forms(self) -> tuple[Form | None, ...]:
        """Forms of its tables that are measured; ``None`` = stock ones, table-wise."""
        return ("rows", None) if self.is_sequence else ("rows", "bags", None)

    @property
    def table_rows(self) -> int:
        """Rows of each table."""
        return max(self.used_rows, _TABLES_BYTES // (sum(self.table_dims) * _ELEMENT_BYTES))


PROBES = (
    _Probe(tables=4, batch_size=256, dim=16, rows_per_lookup=1),
    _Probe(tables=4, batch_size=64, dim=32, rows_per_lookup=1, ids=20, is_sequence=True),
    _Probe(tables=4, batch_size=512, dim=32, rows_per_lookup=1, ids=20, is_sequence=True),
    _Probe(tables=100, batch_size=256, dim=16, rows_per_lookup=1),
    _Probe(tables=24, batch_size=256, dim=8, rows_per_lookup=1, packs=4),
    _Probe(tables=60, batch_size=1024, dim=32, rows_per_lookup=2),
    _Probe(tables=26, batch_size=4096, dim=16, rows_per_lookup=4),
    _Probe(tables=26, batch_size=4096, dim=16, rows_per_lookup=1 / 8),
    _Probe(tables=26, batch_size=4096, dim=64, rows_per_lookup=1),
    _Probe(tables=26, batch_size=1024, dim=64, rows_per_lookup=1 / 4, ids=5),
    _Probe(tables=26, batch_size=512, dim=128, rows_per_lookup=4),
    _Probe(tables=26, batch_size=2048, dim=128, rows_per_lookup=1 / 8),
    _Probe(tables=26, batch_size=1024, dim=128, rows_per_lookup=1, ids=5),
    _Probe(tables=40, batch_size=1024, dim=8, rows_per_lookup=1, ids=5, packs=4),
    _Probe(tables=40, batch_size=2048, dim=8, rows_per_lookup=1 / 4, ids=10, packs=4),
)
"""Those with the same tables follow each other and share a sharded module. The last ones get what
time the others leave. The very last has as many lookups as a large batch: without it, bags of 40
tables and 4,096 samples were predicted to take 0.95 of stock's local work, and took 1.1 to 1.3."""
NUM_CALLS = _PASSES * sum(len(probe.forms) for probe in PROBES)
"""How often :func:`measure_local_costs` calls ``between``."""


def measure_local_costs(
    device: torch.device | None = None,
    between: Callable[[], None] = lambda: None,
    pace: Pace | None = None,
    budget_s: float = _BUDGET_S,
) -> LocalCosts:
    """Fits the local costs of hot/cold and stock sharding; all ranks return those of the slowest.

    Collective: every rank of the default process group calls this, in the same order. The tables of
    all probes are in memory at once: with batches about 1 GB on each of two ranks of the CPU, less
    on each of more; on each rank of an accelerator all tables.

    Args:
        device: Device of the tables; CPU if ``None``.
        between: Called after each timed step of a probe, on every rank.
        pace: Takes a window before each pass; ``None`` = one of its own.
        budget_s: Duration of all probes, seconds, without ``between``. A probe takes an equal share
            of what sharding and earlier probes leave, with fewer samples if need be: a sixteenth at
            least, whatever is left.

    Raises:
        PicassoError: If a phase took no time by the timer.
    """
    pace = pace or Pace()
    device = device or torch.device("cpu")
    if device.type == "cpu":
        pg, clock = dist.group.WORLD, time.thread_time
        assert pg is not None, "init_process_group comes first"
    else:
        groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
        pg, clock = groups[dist.get_rank()], time.perf_counter
    end_s = time.perf_counter() + budget_s
    timed = list(_sharded(pg, device, clock))
    reserved_s = 0.0
    for place, own in enumerate(timed):
        left_s = end_s - time.perf_counter() - reserved_s
        own.grow(left_s / (len(timed) - place))
        reserved_s += _PASSES * own.step_s
    for _ in range(_PASSES):
        pace.sample()
        for own in timed:
            own.take()
            between()
    slowdown = pace.slowdown() if device.type == "cpu" else 1.0
    measured: dict[bool, list[tuple[Sequence[LocalWork], list[float]]]] = {True: [], False: []}
    """By whether tables are hot/cold."""
    for own in timed:
        measured[own.form is not None].append((own.works(pg.size()), own.phases_ms()))
    del timed, own
    gc.collect()  # frees the tables
    costs = {}
    for is_hot_cold, results in measured.items():
        works, times = zip(*results)
        input_dist, forward, backward = (
            PhaseCost.fit(phase_works, [slowdown * ms for ms in phase_ms])
            for phase_works, phase_ms in zip(zip(*works), zip(*times))
        )
        costs[is_hot_cold] = SideCosts(input_dist=input_dist, forward=forward, backward=backward)
    return LocalCosts(hot_cold=costs[True], stock=costs[False], measured=True)


def _sharded(
    pg: dist.ProcessGroup, device: torch.device, clock: Callable[[], float]
) -> Iterator[_TimedProbe]:
    """Shards the tables of all probes; yields each probe with its own. Collective."""
    for _, same_tables in groupby(PROBES, lambda probe: probe.module_key):
        probes = list(same_tables)
        for form in probes[0].forms:
            step = _exchange_step(form, probes, pg, device, clock)
            for probe in probes:
                yield _TimedProbe(step, probe, form, device)


def _exchange_step(
    form: Form | None,
    probes: Sequence[_Probe],
    pg: dist.ProcessGroup,
    device: torch.device,
    clock: Callable[[], float],
) -> ExchangeStep:
    """Shards the tables of probes that have the same ones."""
    rows, dims = max(probe.table_rows for probe in probes), probes[0].table_dims
    is_sequence = probes[0].is_sequence
    collection = table_collection([rows] * len(dims), dims, is_sequence=is_sequence)
    batch_size = max(probe.batch_size for probe in probes)
    kind = FORMS[form].sharding_type if form else "table_wise"
    placement = make_placement(kind, collection, pg, device_type=device.type, batch_size=batch_size)
    if form:
        placement = with_form(placement, collection, form)
    return ExchangeStep(collection, placement, pg, device, clock)


class _TimedProbe:
    """A probe and the times of its steps. All methods but :meth:`works` are collective.

    Args:
        step: The sharded tables.
        probe: The tables and ids of its batches.
        form: Form of its tables; ``None`` = stock.
        device: Device of its batches.
    """

    def __init__(
        self, step: ExchangeStep, probe: _Probe, form: Form | None, device: torch.device
    ) -> None:
        self.part, self.form = probe, form
        self.step_s = 0.0
        """Of its last step, waits included."""
        self._step, self._device = step, device
        self._generator = torch.Generator().manual_seed(dist.get_rank())
        self._times_ms: list[list[float]] = []
        """Of this rank, by step and phase."""

    def grow(self, budget_s: float) -> None:
        """Warms up, with as many samples as let all passes fit into some seconds."""
        probe, share = self.part, _FEW
        end_s = time.perf_counter() + budget_s

        def warm_up() -> None:
            self.part = probe.part(share)
            self.take()

        def fits(step_s: float) -> bool:
            return times_fitting(end_s - time.perf_counter(), step_s) > _PASSES + 1

        for _ in range(_WARMUP_STEPS):
            warm_up()
        while share < 1 and fits(_GROWTH * self.step_s):
            share *= _GROWTH
            warm_up()
        self._times_ms.clear()

    def take(self) -> None:
        """Takes a step."""
        part = self.part
        shape = part.tables, part.batch_size, part.ids
        ids_TBL = torch.randint(part.used_rows, shape, generator=self._generator)
        ids_TBL *= part.table_rows // part.used_rows  # scatter the rows in use over the table
        dist.barrier()
        start_s = time.perf_counter()
        self._times_ms.append(self._step.run(make_batch(ids_TBL).to(self._device)))
        self.step_s = time.perf_counter() - start_s

    def phases_ms(self) -> list[float]:
        """Ms by phase: the median over steps of the slowest rank."""
        slowest = torch.tensor(self._times_ms, dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return [median(times_ms) for times_ms in slowest.T.tolist()]

    def works(self, num_ranks: int) -> Sequence[LocalWork]:
        """Work of the busiest rank in each phase of a step."""
        return _works(self.part, num_ranks, self.form)


def _works(probe: _Probe, num_ranks: int, form: Form | None) -> Sequence[LocalWork]:
    """Work of the busiest rank in each phase of a step of a probe, as it is priced."""
    bags, lookups = float(probe.batch_size), float(probe.batch_size * probe.ids)
    load = TableLoad(
        name="",
        num_embeddings=probe.used_rows,
        dim=0,
        lookups=lookups,
        bags=bags,
        is_sequence=probe.is_sequence,
    )
    loads = [replace(load, dim=dim) for dim in probe.table_dims]
    works = [TableWork(load, num_ranks) for load in loads]
    uneven = stock.max_over_mean("table_wise", loads, num_ranks)
    if form:
        totals = HotColdTotals.sum(HotColdTotals.from_table(work, 0, form) for work in works)
        ids, *others = hot_cold.local_works(totals, num_packs=probe.packs)
        return [ids, *(work.plus(hot_cold.work_on_bags(totals, uneven)) for work in others)]
    stock_totals = StockTotals.sum(StockTotals.from_table("table_wise", work) for work in works)
    # a rank's rows are those that it updates
    return [replace(work, rows=0.0) for work in stock.local_works(stock_totals, uneven, num_ranks)]
