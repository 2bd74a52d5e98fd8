"""Models over overlapping groups of ranks train as under TorchRec's pipeline."""

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from tests.sharding.jobs import ATOL, RTOL, Job, Model, build, shard
from tests.support.shared_run import run_once
from tests.train_pipeline.runs import batches_of, make_driver, pipeline_of

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
