"""The dense part alone, of pooled models and of models of sequences; probes of local work within
a time, and of whole steps between them."""

import dataclasses
import gc
import itertools
import logging
import math
import time
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from benchmarks.fields.columns import ColumnsWorkload
from benchmarks.fields.question import UNIFORM, Question
from tests.sharding.jobs import make_batch
from tests.sharding.sequence_jobs import SequenceJob, SequenceModel
from torchrec_picasso.app.launch.run_ranks import run_ranks
from torchrec_picasso.app.runs import local_probe, step_probe
from torchrec_picasso.app.runs.dense_probe import measure_dense_of
from torchrec_picasso.app.runs.exchange_step import ExchangeStep
from torchrec_picasso.app.runs.pace import Pace
from torchrec_picasso.app.runs.step_probe import StepProbe
from torchrec_picasso.cost import CommCurves
from torchrec_picasso.cost.hot_cold import _COPY_NS, HotColdTotals, exchange_times
from torchrec_picasso.cost.local import PHASES, DenseTimes, LocalCosts, PhaseCost, SideCosts
from torchrec_picasso.cost.stock import max_over_mean, stock_cost
from torchrec_picasso.cost.table_work import TableLoad, TableWork
from torchrec_picasso.placement import Form

POOLED = Question(model="columns", data=UNIFORM, batch_size=256, max_rows=50, dim=8)
SEQUENCES = SequenceJob(placement={"*": 0})
SLEEP_S = 0.02


class _Slow(nn.Module):
    def __init__(self, model: nn.Module, sleep_s: float) -> None:
        super().__init__()
        self.model, self._sleep_s = model, sleep_s

    def forward(self, batch: object) -> object:
        time.sleep(self._sleep_s)
        return self.model(batch)


def _measure(rank: int, world_size: int) -> tuple[DenseTimes, DenseTimes, int]:
    workload = ColumnsWorkload(POOLED)
    model = workload.model()
    dense = sum(p.numel() * p.element_size() for p in model.over_arch.parameters())
    slow = _Slow(model, SLEEP_S if rank else 0.0)
    pooled = measure_dense_of(slow, workload.training(rank, 1)[0], POOLED.batch_size)
    batch = make_batch(SEQUENCES, rank, 0)
    sequences = measure_dense_of(SequenceModel(SEQUENCES), batch, SEQUENCES.batch_size(rank))
    return pooled, sequences, dense


def test_all_ranks_get_the_times_of_the_slowest() -> None:
    by_rank = run_ranks(_measure, 2, timeout_s=120)
    pooled, sequences, dense_bytes = by_rank[0]
    assert by_rank[1] == by_rank[0]
    assert SLEEP_S * 1e3 <= pooled.forward_ms < 10 * SLEEP_S * 1e3
    assert 0 < pooled.backward_ms < SLEEP_S * 1e3
    assert pooled.parameter_bytes == dense_bytes  # no table is among them
    assert pooled.batch_size == POOLED.batch_size
    ((pieces, forward_ms, _),) = pooled.in_parts  # 256 samples are too few for 16
    assert pieces == 4
    assert forward_ms >= 4 * SLEEP_S * 1e3
    assert min(sequences.forward_ms, sequences.backward_ms) > 0
    assert np.isfinite(sequences.total_ms)
    over = SequenceModel(SEQUENCES).over
    assert sequences.parameter_bytes == sum(p.numel() * 4 for p in over.parameters())


def _probe_in(rank: int, world_size: int, shares_s: list[tuple[float, float]]) -> list[Any]:
    """Samples of a probe's batch, and its steps, by the time that each rank has left."""
    probe = local_probe._Probe(tables=4, batch_size=256, dim=16, rows_per_lookup=1)
    group, found, run = dist.group.WORLD, [], local_probe.ExchangeStep.run
    assert group is not None
    device = torch.device("cpu")
    step = local_probe._exchange_step("rows", [probe], group, device, time.thread_time)
    for share_s in shares_s:
        batches: list[KeyedJaggedTensor] = []

        def counted(step: ExchangeStep, batch: KeyedJaggedTensor) -> list[float]:
            batches.append(batch)  # noqa: B023
            return run(step, batch)

        local_probe.ExchangeStep.run = counted  # type: ignore
        timed = local_probe._TimedProbe(step, probe, "rows", device)
        timed.grow(share_s[rank])
        found.append((timed.part.batch_size, len(batches)))
        timed.take()
        assert min(timed.phases_ms()) > 0
    return found


def test_a_probe_without_time_keeps_few_samples_on_all_ranks() -> None:
    shares_s = [(math.inf, math.inf), (0.0, math.inf), (math.inf, 0.0)]
    by_rank = run_ranks(_probe_in, 2, shares_s, timeout_s=120)
    assert by_rank[0] == by_rank[1] == [(256, 2 + 2), (16, 2), (16, 2)]


