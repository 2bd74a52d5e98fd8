"""The measured collectives, as calls on buffers of a given size.

Sizes are bytes that the busiest rank sends or receives, so that curves of different world sizes can
be compared.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from torchrec_picasso.exchange.all_to_all import start_all_to_all

__all__ = ["BYTES_PER_FLOAT", "CALLS", "COLLECTIVES", "Call"]

BYTES_PER_FLOAT = 4
COLLECTIVES = (
    "all_to_all",
    "row_exchange",
    "all_reduce",
    "reduce_scatter",
    "all_gather",
)
"""Names of the measured collectives. ``row_exchange`` is this package's all-to-all, see
:mod:`torchrec_picasso.exchange.all_to_all`."""

Call = tuple[int, Callable[[], object]]
"""Bytes that the busiest rank sends or receives, and the function to time."""


def _all_to_all(pg: dist.ProcessGroup, numel: int, device: torch.device) -> Call:
    world_size = pg.size()
    # equal blocks for all ranks; one of W blocks stays on the rank
    numel = numel // world_size * world_size
    source, target = _buffers(numel, numel, device)
    sent = numel * (world_size - 1) // world_size * BYTES_PER_FLOAT
    return sent, lambda: dist.all_to_all_single(target, source, group=pg)


def _row_exchange(pg: dist.ProcessGroup, numel: int, device: torch.device) -> Call:
    world_size = pg.size()
    block_W = [numel // world_size] * world_size
    source, target = _buffers(sum(block_W), sum(block_W), device)
    sent = sum(block_W[1:]) * BYTES_PER_FLOAT
    return sent, lambda: start_all_to_all(pg, target, source, block_W, block_W).wait()


def _all_reduce(pg: dist.ProcessGroup, numel: int, device: torch.device) -> Call:
    buffer = torch.zeros(numel, device=device)
    # the bandwidth-optimal algorithm: reduce-scatter, then all-gather
    sent = 2 * (pg.size() - 1) * numel // pg.size() * BYTES_PER_FLOAT
    return sent, lambda: dist.all_reduce(buffer, group=pg)


def _reduce_scatter(pg: dist.ProcessGroup, numel: int, device: torch.device) -> Call:
    share = max(1, numel // pg.size())
    source, target = _buffers(share * pg.size(), share, device)
    sent = (pg.size() - 1) * share * BYTES_PER_FLOAT
    return sent, lambda: dist.reduce_scatter_tensor(target, source, group=pg)


def _all_gather(pg: dist.ProcessGroup, numel: int, device: torch.device) -> Call:
    share = max(1, numel // pg.size())
    source, target = _buffers(share, share * pg.size(), device)
    sent = (pg.size() - 1) * share * BYTES_PER_FLOAT
    return sent, lambda: dist.all_gather_into_tensor(target, source, group=pg)


def _buffers(source: int, target: int, device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.zeros(source, device=device), torch.zeros(target, device=device)


CALLS: dict[str, Callable[[dist.ProcessGroup, int, torch.device], Call]] = {
    "all_to_all": _all_to_all,
    "row_exchange": _row_exchange,
    "all_reduce": _all_reduce,
    "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
}
"""By collective: a function of process group, float32 elements per rank and device that prepares
the call."""
