"""The request of a batch's rows: read from its features, sent to home ranks, laid out.

All operations here concern ids and run ahead of the step that needs the rows. The result is a
:class:`RowLayout`, which contains everything that fetches, gradients and the update need. Each
operation joins what the routes send into one collective. Invalid input is counted and replaced by
harmless values, so that every rank reaches the header, which reports the error to all ranks.

Shape letters: F features, K micro-batches and chunks, M matrices, N lookups, P packs, S bags, W
ranks.

Host syncs per batch on CUDA: beside those of the routes, with several routes one per module, for
the lookups of each feature.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_picasso.exchange.header import Header, HeaderExchange
from torchrec_picasso.exchange.packed import Payload
from torchrec_picasso.exchange.waiting import Pending
from torchrec_picasso.ops.id_reader import PreparedIds
from torchrec_picasso.ops.ids import zero
from torchrec_picasso.rows.group import RowGroup
from torchrec_picasso.rows.route import PackLayout, Pooling
from torchrec_picasso.rows.valid_features import are_bad, padded, raise_on_bad_input


@dataclass(frozen=True, kw_only=True)
class RowLayout:
    """Positions of a batch's rows, on the rank that uses them and on the ranks that store them.

    Row numbers and gradients are in request order, rows in fetch order. A bag that its home rank
    pools counts as a row.
    """

    features_by_module: Sequence[KeyedJaggedTensor]
    """The batch's features by module, in the order of the module's tables."""
    sizes_K: Sequence[int | None]
    """Samples of each micro-batch; ``None`` if every feature has its own batch size."""
    hot_epoch: int
    """Epoch of the hot set that the slots belong to."""
    most_asked: int
    """A bound of the rows that any rank's batch asks for, equal on all ranks."""
    packs: Sequence[PackLayout]
    num_rows_M: Sequence[int]
    """Number of rows of each matrix that this rank uses."""
    pooling_KM: Sequence[Sequence[Pooling]]
    weights_N: Tensor | None
    """Per-sample weights of the input batch, in KeyedJaggedTensor order."""