class _FakeStep:
    """A second for each sixteen samples, on a clock of its own; times of the phases are given."""

    def __init__(self, times_ms: list[float]) -> None:
        self.now_s, self._times_ms = 0.0, iter(times_ms)
        self.batches: list[KeyedJaggedTensor] = []

    def run(self, batch: KeyedJaggedTensor) -> list[float]:
        self.batches.append(batch)
        self.now_s += batch.stride() / 16
        ms = next(self._times_ms)
        return [ms, 2 * ms, 3 * ms]


def _fake_probe_in(rank: int, world_size: int, own_share_s: float) -> Any:
    """Times of a probe's phases, sizes of its batches, and the ids of the last."""
    probe = local_probe._Probe(tables=4, batch_size=256, dim=16, rows_per_lookup=1)
    # two steps to warm up, one to grow; of the other three either rank is the slowest of some
    step: Any = _FakeStep([50.0, 50.0, 50.0, *([9.0, 1.0, 5.0], [2.0, 8.0, 3.0])[rank]])
    share_s = own_share_s if rank else math.inf
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local_probe, "time", SimpleNamespace(perf_counter=lambda: step.now_s))
        timed = local_probe._TimedProbe(step, probe, "rows", torch.device("cpu"))
        timed.grow(share_s)
        for _ in range(3):
            timed.take()
    assert timed.step_s == 4.0
    assert timed.works(2) == local_probe._works(probe.part(1 / 4), 2, "rows")
    sizes = [batch.stride() for batch in step.batches]
    return timed.phases_ms(), sizes, step.batches[-1].values()


