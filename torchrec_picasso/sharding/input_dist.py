"""TorchRec's input dist: the request for a batch's rows, in two awaitables.

The first awaitable ends when the header is known, the second when the ids have arrived. All of it
runs ahead of the step that needs the rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torchrec.distributed.types import Awaitable
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_picasso._torchrec import BaseSparseFeaturesDist
from torchrec_picasso.rows.batch_ids import BatchIds
from torchrec_picasso.rows.group import RowGroup
from torchrec_picasso.rows.request import RowRequest
from torchrec_picasso.sharding.features import LaidOutFeatures

__all__ = ["RequestDist"]


class RequestDist(BaseSparseFeaturesDist[KeyedJaggedTensor]):
    """Requests a batch's rows from their home ranks, as one micro-batch and without lookahead.

    Args:
        group: The tables.
    """

    def __init__(self, group: RowGroup) -> None:
        super().__init__()
        self._group = group
        self.sound: Sequence[KeyedJaggedTensor] = ()
        """The result of :func:`.valid_features` for the module's next input. TorchRec may pad that
        input and make its ids unique, in features of its own type, before it calls ``forward``."""

    def forward(
        self, sparse_features: KeyedJaggedTensor
    ) -> Awaitable[Awaitable[KeyedJaggedTensor]]:
        """Starts the request.

        Collective: all ranks call this, in the same order.

        Returns:
            An awaitable of an awaitable of the features with their layout.
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