class RowRequest:
    """The request for the rows of one batch, by all routes; each method is called once, in order.

    Construction reads the ids and starts to send the header: all ranks construct the object, and
    keep it until the next batch's :meth:`send_dirty_mask`.

    Args:
        group: The tables of the modules.
        features_by_module: Features that each module looks up, in its lookup order, with valid
            lengths.
        sizes_K: Samples of each micro-batch; ``None`` = one micro-batch.
        has_data: False for a placeholder after the end of this rank's data.
        validated: The results of :func:`.valid_features` for the batch, in any order; the header
            reports repairs.
        prepared: Ids that a data loader read; ids that do not fit are read here again.
    """

    header: Header
    """The information of all ranks; available after :meth:`send_row_numbers`."""

    def __init__(
        self,
        group: RowGroup,
        features_by_module: Sequence[KeyedJaggedTensor],
        sizes_K: Sequence[int] | None = None,
        has_data: bool = True,
        validated: Sequence[KeyedJaggedTensor] = (),
        prepared: PreparedIds | None = None,
    ) -> None:
        self._group = group
        self._features_by_module = features_by_module
        self._validated = validated
        self._hot_epoch = group.hot_epoch
        self._dirty_mask: Pending | None = None
        features = group.in_one(features_by_module)
        is_variable = features.variable_stride_per_key()
        if is_variable and any(route.needs_one_batch_size for route in group.routes):
            features, is_variable = padded(features), False
        assert not is_variable or sizes_K is None, "samples of different features cannot be cut"
        self.features = features
        one_size = None if is_variable else features.stride()
        self._sizes_K: Sequence[int | None] = [one_size] if sizes_K is None else sizes_K
        self._weights_N = features.weights_or_none() if group.plan.has_pooling else None
        bad_weights = zero(features.values().device)
        if self._weights_N is not None:
            bad_weights = torch.isfinite(self._weights_N).logical_not().sum()
        # The features of a route follow those of the route before it.
        by_route = [features]
        if len(group.routes) > 1:
            by_route = features.split([sum(route.plan.features_M) for route in group.routes])
        pairs = zip(group.routes, by_route)
        self.by_route = [route.read(own, self._sizes_K, prepared) for route, own in pairs]
        self.header_exchange = HeaderExchange(
            exchanges=group.exchanges,
            routes=[request.words for request in self.by_route],
            outside_ids=reduce(add, [request.outside_ids for request in self.by_route]),
            bad_weights=bad_weights,
            bad_lengths=are_bad(validated),
            has_data=has_data,
            looks_up_nothing=not features.values().numel(),
            most_asked=max(features.values().numel(), features.lengths().numel()),
        )

    @property
    def is_prepared(self) -> bool:
        """Whether a data loader read the ids of any route."""
        return any(request.is_prepared for request in self.by_route)

    def send_row_numbers(self) -> bool:
        """Waits for the header and sends each cold row's number in the storage of its home rank.

        Collective. Returns whether any rank has data; if none has, nothing is sent, and the request
        has no further use.
        Raises InputError on all ranks if any rank's ids, weights or lengths are invalid.
        """
        group = self._group
        self.header = header = self.header_exchange.wait()
        if not header.any_data:
            return False
        raise_on_bad_input(header, group.tables, self.features, self._validated, group.ranks.rank)
        payloads: list[Payload] = []
        for request, words in zip(self.by_route, header.routes):
            payloads += request.row_number_payloads(words, group.row_dtype)
        # beside row numbers only bits of hot slots are sent
        most_sent = header.most_asked + group.num_hot_rows
        self._row_numbers = group.exchanges.start(
            payloads, self._relayed_row_numbers, most_sent, to_homes=True
        )
        return True

    def receive_row_numbers(self) -> None:
        """Waits for the row numbers: after it the home ranks know the requested rows."""
        self._row_numbers.wait()
        for request in self.by_route:
            request.take_row_numbers()

    def _relayed_row_numbers(self) -> list[Payload]:
        return [p for request in self.by_route for p in request.relayed_row_numbers()]

    def _relayed_dirty_mask(self) -> list[Payload]:
        return [p for request in self.by_route for p in request.relayed_dirty_mask()]

    def send_dirty_mask(self, before: RowRequest) -> None:
        """Tells requesting ranks which of their rows the batch before updates. Collective."""
        payloads: list[Payload] = []
        for request, earlier in zip(self.by_route, before.by_route):
            payloads += request.dirty_mask_payloads(earlier)
        if payloads:
            self._dirty_mask = self._group.exchanges.start(
                payloads, self._relayed_dirty_mask, self.header.most_asked, to_homes=False
            )

    def lookups_by_home(self) -> Tensor:
        """Counts this rank's lookups by the home rank that serves them, int64, ``(W,)``."""
        return reduce(add, [request.lookups_by_home() for request in self.by_route])

    def build_layout(self) -> RowLayout:
        """Builds the layout; waits for the dirty mask. Without a mask, all rows are dirty."""
        if self._dirty_mask is not None:
            self._dirty_mask.wait()
        packs: list[PackLayout] = []
        pooling_KM: list[list[Pooling]] = [[] for _ in self._sizes_K]
        for request in self.by_route:
            own_packs, own_KM = request.build_layout(first_matrix=len(pooling_KM[0]))
            packs += own_packs
            for pooling_M, own_M in zip(pooling_KM, own_KM):
                pooling_M += own_M
        matrices = self._group.plan.matrices
        return RowLayout(
            features_by_module=self._features_by_module,
            sizes_K=self._sizes_K,
            hot_epoch=self._hot_epoch,
            most_asked=self.header.most_asked,
            packs=packs,
            num_rows_M=[sum(pack.num_rows for pack in packs[matrix]) for matrix in matrices],
            pooling_KM=pooling_KM,
            weights_N=self._weights_N,
        )


def with_new_layout(group: RowGroup, layout: RowLayout) -> RowLayout:
    """Rebuilds the layout of an unsplit batch after the hot rows changed. Collective."""
    with torch.no_grad():
        request = RowRequest(group, layout.features_by_module)
        request.send_row_numbers()
        request.receive_row_numbers()
        return request.build_layout()
