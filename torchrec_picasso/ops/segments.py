"""Cold rows of an interleaved batch, cut into what may travel early and what has to wait.

Rows come in *request order*: chunk by chunk, in a chunk by rank. Those that the batch before does
not update are *clean* and may be fetched while it computes; the others are *dirty*. In *segment
order* each chunk holds its clean rows before its dirty ones, both by rank, so that each (chunk,
clean or dirty) is one slice of a matrix and one exchange. The rank that asks and the home that is
asked cut alike, because both know the same counts and the same marks.

Shape letters: n rows, C chunks, W ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from torchrec_picasso.ops.order import stable_order

__all__ = ["CLEAN", "DIRTY", "Segments", "cut_segments"]

CLEAN, DIRTY = 0, 1


@dataclass(frozen=True)
class Segments:
    """Rows of one pack in segment order.

    Args:
        order_n: Place in request order of each row in segment order, int64; ``None`` = the same.
        counts_C2W: Rows by chunk, clean or dirty, and rank, on the host.
    """

    order_n: Tensor | None
    counts_C2W: list[list[list[int]]]

    @cached_property
    def _ends(self) -> list[int]:
        sizes = [sum(counts_W) for counts_2W in self.counts_C2W for counts_W in counts_2W]
        return [0, *accumulate(sizes)]

    @property
    def num_rows(self) -> int:
        """Rows of all segments."""
        return self._ends[-1]

    def rows(self, chunk: int, mark: int) -> slice:
        """Where the clean or dirty rows of a chunk are in segment order."""
        index = 2 * chunk + mark
        return slice(self._ends[index], self._ends[index + 1])

    def arrange(self, values_n: Tensor) -> Tensor:
        """Puts values from request order into segment order."""
        return values_n if self.order_n is None else values_n.index_select(0, self.order_n)


def cut_segments(counts_CW: list[list[int]], dirty_n: Tensor | None) -> Segments:
    """Cuts rows into segments.

    Args:
        counts_CW: Rows by chunk and rank, on the host.
        dirty_n: Which rows are dirty, in request order, bool, on the CPU or a device; ``None`` =
            all are.

    Cost:
        One stable sort of n small integers and a host sync on CUDA; nothing when all are alike.
    """
    num_chunks, world_size = len(counts_CW), len(counts_CW[0])
    if dirty_n is None:
        none = [0] * world_size
        return Segments(order_n=None, counts_C2W=[[none, counts_W] for counts_W in counts_CW])
    counts = torch.tensor(counts_CW).view(-1).to(dirty_n.device, non_blocking=True)
    place = torch.arange(counts.numel(), device=dirty_n.device)
    # (chunk, rank) -> (chunk, mark, rank)
    bucket = place.div(world_size, rounding_mode="floor") * (2 * world_size) + place % world_size
    bucket_n = torch.repeat_interleave(bucket, counts, output_size=dirty_n.numel())
    bucket_n += dirty_n * world_size
    num_buckets = num_chunks * 2 * world_size
    order_n = stable_order(bucket_n, num_buckets)
    edges = torch.arange(num_buckets + 1, device=dirty_n.device)
    found = torch.diff(torch.searchsorted(bucket_n.index_select(0, order_n), edges))
    return Segments(order_n=order_n, counts_C2W=found.view(num_chunks, 2, world_size).tolist())