def test_a_probe_grows_where_steps_of_the_next_size_fit_and_takes_the_slowest_rank() -> None:
    # two seconds of warming up, and more than five steps of four each
    (ms, sizes, ids), (other_ms, other_sizes, other_ids) = run_ranks(
        _fake_probe_in, 2, 22.5, timeout_s=120
    )
    assert ms == other_ms == [8.0, 16.0, 24.0]  # the median of 9, 8 and 5
    assert sizes == other_sizes == [16, 16, *[64] * 4]
    assert not torch.equal(ids, other_ids)
    # 64 rows in use, over the whole table
    table_rows = local_probe._TABLES_BYTES // (4 * 16 * 4)
    assert set((ids % (table_rows // 64)).tolist()) == {0}
    assert ids.max() > table_rows / 2


def _sizes_in(rank: int, world_size: int, budgets_s: list[float]) -> list[int]:
    """Samples that a probe grows to within some seconds, by the clock of a fake step."""
    probe = local_probe._Probe(tables=4, batch_size=256, dim=16, rows_per_lookup=1)
    found = []
    for budget_s in budgets_s:
        step: Any = _FakeStep([1.0] * 4)
        with pytest.MonkeyPatch.context() as patch:
            clock = SimpleNamespace(perf_counter=lambda: step.now_s)  # noqa: B023
            patch.setattr(local_probe, "time", clock)
            timed = local_probe._TimedProbe(step, probe, "rows", torch.device("cpu"))
            timed.grow(budget_s)
        found.append(timed.part.batch_size)
    return found


def test_a_probe_grows_only_where_more_than_five_larger_steps_fit() -> None:
    # two seconds, then four for the first larger step: 5 of 4 seconds, and 5 of 16
    budgets_s = [2.0 + 20.0, 22.1, 2.0 + 4.0 + 80.0, 86.1]
    (sizes,) = run_ranks(_sizes_in, 1, budgets_s, timeout_s=120)
    assert sizes == [16, 64, 64, 256]


def test_probes_with_the_same_tables_share_a_sharded_module() -> None:
    groups = [
        key for key, _ in itertools.groupby(local_probe.PROBES, lambda probe: probe.module_key)
    ]
    assert len(groups) == len(set(groups)) < len(local_probe.PROBES)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("probe", local_probe.PROBES, ids=str)
def test_what_costs_are_fitted_to_is_what_they_price(
    probe: local_probe._Probe, num_ranks: int
) -> None:
    each = PhaseCost(
        **{field.name: 1.0 + i for i, field in enumerate(dataclasses.fields(PhaseCost))}
    )
    without_rows = dataclasses.replace(each, row_ns=0.0)  # a row's costs are those of its update
    ours, stocks = (SideCosts(input_dist=c, forward=c, backward=c) for c in (each, without_rows))
    curves = CommCurves.assumed(
        num_ranks, gbytes_per_s=1.0, local=LocalCosts(hot_cold=ours, stock=stocks)
    )
    size, used = probe.batch_size, probe.used_rows
    load = TableLoad(
        name="",
        num_embeddings=used,
        dim=0,
        lookups=size * probe.ids,
        bags=size,
        is_sequence=probe.is_sequence,
    )
    works = [TableWork(dataclasses.replace(load, dim=dim), num_ranks) for dim in probe.table_dims]
    uneven = max_over_mean("table_wise", [work.load for work in works], num_ranks)
    for form in probe.forms:
        fitted = sum(map(each.ms, local_probe._works(probe, num_ranks, form)))
        if form is None:
            stock = stock_cost("table_wise", works, curves, num_ranks)
            assert fitted == pytest.approx(stock.compute_ms)
            continue
        totals = HotColdTotals.sum(HotColdTotals.from_table(work, 0, form) for work in works)
        priced = exchange_times(totals, curves.local, num_packs=probe.packs, uneven_bags=uneven)
        copies_ms = 4 * totals.cold_elements * _COPY_NS * 1e-6 * (probe.packs > 1)
        assert fitted + copies_ms == pytest.approx(sum(dataclasses.asdict(priced).values()))


def _costs(factor: float) -> SideCosts:
    """Costs that fits find again: one term of each phase."""
    phases = PhaseCost(feature_us=factor), PhaseCost(fixed_ms=factor), PhaseCost(update_ns=factor)
    return SideCosts(**dict(zip(PHASES, phases)))  # type: ignore[arg-type]


class _CrowdedPace(Pace):
    """Each rank has a slow host of its own."""

    def own_ratio(self) -> float:
        return 3.0 + 2.0 * dist.get_rank()


class _KnownTimes(local_probe._TimedProbe):
    """A probe whose times are those of known costs, a second a step; stock's are twice ours."""

    clock = SimpleNamespace(now_s=0.0)
    shares_s: ClassVar[list[float]] = []
    order: ClassVar[list[tuple[Any, Form | None]]] = []

    def grow(self, budget_s: float) -> None:
        self.shares_s.append(budget_s)
        self.clock.now_s += 3.0
        self.step_s = 1.0

    def take(self) -> None:
        self.order.append((self.part, self.form))
        self.clock.now_s += 1.0

    def phases_ms(self) -> list[float]:
        costs = _costs(1.0 if self.form else 2.0)
        return [getattr(costs, phase).ms(work) for phase, work in zip(PHASES, self.works(2))]


class _Tables:
    """Sharded tables, in a reference cycle as real ones."""

    def __init__(self) -> None:
        self.itself = self


def _measured_in(rank: int, world_size: int) -> tuple[LocalCosts, list[float], list[float], Any]:
    """Costs that are fitted to times of known costs, shares of the time, windows, and steps."""
    pace, clock, called = _CrowdedPace(), _KnownTimes.clock, []
    sharded_tables: list[weakref.ref[_Tables]] = []

    def sharded(form: Form | None, *others: Any) -> _Tables:
        clock.now_s += 10.0
        assert others[-1] == "CPU time"
        tables = _Tables()
        sharded_tables.append(weakref.ref(tables))
        return tables

    def between() -> None:
        called.append(_KnownTimes.order[-1])

    with pytest.MonkeyPatch.context() as patch:
        now = SimpleNamespace(perf_counter=lambda: clock.now_s, thread_time="CPU time")
        patch.setattr(local_probe, "time", now)
        patch.setattr(local_probe, "_exchange_step", sharded)
        patch.setattr(local_probe, "_TimedProbe", _KnownTimes)
        patch.setattr("torchrec_picasso.app.runs.pace.num_cores", lambda: 2 - rank)
        gc.disable()  # what is freed is freed on purpose
        try:
            local = local_probe.measure_local_costs(between=between, pace=pace, budget_s=1000.0)
        finally:
            gc.enable()
    assert sharded_tables
    assert not any(tables() for tables in sharded_tables)
    assert called == _KnownTimes.order
    return local, _KnownTimes.shares_s, pace.ratios, called


def test_costs_of_both_sides_are_those_of_the_slowest_host() -> None:
    first, second = run_ranks(_measured_in, 2, timeout_s=120)
    local, shares_s, ratios, steps = first
    assert second[0] == local
    assert local.measured
    for side, factor in ((local.hot_cold, 1.0), (local.stock, 2.0)):
        for phase in PHASES:
            found, expected = (getattr(each, phase) for each in (side, _costs(2 * factor)))
            assert dataclasses.asdict(found) == pytest.approx(
                dataclasses.asdict(expected), rel=1e-6, abs=1e-6
            )
    num_passes = local_probe._PASSES
    assert ratios == [5.0] * num_passes  # the larger of 3 and 5
    # every probe once in each pass, always in the same order
    num_probes = len(steps) // num_passes
    assert len(steps) == local_probe.NUM_CALLS
    assert steps == steps[:num_probes] * num_passes
    assert len(set(steps[:num_probes])) == num_probes
    # equal shares of what sharding left, less the steps of the passes
    modules = {(probe.module_key, form) for probe, form in steps}
    left_s = 1000.0 - 10.0 * len(modules)
    assert shares_s == pytest.approx(
        [
            (left_s - (3.0 + num_passes) * place) / (num_probes - place)
            for place in range(num_probes)
        ]
    )


def _step_costs_in(rank: int, world_size: int) -> tuple[list[tuple[float, float]], list[str]]:
    """Costs of a step once, stock's and ours, where it is measured, long, shorter with hot/cold
    tables, and takes no time; and messages of the log."""
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore
    logging.getLogger("torchrec_picasso").addHandler(handler)
    steps = StepProbe(torch.device("cpu"), 3)
    for _ in range(3):
        steps.take_turn()
    free = LocalCosts(hot_cold=SideCosts(), stock=SideCosts(), measured=True)
    locals_ = [steps.add_costs(CommCurves.assumed(2, gbytes_per_s=1.0, local=free)).local]
    curves = CommCurves.assumed(2, gbytes_per_s=1.0)
    dense = DenseTimes(forward_ms=100.0, backward_ms=200.0, batch_size=step_probe._BATCH_SIZE)
    turns_ms = [1e3, 0.0, 5e3] if rank else [0.0, 1e3, 0.0]  # in the median 1,000, by the slowest
    for stock_ms, factor in ((turns_ms, 2.0), (turns_ms, 0.5), ([0.0], 2.0)):
        steps._turns_ms = {"stock": stock_ms, "rows": [factor * ms for ms in stock_ms]}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(step_probe, "measure_dense", lambda *_: dense)
            locals_.append(steps.add_costs(curves).local)
        assert locals_[-1].hot_cold.forward == curves.local.hot_cold.forward
    return [(local.stock.step_ms, local.hot_cold.step_ms) for local in locals_], logged


def test_what_a_step_costs_once_is_its_time_less_its_price() -> None:
    first, second = run_ranks(_step_costs_in, 2, timeout_s=120)
    assert first == second
    (real_ms, (stock_ms, rows_ms), shorter_ms, from_nothing_ms), logged = first
    assert min(real_ms) > 0
    assert 650.0 < stock_ms < 700.0  # a dense part of 300 ms, and the tables' work
    assert 1650.0 < rows_ms < 1700.0
    assert shorter_ms == (stock_ms, stock_ms)  # hot/cold tables take more operators
    assert from_nothing_ms == (0.0, 0.0)
    assert not logged  # a plan without effect would be of a small model that the user does not have


class _FakeSteps(StepProbe):
    """Steps that take no time but by the probe's clock: those of later turns take up to thrice."""

    now_s = 0.0

    def _train(self, side: str) -> Iterator[torch.Tensor]:
        step_s = {"stock": 0.1, "rows": 0.2}[side] * (1.0 if dist.get_rank() else 0.1)
        factors = itertools.chain([1.0] * 10, *([factor] * 7 for factor in (1.0, 3.0, 1.5)))
        for factor in factors:  # 31 steps, and no more
            self.now_s += factor * step_s
            yield torch.tensor(0.0)


def _turns_in(rank: int, world_size: int) -> tuple[list[float], dict[str, list[float]]]:
    """Time that each of ten calls takes, by the clock of the slowest rank's steps; ms of a step."""
    times_s = []
    with pytest.MonkeyPatch.context() as patch:
        steps: Any = _FakeSteps.__new__(_FakeSteps)
        clock = SimpleNamespace(perf_counter=lambda: steps.now_s)
        patch.setattr(step_probe, "time", clock)
        steps.__init__(torch.device("cpu"), 10)
        for _ in range(10):
            began_s = steps.now_s
            steps.take_turn()
            times_s.append((steps.now_s - began_s) * (1 if rank else 10))
    return times_s, steps._turns_ms


def test_turns_of_slow_steps_are_few_and_spread_over_all_calls() -> None:
    # 7 of 10 steps of both sides take 2.1 of 4 s: three turns at least, in ten calls
    expected_s = [0, 0, 0, 2.1, 0, 0, 6.3, 0, 0, 3.15]
    by_rank = run_ranks(_turns_in, 2, timeout_s=120)
    for times_s, _ in by_rank:
        assert times_s == pytest.approx(expected_s)
    assert by_rank[1][1]["stock"] == pytest.approx([100, 300, 150])
    assert by_rank[1][1]["rows"] == pytest.approx([200, 600, 300])
