"""The row exchange by host: a row crosses hosts once per host that needs it, and so do gradients.

Row numbers go to the relay, the rank of the own host with the home rank's place, and from there to
the home rank (``exchange/by_host.py``). They cross hosts as they came, with repeats: both ends find
the unique rows by the same function, so no count of these has to travel, and the home rank knows
how many ranks ask for a row. A unique row is in the first chunk of any rank of the host: it has
arrived when the first of them needs it, and its gradient is complete after that chunk's, because
chunks come back in descending order.

Header words of a pair of ranks are those of rows; a relay reads the words that it passes on.
Gradients of hot rows are summed over the host before they cross.

Shape letters: K chunks, L places, P packs, U unique rows, W ranks, Y hosts; n rows asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchrec_picasso.errors import CompatError
from torchrec_picasso.exchange.all_to_all import Ranks
from torchrec_picasso.exchange.by_host import HostExchanges, connect_hosts
from torchrec_picasso.exchange.packed import Payload, with_all_chunks
from torchrec_picasso.ops.ids import IdSpace
from torchrec_picasso.ops.row_order import (
    ExchangeSplits,
    FetchOrders,
    UniqueRows,
    by_pack,
    first_use_chunks,
    unique_rows,
)
from torchrec_picasso.ops.sorts import positions_of, sort_by_segment
from torchrec_picasso.rows.route import IncomingRequests, Relay
from torchrec_picasso.rows.row_route import IncomingRows, RowRoute, RowRouteRequest


class NodeRoute(RowRoute):
    """Tables whose unique rows travel by host. Arguments as for :class:`Route`."""

    name = "node_rows"
    exchanges = HostExchanges

    @classmethod
    def connect(cls, table: str, ranks: Ranks, device: torch.device | None) -> None:
        """Makes the groups inside and across hosts."""
        if ranks.row_codec or ranks.gradient_codec:
            raise CompatError(
                f"table {table!r} has form='node_rows', and its module a codec for rows or "
                "gradients, which two parts of an exchange would apply twice; leave out the codec "
                "of SEQUENCE_EMBEDDINGS_ALL_TO_ALL, or use form='rows'"
            )
        connect_hosts(ranks.pg, device)

    def __post_init__(self) -> None:
        exchanges = HostExchanges(self.ranks)
        self.num_hosts, self.num_places = exchanges.num_hosts, exchanges.num_places
        # Home rank y L + l is number l Y + y in requests: those of one relay are neighbours.
        numbers_W = torch.arange(self.ranks.size, device=self.device)
        numbers_LY = numbers_W.view(self.num_places, self.num_hosts)
        self._number_of_rank_W = numbers_LY.t().reshape(-1)
        super().__post_init__()
        same_place = slice(self.ranks.rank % self.num_places, None, self.num_places)
        self.relayed_rows_PY = np.array([rows_W[same_place] for rows_W in self.space.home_rows_PW])
        """Number of home rows of the ranks of this rank's place, by pack and host."""

    def _request_space(self) -> IdSpace:
        numbers_TW = self._number_of_rank_W.index_select(0, self.space.block_rank_TW)
        return replace(self.space, block_rank_TW=numbers_TW)

    def by_rank(self, counts_WX: Tensor) -> Tensor:
        """Returns an entry per home rank in the order of ranks, from that of requests."""
        return counts_WX.index_select(0, self._number_of_rank_W)

    def _request(self, **fields: Any) -> RowRouteRequest:
        return _Request(**fields)


