"""Dense weights that ranks step apart: as a plain loop under ``no_sync`` with averages of its own.

The loop trains TorchRec's tables, so the tables are exact, given each rank's dense weights. Ranks
have different numbers of batches; the last steps, without an average, end with one.
"""

import dataclasses
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.model_parallel import DefaultDataParallelWrapper

from tests.sharding import jobs
from tests.sharding.jobs import Job, build, result_of
from tests.support.placing import distribute
from tests.support.refusals import refusal
from tests.support.shared_run import run_once
from tests.support.wire import MessageRecorder
from tests.train_pipeline.runs import (
    Run,
    batches_of,
    compare_runs,
    empty_of,
    pipeline_of,
    run_to_the_end,
)
from torchrec_picasso import CompatError, ConfigError, StepReports
from torchrec_picasso.app.launch.run_ranks import run_ranks
from torchrec_picasso.app.runs.wire_meter import WireMeter
from torchrec_picasso.train_pipeline.options import PipelineOptions

EVERY, COUNTS = 3, (9, 6)
NUM_DENSE = 8 * (1 + 2 + 1) + 1
"""Elements of the dense part."""
HOT_COLD = Job(placement={"*": 3, "c": "data_parallel"}, batch_sizes=(16, 9))
STOCK = dataclasses.replace(HOT_COLD, placement={"*": "table_wise", "c": "data_parallel"})
JOBS = {"hot_cold": HOT_COLD, "stock": STOCK}
CASES = [("hot_cold", 1), ("hot_cold", 4), ("stock", 1)]
"""Job, and number of micro-batches."""
pytestmark = pytest.mark.filterwarnings("ignore:average_dense_every")


def _over(model: DistributedModelParallel) -> list[Tensor]:
    """The dense weights, copied."""
    return [p.detach().clone() for name, p in model.named_parameters() if "over" in name]


def _average(model: DistributedModelParallel) -> None:
    for name, weight in model.named_parameters():
        if "over" in name:
            dist.all_reduce(weight.data)
            weight.data /= dist.get_world_size()


def _optimizer(model: DistributedModelParallel) -> torch.optim.Optimizer:
    """Steps the dense part, and the table that each rank stores, whose gradients DDP averages."""
    named = {name: p for name, p in model.named_parameters() if "over" in name or ".c." in name}
    assert len(named) == 3
    return torch.optim.SGD(named.values(), lr=0.05, momentum=0.5)


def _expected(rank: int, world_size: int, static_graph: bool = True) -> Run:
    """The plain loop: DDP reduces in the first step only, as it must for a static graph."""
    model, outputs = build(STOCK, rank, world_size), []
    optimizer, num_empty = _optimizer(model), max(COUNTS) - COUNTS[rank]
    batches = [*batches_of(STOCK, rank, range(COUNTS[rank])), *[empty_of(STOCK)] * num_empty]
    for step, batch in enumerate(batches):
        model.fused_optimizer.zero_grad()
        optimizer.zero_grad()
        num_apart = step + 1 - static_graph
        with model._dmp_wrapped_module.no_sync() if num_apart else nullcontext():
            loss, output = model(batch)
            loss.backward()
        optimizer.step()
        outputs.append(output)
        if num_apart in (EVERY, 2 * EVERY) or step == len(batches) - 1:
            _average(model)
    return result_of(model, []), outputs


def _found(job: Job, rank: int, world_size: int, **options: Any) -> Run:
    model = build(job, rank, world_size)
    pipeline = pipeline_of(model, optimizer=_optimizer(model), **options)
    outputs = run_to_the_end(pipeline, iter(batches_of(job, rank, range(COUNTS[rank]))))
    return result_of(model, []), outputs


def _life(rank: int, world_size: int) -> dict[str, Any]:
    """The dense weights at places of a run, bytes of its steps, and their sums of dense weights."""
    # a data-parallel table has a wrapper of its own, whose bytes are in no report
    job = dataclasses.replace(HOT_COLD, placement={"*": 3})
    model, reports = build(job, rank, world_size), StepReports()
    num_bytes, num_sums = [], []
    options = {"num_micro_batches": 1, "lookahead": False, "refresh": None, "on_step": reports}
    pipeline = pipeline_of(model, average_dense_every=EVERY, **options)
    left, found = iter(batches_of(job, rank, range(12))), {}
    for step in range(10):
        if step == 8:
            model.eval()
        # DDP shares its buckets in step 1
        with WireMeter() as meter, MessageRecorder() if step > 1 else nullcontext() as recorder:
            pipeline.progress(left)
        if recorder is not None:
            num_bytes.append(meter.count.sent_bytes)
            num_sums.append(sum(m.num_elements == NUM_DENSE for m in recorder.messages))
        found[f"after step {step}"] = _over(model)
        model.train()
    pipeline.average_dense()
    found["averaged"] = _over(model)
    pipeline.progress(left)
    pipeline.detach()
    found["detached"] = _over(model)
    reported = reports.to_frame()["sent_bytes"].tolist()
    return {"weights": found, "bytes": num_bytes, "sums": num_sums, "reported": reported}


