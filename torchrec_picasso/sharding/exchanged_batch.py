"""What the input dist leaves behind for the lookup: a batch whose ids are at their homes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_picasso.errors import CompatError
from torchrec_picasso.exchange.header import StepHeader
from torchrec_picasso.ops.segment_reduction import PoolingIndex

__all__ = ["ExchangedBatch", "ExchangedFeatures", "exchanged_batch"]


@dataclass(frozen=True)
class ExchangedBatch:
    """One batch of one module between ids exchange and update."""

    header: StepHeader
    hot_slots_P: Sequence[Tensor]
    """Hot slots that this rank's batch uses, counted from 0 in the pack."""
    touched_slots_P: Sequence[Tensor]
    """Hot slots that any rank's batch uses, counted from 0 in the pack."""
    requested_rows_P: Sequence[Tensor]
    """Home rows that each rank asks of this one, grouped by rank."""
    pooling_M: Sequence[PoolingIndex]
    """Which rows of each matrix the bags sum."""
    source_N: Tensor | None
    """KeyedJaggedTensor position of each lookup in bag order, when weights may be needed."""
    lookups_M: Sequence[int]
    """Lookups of each matrix."""
    batch_size: int | None
    """Samples per feature, or ``None`` when each feature has its own."""

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor held, for stream bookkeeping."""
        yield self.header.touched_slots_T
        for group in (self.hot_slots_P, self.touched_slots_P, self.requested_rows_P):
            yield from group
        for index in self.pooling_M:
            yield from index.tensors()
        if self.source_N is not None:
            yield self.source_N


class ExchangedFeatures(KeyedJaggedTensor):
    """The rank's own features, carrying their exchange through the pipeline.

    The lookup needs a KeyedJaggedTensor because feature processors and trackers sit between the
    input dist and it. A feature processor wraps the features anew but keeps the tensor of their
    values, so the exchange is found through that tensor.
    """

    @staticmethod
    def of(features: KeyedJaggedTensor, batch: ExchangedBatch) -> ExchangedFeatures:
        """Wraps ``features``; no copy."""
        values = features.values().detach()  # a tensor object of our own to hang the batch on
        values._exchanged_batch = batch
        variable = features.variable_stride_per_key()
        return ExchangedFeatures(
            keys=features.keys(),
            values=values,
            weights=features.weights_or_none(),
            lengths=features.lengths(),
            offsets=features.offsets_or_none(),
            stride=None if variable else features.stride(),
            stride_per_key_per_rank=features.stride_per_key_per_rank() if variable else None,
            inverse_indices=features.inverse_indices_or_none(),
        )

    def record_stream(self, stream: torch.Stream) -> None:
        """Keeps every tensor of the features and their exchange alive for ``stream``."""
        super().record_stream(stream)
        for tensor in exchanged_batch(self).tensors():
            tensor.record_stream(stream)


def exchanged_batch(features: Any) -> ExchangedBatch:
    """Finds the exchange of features that came out of the input dist.

    Raises:
        CompatError: If something between the input dist and the lookup replaced the ids.
    """
    batch = getattr(features.values(), "_exchanged_batch", None)
    if batch is None:
        raise CompatError(
            "the ids changed between input_dist and lookup; hot/cold tables allow changed weights "
            "there (feature processors), but no changed ids"
        )
    return batch
