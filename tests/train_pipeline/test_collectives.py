"""Collectives of a step: as many for 200 tables as for 2, whatever drives the exchange.

Counted in the middle of a run, when every exchange of a step has something to carry. A step has one
agreement on what was written between steps, one header, one ids exchange, one rows and one
gradients exchange per chunk, one sum of hot gradients and one of dense gradients. Looking ahead
adds one dirty mask and one of clean rows.

Operators that the host starts are what a step costs on fast links and for small batches: counted
are those of one of two ranks.
"""

import dataclasses
import itertools
import sys
from types import FrameType
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.utils._python_dispatch import TorchDispatchMode

from tests.sharding.jobs import Job, Table, build, make_batch
from tests.sharding.sequence_jobs import SequenceJob, build_sequences
from tests.support.shared_run import run_once
from tests.support.wire import MessageRecorder, all_to_alls
from tests.train_pipeline.runs import Driver, batches_of, make_driver, run_to_the_end
from torchrec_picasso.app.launch.run_ranks import run_ranks
from torchrec_picasso.ops import sorts
from torchrec_picasso.rows.batch_gradients import BatchGradients
from torchrec_picasso.storage import row_updates

PER_STEP: dict[Driver, dict[str, int]] = {
    None: {"all_to_all": 5, "all_reduce": 2},
    (1, False): {"all_to_all": 5, "all_reduce": 2},
    (1, True): {"all_to_all": 7, "all_reduce": 2},
    (4, False): {"all_to_all": 11, "all_reduce": 2},
    (4, True): {"all_to_all": 13, "all_reduce": 2},
}
NUM_TABLES = (2, 200)
WORLD_SIZE = 2
NUM_WARM, NUM_COUNTED = 4, 3  # DDP makes new buckets in the second step


def _job(num_tables: int) -> Job:
    """Tables of three dims, whose rows are partly used again in the next batch, in every chunk."""
    num_rows, batch_size = (60, 24) if num_tables > 2 else (300, 120)
    return Job(
        placement={"*": 4},
        tables=tuple(
            Table(f"t{i}", (8, 4, 16)[i % 3], num_rows, (f"f{i:03d}",), mean=i % 5 == 0)
            for i in range(num_tables)
        ),
        batch_sizes=(batch_size,),
    )


def _count(rank: int, world_size: int) -> dict[Any, list[dict[str, float]]]:
    return {
        (num_tables, driver): _count_one(rank, world_size, _job(num_tables), driver)
        for num_tables in NUM_TABLES
        for driver in PER_STEP
    }


def _kinds(model: Any, job: Job, rank: int, driver: Driver) -> list[dict[str, float]]:
    """Collectives of some steps in the middle of a run, by kind."""
    pipeline = make_driver(driver, model)
    batches = (make_batch(job, rank, step) for step in itertools.count())
    for _ in range(NUM_WARM):
        pipeline.progress(batches)
    if driver is None:
        assert len(pipeline._pipelined_modules) == 1, "its exchange of ids is pipelined"
    return [_kinds_of_one_step(pipeline, batches) for _ in range(NUM_COUNTED)]


def _kinds_of_one_step(pipeline: Any, batches: Any) -> dict[str, float]:
    with MessageRecorder() as recorder:
        pipeline.progress(batches)
    exchanges = recorder.exchanges
    by_kind = {
        "all_to_all": all_to_alls(exchanges, WORLD_SIZE),
        "all_reduce": exchanges.pop("allreduce_", 0),
    }
    others = {kind: n for kind, n in exchanges.items() if kind not in ("send", "alltoall_base_")}
    return {**by_kind, **others}


@pytest.mark.parametrize("driver", list(PER_STEP), ids=str)
@pytest.mark.parametrize("num_tables", NUM_TABLES)
def test_collectives_do_not_grow_with_tables(num_tables: int, driver: Driver) -> None:
    for rank in run_once(_count, WORLD_SIZE):
        assert rank[num_tables, driver] == [PER_STEP[driver]] * NUM_COUNTED


def _count_one(rank: int, world_size: int, job: Job, driver: Driver) -> list[dict[str, float]]:
    return _kinds(build(job, rank, world_size), job, rank, driver)


def _count_by_host(rank: int, world_size: int) -> list[tuple[Driver, list[dict[str, float]]]]:
    by_host: dict[str, Any] = {"by_host": ("*",), "batch_sizes": (12,)}
    jobs = [dataclasses.replace(_job(num_tables), **by_host) for num_tables in (2, 26)]
    return [(each, _count_one(rank, world_size, job, each)) for job in jobs for each in PER_STEP]


def test_each_exchange_by_host_has_two_parts() -> None:
    """The sum of hot rows has two, before and after its all-reduce over hosts."""
    for on_rank in run_ranks(_count_by_host, 4, timeout_s=200):
        for driver, steps in on_rank:
            expected = 2 * PER_STEP[driver]["all_to_all"] + 2
            assert [step["all_to_all"] for step in steps] == [expected] * NUM_COUNTED, driver


def test_two_micro_batches_of_bags_exchange_by_wave() -> None:
    """Agreement, header, ids; bags and their gradients for two chunks of three waves, one a dim."""
    job = dataclasses.replace(_job(NUM_TABLES[1]), placement={"*": "bags"})
    for steps in run_ranks(_count_one, WORLD_SIZE, job, (2, True), timeout_s=100):
        assert [step["all_to_all"] for step in steps] == [3 + 2 * 2 * 3] * NUM_COUNTED


