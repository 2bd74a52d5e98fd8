"""Dense gradients are averaged over ranks, in buckets that leave during backward."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchrec_picasso.launch.run_ranks import run_ranks
from torchrec_picasso.train_pipeline.dense_reduction import DenseReduction

SIZES = (3, 300_000, 5, 7)  # the second fills a bucket
USED = ((0, 1, 2), (0, 1))  # by rank: the third on one rank only, the last nowhere


def _reduce(rank: int, world_size: int) -> tuple[list[Tensor | None], list[int]]:
    """The reduced gradients, and how many all-reduces had begun when backward was over."""
    pg = dist.group.WORLD
    assert pg is not None
    parameters = [nn.Parameter(torch.ones(size)) for size in SIZES]
    begun = _count_all_reduces()
    reduction = DenseReduction(pg, parameters)
    loss = torch.stack([(rank + 1) * parameters[i].sum() * (i + 1) for i in USED[rank]]).sum()
    loss.backward()
    in_backward = len(begun)
    reduction.start_rest()
    reduction.wait()
    return [parameter.grad for parameter in parameters], [in_backward, len(begun)]


def _count_all_reduces() -> Sequence[Tensor]:
    begun: list[Tensor] = []
    original = dist.all_reduce

    def all_reduce(tensor: Tensor, *args: object, **kwargs: object) -> object:
        begun.append(tensor)
        return original(tensor, *args, **kwargs)

    dist.all_reduce = all_reduce
    return begun


def test_averages_over_ranks_whoever_has_a_gradient() -> None:
    for grads, (_, num_buckets) in run_ranks(_reduce, 2, timeout_s=60):
        assert num_buckets == 2
        expected = [(1 + 2) / 2 * 1, (1 + 2) / 2 * 2, (1 + 0) / 2 * 3]
        for grad, size, value in zip(grads, SIZES, expected):
            torch.testing.assert_close(grad, torch.full((size,), value))
        assert grads[3] is None


def _reduce_all(rank: int, world_size: int) -> list[int]:
    pg = dist.group.WORLD
    assert pg is not None
    parameters = [nn.Parameter(torch.ones(size)) for size in SIZES]
    begun = _count_all_reduces()
    reduction = DenseReduction(pg, parameters)
    torch.stack([parameter.sum() for parameter in parameters]).sum().backward()
    in_backward = len(begun)
    reduction.start_rest()
    reduction.wait()
    return [in_backward, len(begun)]


def test_buckets_that_are_complete_leave_during_backward() -> None:
    assert run_ranks(_reduce_all, 2, timeout_s=60) == [[2, 2]] * 2
