"""A batch cut into micro-batches and made unique, as a row request receives it.

Shape letters: K micro-batches, M matrices, F features, N lookups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torchrec.distributed.types import Awaitable
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_picasso.exchange.header import HeaderExchange
from torchrec_picasso.ops.bags import Bags
from torchrec_picasso.ops.partition import LocatedRows
from torchrec_picasso.ops.unique import UniqueRows

__all__ = ["ChunkedBatch", "Interleaving"]


@dataclass
class Interleaving:
    """How a module's input dist takes the next batch."""

    sizes_K: Sequence[int] | None = None
    """Samples of each micro-batch; ``None`` = in one piece, driven by TorchRec's awaitables."""
    has_data: bool = True
    """Whether the batch comes from this rank's data; else it stands in for data that has ended."""


@dataclass(frozen=True)
class ChunkedBatch(Awaitable[KeyedJaggedTensor]):
    """A batch made unique, in request order, its header on the way."""

    features: KeyedJaggedTensor
    bags: Bags
    sizes_K: Sequence[int]
    """Samples of each micro-batch."""
    rows: UniqueRows
    """Its rows in the order of their ids."""
    micro_batch_N: Tensor
    """Micro-batch of each lookup in bag order."""
    located: LocatedRows
    """Its rows by pack, chunk and home; hot rows of a pack before its chunks."""
    mean_MF: Sequence[Tensor | None]
    """Which features of each matrix are averaged; ``None`` = none."""
    header: HeaderExchange

    def _wait_impl(self) -> KeyedJaggedTensor:
        raise AssertionError("an interleaved batch is driven by its RowRequest")