@dataclass(frozen=True, kw_only=True)
class _MergedRows:
    """The unique rows among those that ranks of a host ask for, of the home ranks of one place, or
    those that ranks of all hosts ask one home rank for."""

    splits_P: list[ExchangeSplits]
    """Distinct rows in request order, by chunk and host."""
    rows_U: Tensor
    """Home row of each unique row in request order, int64."""
    position_n: Tensor
    """Position in request order of the unique row of each asked row, over all packs, int64."""
    asked_by_row_n: Tensor
    """Asked rows grouped by unique row in request order, int64."""
    counts_U: Tensor
    """Number of asked rows of each unique row in request order, int64."""

    @staticmethod
    def find(
        rows_n: Tensor, counts_PKYL: np.ndarray, host_axis: int, num_rows_PY: np.ndarray
    ) -> _MergedRows:
        """Finds the unique rows; both ends of an exchange across hosts find the same.

        Args:
            rows_n: Home row of each asked row, integer, in the order of the counts.
            counts_PKYL: Number of asked rows by pack, chunk, host and rank of the asking host, or
                with these two swapped, then ``host_axis`` is 3 instead of 2.
            host_axis: Axis of the host at the other end: the one that asks, or the home rank's.
            num_rows_PY: Number of home rows of each pack, by that host.
        """
        num_packs, num_chunks = counts_PKYL.shape[:2]
        num_hosts = counts_PKYL.shape[host_axis]
        # one range of integers for the rows of all packs and hosts: a source is one of both
        ends = num_rows_PY.cumsum()
        starts = torch.from_numpy(ends - num_rows_PY.reshape(-1))
        pack, chunk, *hosts_and_ranks = np.indices(counts_PKYL.shape)
        source = pack * num_hosts + hosts_and_ranks[host_axis - 2]
        source_n, chunk_n = (
            torch.from_numpy(np.repeat(numbers, counts_PKYL.reshape(-1)))
            for numbers in (source, chunk)
        )
        rows = unique_rows(starts.index_select(0, source_n).add_(rows_n))
        chunk_U = first_use_chunks(rows, chunk_n, num_chunks)
        source_U = torch.searchsorted(torch.from_numpy(ends), rows.ids_U, right=True)
        pack_U = source_U.div(num_hosts, rounding_mode="floor")
        segment_U = (pack_U * num_chunks + chunk_U) * num_hosts + source_U % num_hosts
        order_U, counts = sort_by_segment(segment_U, num_packs * num_chunks * num_hosts)
        splits = counts.view(num_packs, num_chunks, num_hosts).tolist()
        return _MergedRows.ordered(rows, order_U, rows.ids_U - starts[source_U], splits)

    @staticmethod
    def ordered(
        rows: UniqueRows, order_U: Tensor, rows_U: Tensor, splits: list[list[list[int]]]
    ) -> _MergedRows:
        """Puts unique rows, ascending, in request order."""
        counts_U, asked_by_row_n, _ = torch.ops.fbgemm.permute_1D_sparse_data(
            order_U.to(torch.int32),
            rows.counts,
            rows.lookups_by_row_N,
            None,
            rows.lookups_by_row_N.numel(),
        )
        return _MergedRows(
            splits_P=list(map(ExchangeSplits, splits)),
            rows_U=rows_U.index_select(0, order_U),
            position_n=positions_of(order_U).index_select(0, rows.row_of_lookup_N),
            asked_by_row_n=asked_by_row_n,
            counts_U=counts_U,
        )


