"""Requests the rows of a batch from their home ranks and computes the layout of the rows.

All operations here concern ids and run ahead of the step that needs the rows. The result is a
:class:`RowLayout`, which contains everything that fetches, gradients and the update need. Each
operation joins what the routes send into one collective.

Shape letters: K parts, M matrices, P packs, W ranks.
"""

from __future__ import annotations

import torch

from torchrec_picasso.exchange.header import Header, HeaderExchange
from torchrec_picasso.exchange.packed import PackedAllToAll
from torchrec_picasso.rows.batch_ids import BatchIds
from torchrec_picasso.rows.group import RowGroup
from torchrec_picasso.rows.layout import RowLayout
from torchrec_picasso.rows.route import PackLayout, Pooling
from torchrec_picasso.rows.valid_features import raise_on_bad_input

__all__ = ["RowRequest", "with_new_layout"]


class RowRequest:
    """The request for the rows of one batch; each method is called once, in order.

    Construction sends the header. The object must be kept until the next batch's
    :meth:`send_dirty_mask`.
    """

    _header: Header
    _ids: PackedAllToAll

    def __init__(self, group: RowGroup, batch: BatchIds) -> None:
        self._group = group
        self._batch = batch
        self._header_exchange = HeaderExchange(group.ranks, batch.words)
        self._dirty_mask: PackedAllToAll | None = None

    def send_ids(self) -> bool:
        """Waits for the header and sends all ids to their home ranks. Collective.

        Returns whether any rank has data; if none has, nothing is sent and the step ends here.
        Raises InputError on all ranks if any rank's ids, weights or lengths are invalid.
        """
        group, batch = self._group, self._batch
        self._header = header = self._header_exchange.wait()
        if not header.any_data:
            return False
        raise_on_bad_input(header, group.tables, batch.features, batch.validated, group.ranks.rank)
        for request, words in zip(batch.routes, header.routes):
            request.take_header(words)
        payloads = [p for request in batch.routes for p in request.ids(group.row_dtype)]
        self._ids = PackedAllToAll(group.ranks, payloads)
        return True

    @property
    def any_looks_up_nothing(self) -> bool:
        """Whether any rank's batch has no lookup, equal on all ranks; valid after
        :meth:`send_ids`."""
        return self._header.any_looks_up_nothing

    def receive_ids(self) -> None:
        """Waits for the ids: after it the home ranks know the requested rows."""
        self._ids.wait()

    def send_dirty_mask(self, before: RowRequest) -> None:
        """Sends the dirty mask, the requested rows that the batch before updates. Collective."""
        requests = zip(self._batch.routes, before._batch.routes)
        payloads = [p for request, earlier in requests for p in request.dirty_mask(earlier)]
        if payloads:
            self._dirty_mask = PackedAllToAll(self._group.ranks, payloads)

    def lay_out(self) -> RowLayout:
        """Builds the layout; waits for the dirty mask. Without a mask, all rows are dirty."""
        batch, plan = self._batch, self._group.plan
        if self._dirty_mask is not None:
            self._dirty_mask.wait()
        packs: list[PackLayout] = []
        pooling_KM: list[list[Pooling]] = [[] for _ in batch.sizes_K]
        for request in batch.routes:
            own_packs, own_KM = request.lay_out(first_matrix=len(pooling_KM[0]))
            packs += own_packs
            for pooling_M, own_M in zip(pooling_KM, own_KM):
                pooling_M += own_M
        return RowLayout(
            features_by_module=batch.features_by_module,
            sizes_K=batch.sizes_K,
            hot_epoch=batch.hot_epoch,
            packs=packs,
            rows_M=[sum(pack.num_rows for pack in packs[matrix]) for matrix in plan.matrices],
            pooling_KM=pooling_KM,
            weights_N=batch.weights_N,
        )


def with_new_layout(group: RowGroup, layout: RowLayout) -> RowLayout:
    """Rebuilds the layout of an unsplit batch after the hot rows changed. Collective."""
    with torch.no_grad():
        request = RowRequest(group, BatchIds.read(layout.features_by_module, group))
        request.send_ids()
        request.receive_ids()
        return request.lay_out()
