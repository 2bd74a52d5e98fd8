"""The process group of one rank that a part runs in.

Each part runs in a process of its own: an illegal memory access ends that process's CUDA context
for good, and a hang ends it by its deadline, but neither reaches the other parts.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist


@contextmanager
def one_rank(device: str) -> Iterator[torch.device]:
    """Replaces the default group of a rank of ``run_ranks`` by one of NCCL, where it has to.

    NCCL alone, not beside gloo: a CPU tensor that is handed to a collective must not go unseen.

    Yields:
        The device to train on.
    """
    if device == "cpu":
        yield torch.device("cpu")
        return
    os.environ["CUDA_LAUNCH_BLOCKING"] = "0"  # before CUDA starts in this process
    gpu = torch.device("cuda", 0)
    torch.cuda.set_device(gpu)
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield gpu
        torch.cuda.synchronize()  # what went wrong on the device shows here at the latest
    finally:
        dist.destroy_process_group()
