"""The dense part alone, of pooled models and of models of sequences; probes of local work within
a time; what calibration says on a machine that others use."""

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

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
from torchrec_picasso.app.runs.exchange_step import ExchangeStep, PhaseTimes
from torchrec_picasso.app.runs.pace import Pace
from torchrec_picasso.cost import CommCurves
from torchrec_picasso.cost.hot_cold import _COPY_NS, HotColdTotals, exchange_times
from torchrec_picasso.cost.local import PHASES, DenseTimes, LocalCosts, PhaseCost, SideCosts
from torchrec_picasso.cost.stock import stock_cost
from torchrec_picasso.cost.table_work import TableLoad, TableWork

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
    """Lookups of a probe's batch, and its steps, by the time that each rank has left."""
    probe = local_probe._Probe(tables=4, batch_size=256, dim=16, rows_per_sample=1)
    group, found, run = dist.group.WORLD, [], local_probe.ExchangeStep.run
    assert group is not None
    device = torch.device("cpu")
    step = local_probe._exchange_step("hot_cold", [probe], group, device, time.thread_time)
    for share_s in shares_s:
        batches: list[KeyedJaggedTensor] = []

        def counted(step: ExchangeStep, batch: KeyedJaggedTensor) -> PhaseTimes:
            batches.append(batch)  # noqa: B023
            return run(step, batch)

        local_probe.ExchangeStep.run = counted  # type: ignore
        (work, *_), _ = local_probe._probe(step, True, probe, group, device, share_s[rank])
        found.append((work.lookups, len(batches)))
    return found


def test_a_probe_without_time_takes_few_steps_of_few_samples_on_all_ranks() -> None:
    shares_s = [(math.inf, math.inf), (0.0, math.inf), (math.inf, 0.0)]
    by_rank = run_ranks(_probe_in, 2, shares_s, timeout_s=120)
    assert by_rank[0] == by_rank[1] == [(4 * 256, 2 + 2 + 5), (4 * 16, 2 + 3), (4 * 16, 2 + 3)]


class _FakeStep:
    """A second for each sixteen samples, on a clock of its own; times of the phases are given."""

    def __init__(self, times_ms: list[float]) -> None:
        self.now_s, self._times_ms = 0.0, iter(times_ms)
        self.batches: list[KeyedJaggedTensor] = []

    def run(self, batch: KeyedJaggedTensor) -> PhaseTimes:
        self.batches.append(batch)
        self.now_s += batch.stride() / 16
        ms = next(self._times_ms)
        return PhaseTimes(input_dist_ms=ms, forward_ms=2 * ms, backward_ms=3 * ms)


def _fake_probe_in(rank: int, world_size: int, own_share_s: float) -> Any:
    """Times of a probe's phases, sizes of its batches, and the ids of the last."""
    probe = local_probe._Probe(tables=4, batch_size=256, dim=16, rows_per_sample=1)
    # two steps to warm up, one to grow; of the other three either rank is the slowest of some
    step: Any = _FakeStep([50.0, 50.0, 50.0, *([9.0, 1.0, 5.0], [2.0, 8.0, 3.0])[rank]])
    share_s = own_share_s if rank else math.inf
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local_probe, "time", SimpleNamespace(perf_counter=lambda: step.now_s))
        _, ms = local_probe._probe(
            step, True, probe, dist.group.WORLD, torch.device("cpu"), share_s
        )
    sizes = [batch.stride() for batch in step.batches]
    return ms, sizes, step.batches[-1].values()


