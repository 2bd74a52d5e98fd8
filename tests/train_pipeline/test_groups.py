"""Models over overlapping groups of ranks, and dense sums in a group of their own."""

import dataclasses
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.model_parallel import DefaultDataParallelWrapper
from torchrec.distributed.types import ShardingEnv

from tests.sharding import jobs
from tests.sharding.jobs import ATOL, RTOL, Job, Model, build, result_of, shard
from tests.support.placing import distribute
from tests.support.shared_run import run_once
from tests.support.wire import MessageRecorder
from tests.train_pipeline.runs import (
    Driver,
    batches_of,
    compare_runs,
    make_driver,
    pipeline_of,
    run_to_the_end,
    train_job,
)

JOB = Job(placement={"*": 2})
SOME = (0, 1)
"""Ranks of a group within the world of three."""


def _pipeline(pg: Any, is_ours: bool) -> Any:
    job = JOB if is_ours else dataclasses.replace(JOB, placement={"*": "row_wise"})
    model = shard(Model(job), job, {"ebc": job.tables}, pg.size(), pg)
    return pipeline_of(model) if is_ours else make_driver(None, model)


def _stock_groups(rank: int, world_size: int) -> None:
    """Of TorchRec's tables, one of them data-parallel, with a wire of 2 bytes, and a dense part."""
    job = Job(placement={"a": "table_wise", "*": "data_parallel"}, wire="fp16")
    model = build(job, rank, world_size)
    parts = [*model.module.ebc._lookups, model._dmp_wrapped_module]
    wrapped = [part for part in parts if isinstance(part, DistributedDataParallel)]
    assert len(wrapped) == 2
    for module in wrapped:
        assert module.process_group is dist.group.WORLD
        assert not module._comm_hooks, "sums of gradients are not encoded"
    assert [d._pg for d in model.module.ebc._output_dists if hasattr(d, "_pg")] == [
        dist.group.WORLD
    ]


def test_torchrec_has_one_group_and_sums_without_a_codec() -> None:
    run_once(_stock_groups, 2)


def _in_turns(rank: int, world_size: int, order: str) -> dict[bool, list[Tensor]]:
    """Outputs of a model over some ranks and one over all, in turns."""
    some, outputs = dist.new_group(list(SOME)), {}
    for is_ours in (True, False):
        groups = {"some": some, "all": dist.group.WORLD}
        names = [name for name in order.split() if name == "all" or rank in SOME]
        trained = {name: _pipeline(groups[name], is_ours) for name in names}
        data = {name: iter(batches_of(JOB, rank, range(4))) for name in names}
        outputs[is_ours] = [trained[name].progress(data[name]) for _ in range(4) for name in names]
    return outputs


@pytest.mark.parametrize("order", ["some all", "all some"])
def test_models_over_some_ranks_and_over_all(order: str) -> None:
    for outputs in run_once(_in_turns, 3, order):
        torch.testing.assert_close(outputs[True], outputs[False], rtol=RTOL, atol=ATOL)


DRIVERS: list[Driver] = [(1, True), (4, True)]
NUM_WARM = 4  # DDP makes new buckets in the first steps


class _DenseGroup(DefaultDataParallelWrapper):
    """Gives DistributedDataParallel a group of its own."""

    def wrap(self, dmp: Any, env: ShardingEnv, device: torch.device) -> None:
        assert env.process_group is not None
        self.group = dist.new_group(dist.get_process_group_ranks(env.process_group))
        super().wrap(dmp, ShardingEnv.from_process_group(self.group), device)


def _apart(rank: int, world_size: int) -> dict[Any, Any]:
    """Runs with dense sums in a group of their own, in that of the tables, and of stock tables."""
    stock = dataclasses.replace(JOB, placement={"*": "table_wise"})
    found: dict[Any, Any] = {"stock": train_job(stock, None, rank, world_size)}
    for driver in DRIVERS:
        wrapper = _DenseGroup()
        own_group = partial(distribute, data_parallel_wrapper=wrapper)
        with mock.patch.object(jobs, "distribute", own_group):
            model = build(JOB, rank, world_size)
        driven = make_driver(driver, model)
        left = iter(batches_of(JOB, rank, range(JOB.num_steps)))
        outputs = [driven.progress(left) for _ in range(NUM_WARM)]
        with MessageRecorder(wrapper.group) as recorder:
            outputs += run_to_the_end(driven, left)
        dense = sum(p.numel() for p in model._dmp_wrapped_module._module_parameters)
        num_sums = JOB.num_steps - NUM_WARM
        found["sums", driver] = recorder.exchanges, [m.num_elements for m in recorder.messages]
        found["expected sums", driver] = {"allreduce_": num_sums}, [dense] * num_sums
        found["own group", driver] = result_of(model, []), outputs
        found["one group", driver] = train_job(JOB, driver, rank, world_size)
    return found


@pytest.mark.parametrize("driver", DRIVERS, ids=str)
def test_dense_sums_in_a_group_of_their_own(driver: Driver) -> None:
    """NCCL runs the collectives of a group in order: so rows need not wait for dense sums."""
    by_rank = run_once(_apart, 2)
    for found in by_rank:
        assert found["sums", driver] == found["expected sums", driver]
    compare_runs(by_rank, ("own group", driver), ("one group", driver), rtol=0, atol=0)
    compare_runs(by_rank, ("own group", driver), "stock")
