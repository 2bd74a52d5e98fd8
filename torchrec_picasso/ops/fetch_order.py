"""The order in which the cold rows of a batch are sent to the rank that requested them.

Rows are requested in *request order*: by chunk, then by rank. Rows that the batch before does not
update are *clean* and may be fetched while that batch computes. The other rows are *dirty* and wait
for its update. In *fetch order* all clean rows come first, by rank: one exchange sends them a step
ahead. The dirty rows follow by chunk, then by rank. Each chunk has its own exchange, because the
first micro-batch waits for the first chunk only. So each exchange fills one slice of a matrix. The
requesting rank and the home rank compute the same order, because both have the same counts and the
same dirty mask.

Shape letters: n rows, K chunks, W ranks, E exchanges (in request order as many as chunks, in fetch
order one more).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from torchrec_picasso.ops.order import stable_order

__all__ = ["CLEAN", "ExchangeSplits", "FetchOrder", "dirty_exchange", "find_fetch_order"]

CLEAN = 0
"""Index of the exchange of all clean rows in fetch order."""


def dirty_exchange(chunk: int) -> int:
    """Returns the index in fetch order of the exchange of a chunk's dirty rows."""
    return 1 + chunk


@dataclass(frozen=True)
class ExchangeSplits:
    """The split of one pack's rows into consecutive exchanges, and of each exchange by rank."""

    counts_EW: list[list[int]]
    """Number of rows, on the host."""

    @cached_property
    def _ends(self) -> list[int]:
        return [0, *accumulate(map(sum, self.counts_EW))]

    @property
    def num_rows(self) -> int:
        """Number of rows of all exchanges."""
        return self._ends[-1]

    def rows(self, exchange: int) -> slice:
        """Position of the rows of one exchange."""
        return slice(self._ends[exchange], self._ends[exchange + 1])


@dataclass(frozen=True)
class FetchOrder(ExchangeSplits):
    """The fetch order of one pack's rows, and its split into exchanges."""

    order_n: Tensor | None
    """Position in request order of each row in fetch order, int64; ``None`` = equal orders."""

    def arrange(self, values_n: Tensor) -> Tensor:
        """Puts values from request order into fetch order."""
        return values_n if self.order_n is None else values_n.index_select(0, self.order_n)

    def positions(self, device: torch.device) -> Tensor:
        """Position in fetch order of each row in request order, int64, shape ``(n,)``."""
        in_order = torch.arange(self.num_rows, device=device)
        if self.order_n is None:
            return in_order
        # Inverse permutation: scatter the new position i to the old position order_n[i].
        return torch.empty_like(in_order).scatter_(0, self.order_n, in_order)


def find_fetch_order(counts_KW: list[list[int]], dirty_n: Tensor | None) -> FetchOrder:
    """Computes the fetch order of rows from a dirty mask in request order; ``None`` = all dirty.

    Costs one stable sort of n small integers and a host sync on CUDA; nothing without a mask.
    """
    num_chunks, world_size = len(counts_KW), len(counts_KW[0])
    if dirty_n is None:
        return FetchOrder([[0] * world_size, *counts_KW], order_n=None)
    # pair_n, shape (n,): the number chunk * W + rank of each row in request order. output_size is
    # known, so repeat_interleave does not sync the host.
    counts = torch.tensor(counts_KW).view(-1).to(dirty_n.device, non_blocking=True)
    pairs = torch.arange(counts.numel(), device=dirty_n.device)  # (chunk, rank)
    pair_n = torch.repeat_interleave(pairs, counts, output_size=dirty_n.numel())
    # bucket_n, shape (n,): the number exchange * W + rank. A dirty row of chunk k belongs to
    # exchange 1 + k. A clean row of any chunk belongs to exchange 0, hence "pair modulo W".
    bucket_n = torch.where(dirty_n, pair_n + world_size, pair_n % world_size)  # (exchange, rank)
    num_buckets = (1 + num_chunks) * world_size
    order_n = stable_order(bucket_n, num_buckets)
    edges = torch.arange(num_buckets + 1, device=dirty_n.device)
    # Rows per bucket, shape ((1 + K) W,): differences of the bucket edges in the sorted buckets.
    found = torch.diff(torch.searchsorted(bucket_n.index_select(0, order_n), edges))
    return FetchOrder(found.view(-1, world_size).tolist(), order_n)