def _refused(rank: int, world_size: int) -> list[str]:
    bare, hooked = build(HOT_COLD, rank, world_size), build(HOT_COLD, rank, world_size)
    bare._dmp_wrapped_module = bare._dmp_wrapped_module.module
    hooked._dmp_wrapped_module.register_comm_hook(None, allreduce_hook)
    models = (bare, hooked)
    return [refusal(CompatError, pipeline_of, model, average_dense_every=2) for model in models]


def _run(rank: int, world_size: int) -> dict[Any, Any]:
    found: dict[Any, Any] = {"life": _life(rank, world_size), "refused": _refused(rank, world_size)}
    found["expected"] = _expected(rank, world_size)
    for name, number in CASES:
        options = {"num_micro_batches": number, "average_dense_every": EVERY}
        found[name, number] = _found(JOBS[name], rank, world_size, **options)
    wrapper = DefaultDataParallelWrapper(static_graph=False)
    with mock.patch.object(jobs, "distribute", partial(distribute, data_parallel_wrapper=wrapper)):
        options = {"num_micro_batches": 1, "average_dense_every": EVERY}
        found["from the first step"] = _found(HOT_COLD, rank, world_size, **options)
        found["so expected"] = _expected(rank, world_size, static_graph=False)
    for key, options in (("default", {}), ("one", {"average_dense_every": 1})):
        found[key] = _found(HOT_COLD, rank, world_size, num_micro_batches=1, **options)
    return found


@pytest.mark.parametrize("case", CASES, ids=str)
def test_tables_are_exact_given_each_ranks_dense_weights(case: tuple[str, int]) -> None:
    by_rank = run_once(_run, 2)
    compare_runs(by_rank, case, "expected")
    result, _ = by_rank[0][case]
    exact, _ = by_rank[0]["default"]
    assert any(not torch.allclose(result.dense[name], exact.dense[name]) for name in exact.dense)


def test_without_a_static_graph_ranks_step_apart_from_the_first_step() -> None:
    """So a run that goes on from an average has no first step of another kind."""
    compare_runs(run_once(_run, 2), "from the first step", "so expected")


def test_one_is_to_the_bit_without() -> None:
    compare_runs(run_once(_run, 2), "one", "default", rtol=0, atol=0)


def test_weights_are_equal_where_they_are_read() -> None:
    mine, others = (found["life"]["weights"] for found in run_once(_run, 2))
    equal = {name for name in mine if all(map(torch.equal, mine[name], others[name]))}
    averaged = {f"after step {step}" for step in (0, EVERY, 2 * EVERY, 8)}
    assert equal == {*averaged, "averaged", "detached"}


def test_dense_weights_travel_with_an_average_alone() -> None:
    for found in run_once(_run, 2):
        life = found["life"]
        assert life["sums"] == [int(step in (EVERY, 2 * EVERY, 8)) for step in range(2, 10)]
        # steps that train; no comparison of the cut sends anything
        assert life["reported"][2:8] == life["bytes"][:6]


def _freeze(rank: int, world_size: int) -> tuple[bool, str]:
    job = dataclasses.replace(HOT_COLD, placement={"*": 3})
    model: Any = build(job, rank, world_size)
    weight = model.module.over.weight.requires_grad_(False)
    before = weight.clone()
    pipeline = pipeline_of(model, num_micro_batches=1, average_dense_every=2)
    run_to_the_end(pipeline, iter(batches_of(job, rank, range(4))))
    return torch.equal(weight, before), pipeline.summary()


def test_frozen_weights_stay_and_the_summary_tells() -> None:
    """The mean of three equal weights may be another weight, by rounding."""
    for stays, summary in run_ranks(_freeze, 3, timeout_s=60):
        assert stays
        assert summary.endswith("\ndense weights: averaged every 2 steps, not exact")


def test_it_is_announced_or_refused() -> None:
    with pytest.warns(UserWarning, match="average_dense_every=2 is not exact"):
        PipelineOptions(average_dense_every=2)
    with pytest.raises(ConfigError, match="average_dense_every is 0"):
        PipelineOptions(average_dense_every=0)
    for found in run_once(_run, 2):
        bare, hooked = found["refused"]
        assert bare.startswith("average_dense_every is 2, but no DistributedDataParallel")
        assert "a communication hook on DistributedDataParallel would not run" in hooked
