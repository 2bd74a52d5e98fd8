"""A step leaves nothing behind: no tensor outlives it, and no module outlives its last use."""

import gc
import weakref

import torch
import torch.distributed as dist

from tests.sharding.jobs import ODD, Job, build, train
from torchrec_picasso.app.launch.run_ranks import run_ranks

JOB = Job(placement={"*": 2}, tables=ODD, batch_sizes=(6, 4), num_steps=8)
NUM_COUNTS = 5


def _num_tensors() -> int:
    """Tensors that are still alive once gloo has let go of the last sum. Collective.

    A worker thread of gloo wakes whoever waits for an all-reduce first and forgets its tensor
    next, for which it needs the interpreter's lock; so a sum that nobody refers to may be seen for
    some more milliseconds. A barrier gives the lock away. What piles up is in every count.
    """
    gc.collect()
    counts = []
    for _ in range(NUM_COUNTS):
        dist.barrier()
        counts.append(sum(type(found) is torch.Tensor for found in gc.get_objects()))
    return min(counts)


def _grow(rank: int, world_size: int) -> tuple[int, int, int, bool]:
    model = build(JOB, rank, world_size)
    train(model, JOB, rank, range(3))
    early = _num_tensors()
    train(model, JOB, rank, range(3, JOB.num_steps))
    late = _num_tensors()
    held = torch.empty(1)
    with_one_more = _num_tensors()
    del held
    module = weakref.ref(model.module)
    del model
    gc.collect()
    return early, late, with_one_more, module() is None


def test_tensors_do_not_pile_up_over_steps() -> None:
    for early, late, with_one_more, is_gone in run_ranks(_grow, 2, timeout_s=60):
        assert late == early
        assert with_one_more == late + 1  # a tensor that somebody holds is in every count
        assert is_gone
