"""What the input dist leaves behind for the lookup: a batch's features, and where its rows lie."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_picasso.errors import CompatError
from torchrec_picasso.rows.kjt import like
from torchrec_picasso.rows.layout import RowLayout
from torchrec_picasso.rows.sound_features import MendedFeatures

__all__ = ["LaidOutFeatures", "layout_of", "with_own_weights", "with_weights"]


class LaidOutFeatures(KeyedJaggedTensor):
    """The rank's own features, carrying the layout of their rows through the pipeline.

    The lookup needs a KeyedJaggedTensor because feature processors and trackers sit between the
    input dist and it. A feature processor wraps the features anew but keeps the tensor of their
    values, so the layout is found through that tensor.
    """

    @staticmethod
    def of(features: KeyedJaggedTensor, layout: RowLayout) -> LaidOutFeatures:
        """Wraps ``features``; no copy."""
        values = features.values().detach()  # a tensor object of our own to hang the layout on
        values._row_layout = layout
        weights_N, offsets_S1 = features.weights_or_none(), features.offsets_or_none()
        return like(features, LaidOutFeatures, values, weights_N, features.lengths(), offsets_S1)

    def record_stream(self, stream: torch.Stream) -> None:
        """Keeps every tensor of the features and their layout alive for ``stream``."""
        super().record_stream(stream)
        for tensor in layout_of(self).tensors():
            tensor.record_stream(stream)


def layout_of(features: Any) -> RowLayout:
    """Finds the layout of features that came out of the input dist.

    Raises:
        CompatError: If something between the input dist and the lookup replaced the ids.
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
    """The same features with these per-sample weights; no copy."""
    if isinstance(features, MendedFeatures):
        return MendedFeatures.with_weights(features, weights_N)
    values_N, lengths_S, offsets_S1 = (
        features.values(),
        features.lengths(),
        features.offsets_or_none(),
    )
    return like(features, KeyedJaggedTensor, values_N, weights_N, lengths_S, offsets_S1)


def with_own_weights(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """The same features with a copy of their weights, zeros where there are none."""
    weights_N = features.weights_or_none()
    if weights_N is None:
        weights_N = torch.zeros_like(features.values(), dtype=torch.float32)
    return with_weights(features, weights_N.clone())
