"""Passes a batch's features and the layout of its rows from the input dist to the lookup."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_picasso.errors import CompatError
from torchrec_picasso.rows.kjt import like
from torchrec_picasso.rows.layout import RowLayout
from torchrec_picasso.rows.valid_features import RepairedFeatures

__all__ = ["LaidOutFeatures", "layout_of", "with_own_weights", "with_weights"]


class LaidOutFeatures(KeyedJaggedTensor):
    """The rank's features, carrying the layout of their rows through the pipeline.

    The lookup needs a KeyedJaggedTensor because feature processors and trackers run between the
    input dist and the lookup. A feature processor builds a new KeyedJaggedTensor but keeps the
    tensor of the ids, so the layout is an attribute of that tensor.
    """

    @staticmethod
    def attach(features: KeyedJaggedTensor, layout: RowLayout) -> LaidOutFeatures:
        """Wraps ``features`` without a copy of their data.

        Args:
            features: The batch's features.
            layout: Layout of their rows.
        """
        # detach() makes a new tensor object on the same memory; the caller's gets no attribute
        values = features.values().detach()
        values._row_layout = layout
        weights_N, offsets_S1 = features.weights_or_none(), features.offsets_or_none()
        return like(features, LaidOutFeatures, values, weights_N, features.lengths(), offsets_S1)

    def record_stream(self, stream: torch.Stream) -> None:
        """Records ``stream`` on all tensors of the features and their layout."""
        super().record_stream(stream)
        for tensor in layout_of(self).tensors():
            tensor.record_stream(stream)


def layout_of(features: Any) -> RowLayout:
    """Finds the layout of features that came out of the input dist.

    Raises:
        CompatError: If the ids were replaced between the input dist and the lookup.
    """
    layout: RowLayout | None = getattr(features.values(), "_row_layout", None)
    if layout is None:
        raise CompatError(
            "the ids changed between input_dist and lookup; hot/cold tables allow changed weights "
            "there (feature processors), but no changed ids: change them before the batch comes "
            "to the module, or place its tables without HotColdParams"
        )
    return layout


def with_weights(features: KeyedJaggedTensor, weights_N: Tensor | None) -> KeyedJaggedTensor:
    """Replaces the per-sample weights, float ``(N,)`` or ``None``; the rest is not copied."""
    if isinstance(features, RepairedFeatures):
        return RepairedFeatures.with_weights(features, weights_N)
    values_N, lengths_S, offsets_S1 = (
        features.values(),
        features.lengths(),
        features.offsets_or_none(),
    )
    return like(features, KeyedJaggedTensor, values_N, weights_N, lengths_S, offsets_S1)


def with_own_weights(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Replaces the weights by a copy; by zeros if the features have none."""
    weights_N = features.weights_or_none()
    if weights_N is None:
        weights_N = torch.zeros_like(features.values(), dtype=torch.float32)
    return with_weights(features, weights_N.clone())