def _order_of_bags(rank: int, world_size: int) -> list[str]:
    job = dataclasses.replace(
        _job(NUM_TABLES[0]), placement={"t0": "bags", "t1": "table_wise"}, batch_sizes=(16, 3)
    )
    model = build(job, rank, world_size)
    pipeline = make_driver((2, True), model)
    order: list[str] = []

    def reduce(state: Any, bucket: Any) -> Any:
        order.append("dense gradients")
        return allreduce_hook(state, bucket)

    reduce.__annotations__ = allreduce_hook.__annotations__  # torch looks at them
    model._dmp_wrapped_module.register_comm_hook(dist.group.WORLD, reduce)
    send, all_to_all = BatchGradients.send, dist.all_to_all_single

    def send_noted(self: BatchGradients, chunk: int, wave: int | None = None) -> None:
        order.append(f"gradients of chunk {chunk}")
        send(self, chunk, wave)

    def all_to_all_noted(*args: Any, **kwargs: Any) -> Any:
        if kwargs["group"] is dist.group.WORLD:  # other exchanges have a group of their own
            order.append("stock tables")
        return all_to_all(*args, **kwargs)

    batches = iter([make_batch(job, rank, step) for step in range(4)])
    with (
        mock.patch.object(BatchGradients, "send", send_noted),
        mock.patch.object(dist, "all_to_all_single", all_to_all_noted),
    ):
        run_to_the_end(pipeline, batches)
    return order


def test_a_rank_with_one_micro_batch_starts_collectives_in_the_same_order() -> None:
    """Three samples are not cut; the other rank's micro-batches run depth first."""
    one, other = run_ranks(_order_of_bags, WORLD_SIZE, timeout_s=100)
    assert one == other
    assert {"dense gradients", "stock tables", "gradients of chunk 1"} <= set(one)
    assert "gradients of chunk 0, dense gradients" in ", ".join(one), one


def _count_two_modules(rank: int, world_size: int) -> dict[Driver, dict[str, float]]:
    job = SequenceJob(placement={"*": 2}, batch_sizes=(24,))
    return {
        driver: _kinds(build_sequences(job, world_size), job, rank, driver)[0]
        for driver in PER_STEP
        if driver is not None
    }


def test_collectives_do_not_grow_with_modules() -> None:
    """Sequences and bags, two modules, as one."""
    for on_rank in run_ranks(_count_two_modules, WORLD_SIZE, timeout_s=100):
        assert on_rank == {driver: PER_STEP[driver] for driver in on_rank}
        assert len(on_rank) == len(PER_STEP) - 1


TABLES = tuple(Table(f"t{number}", 8, 1000, (f"f{number}",)) for number in range(26))
STOCK, OURS, HOT = (
    Job(placement={"*": placement}, tables=TABLES, batch_sizes=(128,))
    for placement in ("table_wise", 0, 50)
)
MOST: dict[tuple[str, Driver], tuple[int, int]] = {
    ("ours", (1, False)): (231, 252),
    ("ours", (1, True)): (251, 272),
    ("ours", (4, False)): (698, 719),
    ("ours", (4, True)): (727, 748),
    ("hot", (1, False)): (299, 299),
    ("hot", (4, True)): (800, 800),
}
"""Operators of a step, by tables and setting, on AMD's processors with AVX-512 and on Intel's,
where rows are sorted and updated in another way; ``hot`` has hot rows."""


class _Operators(TorchDispatchMode):
    """Counts the operators that reach the dispatcher, views too, and no profiler's ranges."""

    num_operators = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_operators += func.namespace != "profiler"
        return func(*args, **(kwargs or {}))


class _PythonCalls:
    """Counts the Python functions that this thread calls."""

    num_calls = 0

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        self.num_calls += event == "call"

    def __enter__(self) -> "_PythonCalls":
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)


def _count_operators(job: Job, driver: Driver, rank: int, world_size: int) -> tuple[float, float]:
    """Operators and Python calls of a step."""
    pipeline = make_driver(driver, build(job, rank, world_size))
    batches = itertools.cycle(batches_of(job, rank, range(NUM_WARM)))
    for _ in range(2 * NUM_WARM):  # makes every batch once
        pipeline.progress(batches)
    with _Operators() as operators:
        for _ in range(NUM_COUNTED):
            pipeline.progress(batches)
    with _PythonCalls() as python:
        for _ in range(NUM_COUNTED):
            pipeline.progress(batches)
    return operators.num_operators / NUM_COUNTED, python.num_calls / NUM_COUNTED


def _counts(rank: int, world_size: int, is_intel: bool) -> dict[Any, tuple[float, float]]:
    jobs = {"ours": OURS, "hot": HOT}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sorts, "is_intel", lambda: is_intel)
        patch.setattr(row_updates, "torch_is_faster", lambda: is_intel)
        found = {
            (name, driver): _count_operators(jobs[name], driver, rank, world_size)
            for name, driver in MOST
        }
        for driver in (None, (1, True)):
            found["stock", driver] = _count_operators(STOCK, driver, rank, world_size)
        return found


@pytest.mark.parametrize("is_intel", [False, True], ids=["other", "intel"])
@pytest.mark.parametrize("case", MOST, ids=str)
def test_a_step_starts_no_more_operators(case: Any, is_intel: bool) -> None:
    counts = run_once(_counts, 2, is_intel)[0]
    assert counts["stock", None][0] > 100  # the mode saw a step of stock
    assert counts[case][0] <= MOST[case][is_intel]


def test_a_plan_of_stock_tables_starts_the_operators_of_torchrecs_pipeline() -> None:
    counts = run_once(_counts, 2, False)[0]
    (ours, our_calls), (theirs, their_calls) = counts["stock", (1, True)], counts["stock", None]
    assert ours == theirs
    assert their_calls < our_calls < 1.03 * their_calls  # 2,507 and 2,543: agreement and reports
