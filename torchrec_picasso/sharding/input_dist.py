"""TorchRec's input dist: the request for a batch's rows, in the two waits that its pipelines know.

The first wait ends when the header is known, the second when the ids have arrived. Everything here
runs ahead of the step that needs it.
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
    """Asks the homes for a batch's rows, as one part and without looking ahead.

    Args:
        group: The tables.
    """

    def __init__(self, group: RowGroup) -> None:
        super().__init__()
        self._group = group
        self.sound: Sequence[KeyedJaggedTensor] = ()
        """What :func:`.sound_features` made of the module's next input. TorchRec may pad that input
        and make its ids unique, in features of a type of its own, before they come here."""

    def forward(
        self, sparse_features: KeyedJaggedTensor
    ) -> Awaitable[Awaitable[KeyedJaggedTensor]]:
        """Starts the request. Collective."""
        sound, self.sound = self.sound, ()
        with torch.no_grad():
            batch = BatchIds.read([sparse_features], self._group, sound=sound)
            request = RowRequest(self._group, batch)
        return _Header(sparse_features, request)


class _Header(Awaitable[Awaitable[KeyedJaggedTensor]]):
    """Ends when every rank knows what the others ask for."""

    def __init__(self, features: KeyedJaggedTensor, request: RowRequest) -> None:
        super().__init__()
        self._features = features
        self._request = request

    def _wait_impl(self) -> Awaitable[KeyedJaggedTensor]:
        with torch.no_grad():
            self._request.send_ids()
        return _Ids(self._features, self._request)


class _Ids(Awaitable[KeyedJaggedTensor]):
    """Ends when the homes know which rows they are asked for."""

    def __init__(self, features: KeyedJaggedTensor, request: RowRequest) -> None:
        super().__init__()
        self._features = features
        self._request = request

    def _wait_impl(self) -> KeyedJaggedTensor:
        with torch.no_grad():
            self._request.receive_ids()
            return LaidOutFeatures.of(self._features, self._request.lay_out())
