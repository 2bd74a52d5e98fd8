"""The dense part alone, of pooled models and of models of sequences; probes of local work within
a time; what calibration says on a machine that others use."""

import logging
import math
import time
from collections.abc import Callable
from itertools import groupby
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
from torchrec_picasso.app.runs import local_probe
from torchrec_picasso.app.runs.dense_probe import measure_dense_of
from torchrec_picasso.app.runs.exchange_step import ExchangeStep
from torchrec_picasso.app.runs.pace import Pace
from torchrec_picasso.app.runs.step_probe import StepProbe
from torchrec_picasso.cost import CommCurves
from torchrec_picasso.cost.local import DenseTimes, LocalCosts, SideCosts

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
    probe = local_probe._Probe(tables=4, batch_size=256, dim=16, rows_per_sample=1)
    group, found, run = dist.group.WORLD, [], local_probe.ExchangeStep.run
    assert group is not None
    device = torch.device("cpu")
    step = local_probe._exchange_step("hot_cold", [probe], group, device, time.thread_time)
    for share_s in shares_s:
        batches: list[KeyedJaggedTensor] = []

        def counted(step: ExchangeStep, batch: KeyedJaggedTensor) -> list[float]:
            batches.append(batch)  # noqa: B023
            return run(step, batch)

        local_probe.ExchangeStep.run = counted  # type: ignore
        part, _ = local_probe._measure(step, probe, device, share_s[rank])
        found.append((part.batch_size, len(batches)))
    return found


def test_a_probe_without_time_takes_few_steps_of_few_samples_on_all_ranks() -> None:
    shares_s = [(math.inf, math.inf), (0.0, math.inf), (math.inf, 0.0)]
    by_rank = run_ranks(_probe_in, 2, shares_s, timeout_s=120)
    assert by_rank[0] == by_rank[1] == [(256, 2 + 2 + 5), (16, 2 + 3), (16, 2 + 3)]


def test_probes_with_the_same_tables_share_a_sharded_module() -> None:
    groups = [dims for dims, _ in groupby(local_probe.PROBES, lambda probe: probe.table_dims)]
    assert len(groups) == len(set(groups)) < len(local_probe.PROBES)


def _step_costs(rank: int, world_size: int) -> tuple[LocalCosts, list[str]]:
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore
    logging.getLogger("torchrec_picasso").addHandler(handler)
    steps = StepProbe(torch.device("cpu"), 3)
    for _ in range(3):
        steps.take_turn()
    free = LocalCosts(hot_cold=SideCosts(), stock=SideCosts(), measured=True)
    return steps.add_costs(CommCurves.assumed(2, gbytes_per_s=1.0, local=free)).local, logged


def test_whole_steps_cost_the_same_on_all_ranks_and_their_small_model_is_not_told() -> None:
    by_rank = run_ranks(_step_costs, 2, timeout_s=120)
    local, logged = by_rank[0]
    assert by_rank[1] == by_rank[0]
    assert min(local.stock.step_ms, local.hot_cold.step_ms) > 0
    assert not logged


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
