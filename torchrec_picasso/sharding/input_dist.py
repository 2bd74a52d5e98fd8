"""TorchRec's input dist: the request for a batch's rows, in two awaitables.

The first awaitable ends when the header is known, the second when the ids have arrived. All of it
runs ahead of the step that needs the rows. The features carry the layout of their rows to the
lookup.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torchrec.distributed.types import Awaitable
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_picasso._torchrec import BaseSparseFeaturesDist
from torchrec_picasso.errors import CompatError
from torchrec_picasso.rows.batch_ids import BatchIds
from torchrec_picasso.rows.group import RowGroup
from torchrec_picasso.rows.layout import RowLayout
from torchrec_picasso.rows.request import RowRequest
from torchrec_picasso.rows.valid_features import like

__all__ = ["LaidOutFeatures", "RequestDist", "layout_of"]


class RequestDist(BaseSparseFeaturesDist[KeyedJaggedTensor]):
    """Requests a batch's rows from their home ranks, as one micro-batch and without lookahead."""

    def __init__(self, group: RowGroup) -> None:
        super().__init__()
        self._group = group
        self.sound: Sequence[KeyedJaggedTensor] = ()
        """The result of :func:`.valid_features` for the module's next input. TorchRec may pad that
        input and make its ids unique, in features of its own type, before it calls ``forward``."""

    def forward(
        self, sparse_features: KeyedJaggedTensor
    ) -> Awaitable[Awaitable[KeyedJaggedTensor]]:
        """Starts the request. Collective.

        The inner awaitable returns the features with their layout.
        """
        sound, self.sound = self.sound, ()
        self._group.check(sparse_features)
        with torch.no_grad():
            batch = BatchIds.read([sparse_features], self._group, sound=sound)
            request = RowRequest(self._group, batch)
        return _Header(sparse_features, request)


class _Header(Awaitable[Awaitable[KeyedJaggedTensor]]):
    """Waits for the header; then all ranks know the counts of requested rows."""

    def __init__(self, features: KeyedJaggedTensor, request: RowRequest) -> None:
        super().__init__()
        self._features = features
        self._request = request

    def _wait_impl(self) -> Awaitable[KeyedJaggedTensor]:
        with torch.no_grad():
            self._request.send_ids()
        return _Ids(self._features, self._request)


class _Ids(Awaitable[KeyedJaggedTensor]):
    """Waits for the ids; then home ranks know the requested rows, and the layout is built."""

    def __init__(self, features: KeyedJaggedTensor, request: RowRequest) -> None:
        super().__init__()
        self._features = features
        self._request = request

    def _wait_impl(self) -> KeyedJaggedTensor:
        with torch.no_grad():
            self._request.receive_ids()
            return LaidOutFeatures.attach(self._features, self._request.lay_out())


class LaidOutFeatures(KeyedJaggedTensor):
    """The rank's features, carrying the layout of their rows through the pipeline.

    The lookup needs a KeyedJaggedTensor because feature processors and trackers run between the
    input dist and the lookup. A feature processor builds a new KeyedJaggedTensor but keeps the
    tensor of the ids, so the layout is an attribute of that tensor.
    """

    @staticmethod
    def attach(features: KeyedJaggedTensor, layout: RowLayout) -> LaidOutFeatures:
        """Wraps ``features`` without a copy of their data."""
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

    Raises CompatError if the ids were replaced between the input dist and the lookup.
    """
    layout: RowLayout | None = getattr(features.values(), "_row_layout", None)
    if layout is None:
        raise CompatError(
            "the ids changed between input_dist and lookup; hot/cold tables allow changed weights "
            "there (feature processors), but no changed ids: change them before the batch comes "
            "to the module, or place its tables without HotColdParams"
        )
    return layout
