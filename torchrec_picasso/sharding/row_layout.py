"""Where every row of an interleaved batch lies: on the rank that uses it, on those that keep it.

*Mine* are the cold rows that this rank asks for, *asked* those that others ask of it. Ids and
gradients of both are in request order, an exchange for each chunk; rows are in fetch order.

Shape letters: K micro-batches and chunks, M matrices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from torchrec_picasso.ops.fetch_order import Exchanges, FetchOrder
from torchrec_picasso.ops.micro_pooling import MicroPooling

__all__ = ["PackLayout", "RowLayout"]


@dataclass(frozen=True, kw_only=True)
class PackLayout:
    """The rows of one pack."""

    hot_slots: Tensor
    """Hot slots that this rank's batch uses, counted from 0 in the pack."""
    touched_slots: Tensor
    """Hot slots that any rank's batch uses, counted from 0 in the pack."""
    mine: Exchanges
    asked: Exchanges
    asked_rows: Tensor
    """Home rows asked of this rank, in request order."""
    mine_by_fetch: FetchOrder
    asked_by_fetch: FetchOrder
    asked_rows_by_fetch: Tensor
    """Home rows asked of this rank, in fetch order."""

    @property
    def num_hot(self) -> int:
        """Hot rows that this rank's batch uses."""
        return self.hot_slots.numel()

    @property
    def num_rows(self) -> int:
        """Rows that this rank's batch uses."""
        return self.num_hot + self.mine.num_rows


@dataclass(frozen=True, kw_only=True)
class RowLayout:
    """The rows of a batch of one module."""

    sizes_K: Sequence[int]
    """Samples of each micro-batch."""
    homes_written: bool
    """Whether any rank's homes were written from outside, so that replicas have to be filled."""
    packs: Sequence[PackLayout]
    pooling_KM: Sequence[Sequence[MicroPooling]]
    weights_N: Tensor | None
    """Per-sample weights in bag order, float32."""

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor held, for stream bookkeeping."""
        for pack in self.packs:
            yield from (pack.hot_slots, pack.touched_slots)
            yield from (pack.asked_rows, pack.asked_rows_by_fetch)
        for pooling_M in self.pooling_KM:
            for pooling in pooling_M:
                yield from pooling.tensors()
        if self.weights_N is not None:
            yield self.weights_N
