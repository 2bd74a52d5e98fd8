"""The byte meter against known sizes, DDP's C++ reducer, and the kernel's own counter."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives

from tests.support.shared_run import run_once
from torchrec_picasso.app.runs.wire_meter import WireCount, WireMeter, loopback_sent_bytes

FLOAT_BYTES = 4
N = 12  # elements of each test tensor


def _run(rank: int, world_size: int) -> tuple[Any, Any, Any]:
    """Everything that is metered, and what is refused."""
    with (
        WireMeter(),
        pytest.raises(NotImplementedError, match="does not see into functional collectives"),
    ):
        _functional_collectives.all_reduce(torch.ones(2), "sum", dist.group.WORLD)
    each, ddp = count_each_collective(rank, world_size), count_ddp(rank, world_size)
    return each, ddp, send_megabytes(rank, world_size)


def count_each_collective(rank: int, world_size: int) -> dict[str, WireCount]:
    x = torch.arange(float(N))
    parts = list(x.clone().chunk(world_size))
    whole = torch.empty(N * world_size)
    splits = [4, 8] if rank == 0 else [6, 6]
    received = [4, 6] if rank == 0 else [8, 6]
    calls = {
        "all_to_all": lambda: dist.all_to_all_single(torch.empty(N), x),
        "all_to_all_uneven": lambda: dist.all_to_all_single(
            torch.empty(sum(received)), x, received, splits
        ),
        "all_to_all_list": lambda: dist.all_to_all([torch.empty(6), torch.empty(6)], parts),
        "all_reduce": lambda: dist.all_reduce(x.clone()),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(torch.empty(N // world_size), x),
        "reduce_scatter_list": lambda: dist.reduce_scatter(torch.empty(6), parts),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, x),
        "all_gather_list": lambda: dist.all_gather([torch.empty(N), torch.empty(N)], x),
        "broadcast": lambda: dist.broadcast(x.clone(), 0),
        "barrier": lambda: dist.barrier(),
    }
    counts = {}
    for name, call in calls.items():
        with WireMeter() as meter:
            call()
        counts[name] = meter.count
    return counts


def test_bytes_follow_the_formula_of_each_collective() -> None:
    expected_elements = {  # by rank 0, by rank 1
        "all_to_all": (6, 6),
        "all_to_all_uneven": (8, 6),
        "all_to_all_list": (6, 6),
        "all_reduce": (N, N),  # 2 (W-1)/W n
        "reduce_scatter": (N / 2, N / 2),
        "reduce_scatter_list": (N / 2, N / 2),
        "all_gather": (N, N),
        "all_gather_list": (N, N),
        "broadcast": (N, 0),
        "barrier": (0, 0),
    }
    ranks = [found for found, _, _ in run_once(_run, 2)]
    for name, elements in expected_elements.items():
        sent = tuple(counts[name].sent_bytes for counts in ranks)
        assert sent == tuple(count * FLOAT_BYTES for count in elements), name
        assert ranks[0][name].num_collectives == (0 if name == "barrier" else 1), name


def count_ddp(rank: int, world_size: int) -> tuple[int, int]:
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(50, 20), static_graph=True)
    for _ in range(3):  # DDP rebuilds its buckets once, with collectives of its own
        model(torch.ones(2, 50)).sum().backward()
    with WireMeter() as meter:
        model(torch.ones(2, 50)).sum().backward()
    return meter.count.num_collectives, meter.count.sent_bytes


def test_collectives_of_ddps_reducer_are_seen() -> None:
    num_weights = 50 * 20 + 20
    for num_collectives, sent_bytes in (found for _, found, _ in run_once(_run, 2)):
        assert num_collectives == 1
        assert sent_bytes == num_weights * FLOAT_BYTES


def send_megabytes(rank: int, world_size: int) -> tuple[int, int | None]:
    x = torch.ones(1_000_000)
    dist.barrier()
    before = loopback_sent_bytes()
    dist.barrier()
    with WireMeter() as meter:
        dist.all_reduce(x)
        dist.all_to_all_single(torch.empty_like(x), x)
        dist.broadcast(x, 0)
    dist.barrier()
    after = loopback_sent_bytes()
    return meter.count.sent_bytes, None if before is None else after - before


def test_meter_agrees_with_the_kernels_counter() -> None:
    results = [found for _, _, found in run_once(_run, 2)]
    if results[0][1] is None:
        pytest.skip("this system has no /proc/net/dev")
    metered = sum(sent for sent, _ in results)
    assert metered == (2 * 4 + 2 * 2 + 4) * 1_000_000
    # TCP headers and acknowledgements add a few percent; other processes may use lo meanwhile.
    assert metered <= results[0][1] <= 1.5 * metered