@dataclass(kw_only=True)
class _Request(RowRouteRequest):
    """The request for the rows of one batch, and what this rank relays for others."""

    route: NodeRoute
    _passing_PKLY: np.ndarray = field(init=False)
    """Number of row numbers that pass, by chunk, rank of the host and host of the home rank."""
    _arriving_PKYL: np.ndarray = field(init=False)
    """Number of row numbers that arrive, by chunk, host and rank of the host."""
    _asked_n: Tensor = field(init=False)
    """Row numbers that pass, in the order of their counts."""
    _asked_P: Sequence[ExchangeSplits] = field(init=False)
    _relayed: _MergedRows = field(init=False)
    _arrived_n: Tensor = field(init=False)
    """Row numbers that arrived at this home rank, in the order of their counts."""
    _relayed_dirty_n: Tensor | None = None
    """Whether wanted rows, then asked rows, are dirty, uint8; ``None`` = all are."""

    def _counts(
        self, own_PKW: np.ndarray, received_WX: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        num_packs, num_chunks, size = own_PKW.shape
        hosts, places = self.route.num_hosts, self.route.num_places
        # words for this rank, (Y L, P K), then those that it relays, (L Y, P K)
        arriving = received_WX[:size].reshape(hosts, places, num_packs, num_chunks)
        passing = received_WX[size:].reshape(places, hosts, num_packs, num_chunks)
        self._arriving_PKYL = arriving.transpose(2, 3, 0, 1)
        self._passing_PKLY = passing.transpose(2, 3, 0, 1)
        wanted_PKL = own_PKW.reshape(num_packs, num_chunks, places, hosts).sum(3)
        return wanted_PKL, self._passing_PKLY.sum(3)

    def relayed_row_numbers(self) -> list[Payload]:
        # until now this rank served the ranks of its host
        self._asked_n, self._asked_P = self._served_n, self._served_P
        passing_PKLY, arriving_PKYL = self._passing_PKLY, self._arriving_PKYL
        num_rows_PY = self.route.relayed_rows_PY
        self._relayed = _MergedRows.find(self._asked_n, passing_PKLY, 3, num_rows_PY)
        # from the order (pack, chunk, rank, host) to (pack, chunk, host, rank): each run of rows
        # moves as a whole, from its start in the first order to its start in the second
        ends = passing_PKLY.cumsum().reshape(passing_PKLY.shape)
        counts, starts = (a.swapaxes(2, 3).ravel() for a in (passing_PKLY, ends - passing_PKLY))
        shift = np.repeat(starts - (counts.cumsum() - counts), counts)
        order_n = torch.from_numpy(shift + np.arange(len(shift)))
        sent_n = self._asked_n.index_select(0, order_n)
        self._arrived_n = sent_n.new_empty(int(arriving_PKYL.sum()))
        sent_P, arrived_P = (
            [ExchangeSplits(counts_KY) for counts_KY in counts_PKY.tolist()]
            for counts_PKY in (passing_PKLY.sum(2), arriving_PKYL.sum(3))
        )
        received = by_pack(self._arrived_n, arrived_P)
        payloads = with_all_chunks(by_pack(sent_n, sent_P), sent_P, received, arrived_P)
        return payloads + self._touched_payloads(self.route.num_hosts, self._arrived_n.dtype)

    def take_row_numbers(self) -> None:
        rank, (num_packs, _, num_hosts, _) = self.route.ranks.rank, self._arriving_PKYL.shape
        own_P = [rows_W[rank] for rows_W in self.route.space.home_rows_PW]
        # every host asks for rows of this rank
        num_rows_PY = np.repeat(own_P, num_hosts).reshape(num_packs, num_hosts)
        merged = _MergedRows.find(self._arrived_n, self._arriving_PKYL, 2, num_rows_PY)
        self._served_P = merged.splits_P
        self._served_n = merged.rows_U.to(self._arrived_n.dtype)

    def _asked_of_homes(self) -> Sequence[ExchangeSplits]:
        return self._relayed.splits_P

    def relayed_dirty_mask(self) -> list[Payload]:
        assert self._dirty_n is not None, "the mask has arrived"
        num_wanted = sum(rows.num_rows for rows in self._wanted_P)
        num_asked = self._asked_n.numel()
        self._relayed_dirty_n = self._dirty_n.new_empty(num_wanted + num_asked)
        wanted_n, asked_n = self._relayed_dirty_n.split([num_wanted, num_asked])
        # the mask of the rows that this rank wants of home ranks is the first part
        torch.index_select(self._dirty_n, 0, self._relayed.position_n, out=asked_n)
        sent_P, received_P = by_pack(asked_n, self._asked_P), by_pack(wanted_n, self._wanted_P)
        return with_all_chunks(sent_P, self._asked_P, received_P, self._wanted_P)

    def _find_orders(self) -> tuple[FetchOrders, Sequence[Relay | None]]:
        relayed = self._relayed
        across = FetchOrders.find(relayed.splits_P, self._served_P, self._dirty_n, self._parts_X)
        inside = FetchOrders.find(self._wanted_P, self._asked_P, self._relayed_dirty_n, None)
        position_n = relayed.position_n
        if inside.served_order_n is not None and across.wanted_order_n is not None:
            fetched_U = positions_of(across.wanted_order_n)
            position_n = position_n.index_select(0, inside.served_order_n)
            position_n = fetched_U.index_select(0, position_n)
        position_P = by_pack(position_n, self._asked_P)
        asked_P = by_pack(relayed.asked_by_row_n, self._asked_P)
        edges_P = [
            torch.nn.functional.pad(counts_U.cumsum(0), (1, 0))
            for counts_U in by_pack(relayed.counts_U, relayed.splits_P)
        ]
        # positions count from the first row of each pack
        firsts = (
            accumulate((rows.num_rows for rows in rows_P), initial=0)
            for rows_P in (relayed.splits_P, self._asked_P)
        )
        relay_P = [
            Relay(
                asked=self._asked_P[p],
                asked_by_fetch=inside.served_P[p],
                wanted=relayed.splits_P[p],
                wanted_by_fetch=across.wanted_P[p],
                wanted_of_asked_n=position_P[p] - row,
                asked_by_wanted_n=asked_P[p] - asked,
                edges_U1=edges_P[p],
            )
            for p, row, asked in zip(range(len(self._asked_P)), *firsts)
        ]
        orders = replace(across, wanted_P=inside.wanted_P, wanted_order_n=inside.wanted_order_n)
        return orders, relay_P

    def _incoming_rows(self, orders: FetchOrders) -> list[IncomingRequests]:
        arrived_P = [ExchangeSplits(each.tolist()) for each in self._arriving_PKYL.sum(3)]
        pairs = zip(super()._incoming_rows(orders), by_pack(self._arrived_n, arrived_P))
        return [_IncomingByHost(**vars(rows), arrived_n=arrived_n) for rows, arrived_n in pairs]


@dataclass(frozen=True, kw_only=True)
class _IncomingByHost(IncomingRows):
    """Incoming requests for home rows, once for each host."""

    arrived_n: Tensor
    """Home rows with a repeat for each rank that asks."""

    @property
    def asked_rows_n(self) -> Tensor:
        return self.arrived_n
