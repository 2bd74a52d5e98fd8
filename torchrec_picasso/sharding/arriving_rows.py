"""What the lookup hands to the output dist: rows on their way, and where their gradients go."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from torchrec_picasso.ops.segment_reduction import PoolingIndex

__all__ = ["ArrivingRows", "GradientSink"]

GradientSink = Callable[[Sequence[Tensor]], None]
"""Takes the gradients of the rows that arrived, per matrix; must not hold those rows."""


@dataclass(frozen=True, kw_only=True)
class ArrivingRows(ABC):
    """Rows that a batch, or a micro-batch, asked for; one entry per matrix."""

    pooling_M: Sequence[PoolingIndex]
    """Which rows each bag sums."""
    lookups_M: Sequence[int]
    """Lookups of each matrix."""
    batch_size: int | None
    """Samples per feature, or ``None`` when each feature has its own."""
    weights_N: Tensor | None
    """Per-sample weights in bag order."""

    @property
    @abstractmethod
    def gradient_sink(self) -> GradientSink:
        """Where backward hands the rows' gradients."""

    @abstractmethod
    def arrive(self) -> Iterator[Tensor]:
        """Gives the rows of one matrix after the other, ``(U_m, D_m)``, waiting for each."""