def test_a_probe_grows_where_steps_of_the_next_size_fit_and_takes_the_slowest_rank() -> None:
    (ms, sizes, ids), (other_ms, other_sizes, other_ids) = run_ranks(
        _fake_probe_in, 2, 18.5, timeout_s=120
    )
    assert ms == other_ms == [8.0, 16.0, 24.0]  # the median of 9, 8 and 5
    assert sizes == other_sizes == [16, 16, *[64] * 4]
    assert not torch.equal(ids, other_ids)
    # 64 rows in use, over the whole table
    table_rows = (128 << 20) // (4 * 16 * 4)
    assert set((ids % (table_rows // 64)).tolist()) == {0}
    assert ids.max() > table_rows / 2


def test_probes_with_the_same_tables_share_a_sharded_module() -> None:
    groups = [
        dims for dims, _ in itertools.groupby(local_probe.PROBES, lambda probe: probe.table_dims)
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
    works = [
        TableWork(
            TableLoad(name="", num_embeddings=used, dim=dim, lookups=size * probe.ids, bags=size),
            num_ranks,
        )
        for dim in probe.table_dims
    ]
    totals = HotColdTotals.sum(HotColdTotals.from_table(work, 0) for work in works)
    priced = exchange_times(totals, curves.local, num_packs=probe.packs)
    copies_ms = 4 * totals.cold_elements * _COPY_NS * 1e-6 * (probe.packs > 1)
    fitted = local_probe._works(probe, num_ranks, is_hot_cold=True)
    assert sum(map(each.ms, fitted)) + copies_ms == pytest.approx(
        sum(dataclasses.asdict(priced).values())
    )
    stock = stock_cost("table_wise", works, curves, num_ranks)
    fitted = local_probe._works(probe, num_ranks, is_hot_cold=False)
    assert sum(map(each.ms, fitted)) == pytest.approx(stock.compute_ms)


def _costs(factor: float) -> SideCosts:
    """Costs that fits find again: one term of each phase."""
    phases = PhaseCost(lookup_ns=factor), PhaseCost(fixed_ms=factor), PhaseCost(update_ns=factor)
    return SideCosts(**dict(zip(PHASES, phases)))  # type: ignore[arg-type]


class _CrowdedPace(Pace):
    """A rank's host has half as many cores as that of the rank before."""

    def sample(self) -> None:
        self.ratios.append(4.0)

    def slowdown(self, num_ranks: int) -> float:
        assert num_ranks == 2
        return 1.0 + dist.get_rank()


def _measured_in(rank: int, world_size: int) -> tuple[LocalCosts, list[float], int, int]:
    """Costs that are fitted to times of known costs, shares of the time, windows, and progress."""
    shares_s, advanced, pace = [], [], _CrowdedPace()

    def probed(
        step: None, is_hot_cold: bool, probe: Any, pg: Any, device: Any, share_s: float
    ) -> tuple[Any, list[float]]:
        shares_s.append(share_s)
        works = local_probe._works(probe, 2, is_hot_cold=is_hot_cold)
        costs = _costs(1.0 if is_hot_cold else 2.0)
        return works, [getattr(costs, phase).ms(work) for phase, work in zip(PHASES, works)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local_probe, "_exchange_step", lambda *_: None)
        patch.setattr(local_probe, "_probe", probed)
        local = local_probe.measure_local_costs(
            advance=lambda: advanced.append(True), pace=pace, budget_s=2800.0
        )
    return local, shares_s, len(pace.ratios), len(advanced)


def test_costs_of_both_sides_are_those_of_the_slowest_host() -> None:
    first, second = run_ranks(_measured_in, 2, timeout_s=120)
    local, shares_s, num_windows, num_advanced = first
    assert second[0] == local
    assert local.measured
    for side, factor in ((local.hot_cold, 1.0), (local.stock, 2.0)):
        for phase in PHASES:
            found, expected = (getattr(each, phase) for each in (side, _costs(2 * factor)))
            assert dataclasses.asdict(found) == pytest.approx(
                dataclasses.asdict(expected), rel=1e-6, abs=1e-6
            )
    num_probes = 2 * len(local_probe.PROBES)
    assert (num_windows, num_advanced) == (num_probes, len(local_probe.PROBES))
    # equal shares of what is left, and nothing takes time
    assert shares_s == pytest.approx([2800.0 / left for left in range(num_probes, 0, -1)], rel=0.01)


def _step_costs_in(rank: int, world_size: int) -> list[tuple[float, float]]:
    """Costs of a step once, stock's and ours, where it takes long and where it takes no time."""
    curves, found = CommCurves.assumed(2, gbytes_per_s=1.0), []
    dense = DenseTimes(forward_ms=100.0, backward_ms=200.0, batch_size=step_probe._BATCH_SIZE)
    for ms in ({"stock": 1000.0, "rows": 2000.0}, {"stock": 0.0, "rows": 0.0}):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(step_probe, "measure_dense", lambda *_: dense)
            patch.setattr(step_probe, "_step_ms", lambda steps, ms=ms: ms)
            local = step_probe.with_step_costs(curves, torch.device("cpu")).local
        found.append((local.stock.step_ms, local.hot_cold.step_ms))
        assert local.hot_cold.forward == curves.local.hot_cold.forward
    return found


def test_what_a_step_costs_once_is_its_time_less_its_price() -> None:
    first, second = run_ranks(_step_costs_in, 2, timeout_s=120)
    assert first == second
    (stock_ms, rows_ms), free_ms = first
    assert 650.0 < stock_ms < 700.0  # a dense part of 300 ms, and the tables' work
    assert 1650.0 < rows_ms < 1700.0
    assert free_ms == (0.0, 0.0)


def _steps_in(rank: int, world_size: int) -> tuple[dict[str, float], float, list[float]]:
    """Times of both sides' steps by a clock of their own, the time that they took, and windows."""
    now_s = [0.0]

    def steps(step_s: float) -> Iterator[torch.Tensor]:
        factors = itertools.chain([1.0] * 10, *([factor] * 7 for factor in (1.0, 3.0, 1.5)))
        for factor in factors:  # 31 steps, and no more
            now_s[0] += factor * step_s
            yield torch.tensor(0.0)

    own = 1.0 if rank else 0.1  # the last rank is the slowest
    pace = Pace(*_clocks(1.0 + 2 * rank))
    pace.sample()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_probe, "time", SimpleNamespace(perf_counter=lambda: now_s[0]))
        ms = step_probe._step_ms({"stock": steps(0.1 * own), "rows": steps(0.2 * own)})
    return ms, now_s[0] / own, pace.ratios


def test_steps_take_turns_within_their_time_and_the_slowest_rank_counts() -> None:
    first, second = run_ranks(_steps_in, 2, timeout_s=120)
    # of 5 s, 7 of 10 steps of both sides take 2.1: three turns at least
    expected_s = 0.3 * (10 + 7 * (1.0 + 3.0 + 1.5))
    for ms, taken_s, ratios in (first, second):
        assert ms == pytest.approx({"stock": 150.0, "rows": 300.0})
        assert taken_s == pytest.approx(expected_s)
        assert ratios == pytest.approx([2.0])


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
