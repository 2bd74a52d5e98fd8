"""A step leaves nothing behind: no tensor outlives it, and no module outlives its last use."""

from __future__ import annotations

import gc
import weakref

import torch

from tests.sharding.jobs import ODD, Job, build, train
from torchrec_picasso.launch.run_ranks import run_ranks

JOB = Job(placement={"*": 2}, tables=ODD, batch_sizes=(6, 4), num_steps=8)


def _num_tensors() -> int:
    gc.collect()
    return sum(type(found) is torch.Tensor for found in gc.get_objects())


def _grow(rank: int, world_size: int) -> tuple[int, int, bool]:
    model = build(JOB, rank, world_size)
    train(model, JOB, rank, range(3))
    early = _num_tensors()
    train(model, JOB, rank, range(3, JOB.num_steps))
    late = _num_tensors()
    module = weakref.ref(model.module)
    del model
    gc.collect()
    return early, late, module() is None


def test_tensors_do_not_pile_up_over_steps() -> None:
    for early, late, is_gone in run_ranks(_grow, 2, timeout_s=60):
        assert late == early
        assert is_gone
