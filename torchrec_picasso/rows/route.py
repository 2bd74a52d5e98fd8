"""A route: how the tables of one kind of packs travel, from their features to their update.

The engine loops over the routes of a group and over their packs, and joins what they send into one
collective per operation. The route decides everything else: :class:`RouteRequest` the header words,
ids, dirty mask and layout of a batch, :class:`IncomingRequests` fetch and update at the home rank
of a pack, :class:`Pooling` the pooling of a micro-batch and its gradients.

Shape letters: F features, K micro-batches, W ranks, N lookups, S bags, D dim; n and m rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_picasso.exchange.all_to_all import Ranks
from torchrec_picasso.exchange.header import ReceivedWords, RouteWords
from torchrec_picasso.exchange.packed import Exchanges, Payload
from torchrec_picasso.ops.id_reader import PreparedIds
from torchrec_picasso.ops.ids import HotSlots, IdSpace, PackedTable, table_bases
from torchrec_picasso.ops.pack_plan import PackPlan
from torchrec_picasso.ops.row_order import ExchangeSplits
from torchrec_picasso.ops.segment_reduction import gather_sum
from torchrec_picasso.storage.row_storage import RowStorage, TouchedHot, UsedHot


@dataclass(eq=False, repr=False)
class Route(ABC):
    """The tables of a group that travel in the same way. Packs ascend from 0; ``storages`` holds
    this rank's home rows and replicas of each."""

    name: ClassVar[str]
    """Value of :attr:`.HotColdParams.form` that chooses the route."""
    shares_rows: ClassVar[bool] = True
    """Whether a row that arrived for one micro-batch is used by later ones."""
    reads_unique_rows: ClassVar[bool] = False
    """Whether an :class:`.IdReader` reads its ids, which a data loader may then do ahead."""
    needs_one_batch_size: ClassVar[bool] = False
    """Whether variable-batch (VBE) features are padded to one batch size."""
    exchanges: ClassVar[type[Exchanges]] = Exchanges
    """The way between ranks that ask and home ranks; one for all routes of a group."""

    tables: Sequence[PackedTable]
    storages: Sequence[RowStorage]
    ranks: Ranks
    device: torch.device
    plan: PackPlan = field(init=False)
    """Waves and matrices of the packs."""

    def __post_init__(self) -> None:
        self.space = IdSpace.build(self.tables, self.device)
        self.hot = HotSlots.build(self.tables, self.device)

    @classmethod
    def connect(cls, table: str, ranks: Ranks, device: torch.device | None) -> None:
        """Makes the process groups of its exchanges, if it needs any of its own, before a rank can
        fail alone. Collective. Raises CompatError, with the name of ``table``, where it does not
        apply."""
        return

    def id_ranges(self) -> Iterator[tuple[PackedTable, int, int]]:
        """Returns each table with its first linear id and the end of its linear ids."""
        bases = table_bases(self.tables)
        return zip(self.tables, bases, bases[1:])

    def hot_ids_by_pack(self) -> list[Tensor]:
        """Returns the linear ids of each pack's hot rows, int64, ascending."""
        return [self.hot.ids_H[start:end] for start, end in pairwise(self.hot.start_P1)]

    def change_hot_rows(self, hot_rows_T: Sequence[Tensor], epoch: int | None = None) -> None:
        """Sets the hot rows of each table, ascending int64; the storages update the replicas. Each
        pack keeps its number of hot rows. Without an epoch, the hot set gets the next one."""
        pairs = zip(self.tables, hot_rows_T)
        self.tables = [replace(table, hot_rows_H=rows) for table, rows in pairs]
        epoch = self.hot.epoch + 1 if epoch is None else epoch
        hot = HotSlots.build(self.tables, self.device, epoch)
        assert hot.start_P1 == self.hot.start_P1, "a pack keeps its number of replicas"
        self.hot = hot

    def tensors_of_hot_set(self) -> Iterator[Tensor]:
        """Yields the tensors of the hot set that requests read; none if a route has no replicas."""
        yield from ()

    def check(self, features: KeyedJaggedTensor) -> None:
        """Raises CompatError, on this rank alone, for features of a module that it cannot serve. No
        header reports this reason to the other ranks. By default it serves all."""
        return

    @abstractmethod
    def read(
        self,
        features: KeyedJaggedTensor,
        sizes_K: Sequence[int | None],
        prepared: PreparedIds | None = None,
    ) -> RouteRequest:
        """Reads the ids of the route's features in a batch. Sends nothing.

        ``sizes_K`` are the samples of each micro-batch, one ``None`` if every feature has its own
        batch size; ``prepared`` is what a data loader read of these features.
        """


@dataclass(kw_only=True)
class RouteRequest(ABC):
    """The request of one route for one batch; methods are called in order."""

    words: RouteWords
    """What the route contributes to the header."""
    outside_ids: Tensor
    """Number of lookups outside their table, 0-d integer."""
    is_prepared: bool = False
    """Whether a data loader read the ids."""

    @abstractmethod
    def row_number_payloads(self, words: ReceivedWords, dtype: torch.dtype) -> list[Payload]:
        """Reads the header words of all ranks, and returns what goes to home ranks before the
        layout, in the wire's integer type."""

    def dirty_mask_payloads(self, before: Any) -> list[Payload]:
        """Returns the dirty mask, uint8, from the same route's request of the batch before. It is
        empty for a route that fetches nothing ahead."""
        return []

    def relayed_row_numbers(self) -> list[Payload]:
        """Returns what this rank relays of the row numbers, after :meth:`row_number_payloads` have
        arrived; only of a route by host."""
        return []

    def take_row_numbers(self) -> None:
        """Reads the row numbers that have arrived at home ranks."""
        return

    def relayed_dirty_mask(self) -> list[Payload]:
        """Returns what this rank relays of the dirty mask, as :meth:`relayed_row_numbers`."""
        return []

    @abstractmethod
    def lookups_by_home(self) -> Tensor:
        """Counts this rank's lookups by the home rank that serves them, int64, ``(W,)``; replicas
        serve those of hot rows."""

    @abstractmethod
    def build_layout(self, first_matrix: int) -> RouteLayout:
        """Builds the layout, after the ids and, if it was sent, the dirty mask have arrived. The
        route's first matrix has the index ``first_matrix`` in the group."""


@dataclass(frozen=True, kw_only=True)
class IncomingRequests(ABC):
    """The requests that arrive at the home rank for one pack's rows, of one batch."""

    sends_rows: ClassVar[bool]
    """Whether the vectors are distinct rows, which may be clean and are then fetched ahead."""

    home_row_numbers_n: Tensor
    """Requested home rows, one for each rank, host or lookup that asks: integer, ``(n,)``."""
    served_by_fetch: ExchangeSplits
    """The sent vectors in fetch order, by exchange and destination rank."""

    @property
    def asked_rows_n(self) -> Tensor:
        """Requested home rows, with a repeat for each rank that asks: integer, shape ``(n,)``."""
        return self.home_row_numbers_n

    @abstractmethod
    def read(self, storage: RowStorage, exchange: int) -> Tensor:
        """Returns the vectors of one exchange, by destination rank: float32, ``(n, D)``.
        ``exchange`` is its number in fetch order, see ``ops/row_order.py``."""

    @abstractmethod
    def update(self, storage: RowStorage, touched: TouchedHot, grads_mD: Tensor) -> None:
        """Updates every row once, and the touched hot rows. ``grads_mD`` holds gradients of the
        vectors in request order, then those of the hot rows."""

    @staticmethod
    @abstractmethod
    def joined(batches: Sequence[Any]) -> IncomingRequests:
        """Merges the requests of several batches into one, which is only updated, not read."""


@dataclass(frozen=True, kw_only=True)
class Pooling(ABC):
    """The pooling of one micro-batch of one matrix, on the rank that looked its rows up."""

    gives_views: ClassVar[bool] = False
    """Whether :meth:`pool` returns views of the matrix, whose memory is reused."""

    num_pieces: int = 1
    """Number of tensors that :meth:`pool` returns."""
    lookups_F: Sequence[int] = ()
    """Number of lookups of each feature of a sequence matrix."""

    def scales(self, weights_N: Tensor | None, are_new: bool) -> Tensor | None:
        """Returns weights times the factors of means, in bag order; ``None`` = all are 1.

        ``weights_N`` are those of the batch, in KeyedJaggedTensor order; ``are_new`` says whether
        they differ from those of the request. Raises CompatError if the route cannot apply new
        weights any more.
        """
        return None

    @abstractmethod
    def pool(self, rows_RD: Tensor, scales_N: Tensor | None) -> list[Tensor]:
        """Pools the vectors of the matrix."""

    def columns(self, pieces: list[Tensor]) -> list[Tensor]:
        """Reshapes the pieces, in autograd, to columns of the module's output: ``(B, columns)``.
        Flat if every feature has its own batch size; ``(N, D)`` for sequences."""
        return pieces

    @abstractmethod
    def gradients(self, grads: Sequence[Tensor], scales_N: Tensor | None) -> Tensor:
        """Computes the gradients of the vectors, ``(n, D)``, from those of the pieces.

        In request order if the batch is one micro-batch, which then sends them as they are; else in
        the order that :meth:`add_gradients` expects.
        """

    def gradient_of_scales(self, grads: Sequence[Tensor], rows_RD: Tensor) -> Tensor | None:
        """Computes the gradients of the scales, ``(N,)``, from those of the pieces."""
        return None

    @abstractmethod
    def add_gradients(self, sums_RD: Tensor, grads_nD: Tensor) -> None:
        """Adds the result of :meth:`gradients` to sums over micro-batches, in request order."""


@dataclass(frozen=True, kw_only=True)
class Relay:
    """The rows of one pack that this rank relays. *Asked* are the rows that ranks of its host ask
    for, with repeats; *wanted* those that it asks home ranks of its place for, each once."""

    asked: ExchangeSplits
    """Asked rows in request order, by chunk and rank of the host."""
    asked_by_fetch: ExchangeSplits
    """Asked rows in fetch order."""
    wanted: ExchangeSplits
    """Wanted rows in request order, by chunk and host."""
    wanted_by_fetch: ExchangeSplits
    """Wanted rows in fetch order."""
    wanted_of_asked_n: Tensor
    """Position in fetch order of the wanted row of each asked row in fetch order, int64."""
    asked_by_wanted_n: Tensor
    """Positions in request order of asked rows, grouped by wanted row in request order, int64."""
    edges_U1: Tensor
    """First entry of each wanted row in the tensor above, and n, int64."""

    def answer(
        self, rows_UD: Tensor, exchange: int, into: Tensor, counts_L: Sequence[int]
    ) -> Payload:
        """Returns the rows of an exchange for the ranks of the host, from the wanted rows in fetch
        order; ``into`` and ``counts_L`` are what this rank receives of them itself."""
        own = self.wanted_of_asked_n[self.asked_by_fetch.slice_of(exchange)]
        rows = rows_UD.index_select(0, own)
        return Payload(rows, self.asked_by_fetch.counts_EW[exchange], into, counts_L)

    def sums(self, grads_nD: Tensor, chunk: int, into: Tensor, counts_Y: Sequence[int]) -> Payload:
        """Returns the summed gradients of a chunk for home ranks, from those of the asked rows of
        this and later chunks; ``into`` and ``counts_Y`` are what this rank receives as home."""
        own = self.wanted.slice_of(chunk)
        edges = self.edges_U1[own.start : own.stop + 1]
        asked_n = self.asked_by_wanted_n[int(edges[0]) : int(edges[-1])]
        # in the order of chunks and ranks, whatever arrived first
        sums = gather_sum(grads_nD, asked_n, edges - edges[0], None)
        return Payload(sums, self.wanted.counts_EW[chunk], into, counts_Y)


@dataclass(frozen=True, kw_only=True)
class PackLayout:
    """The rows of one pack. *Wanted* are the cold rows that this rank asks for, *served* the home
    rows of this rank that any rank asks for; both include what this rank asks of itself."""

    matrix: int
    """Index of the matrix that contains the pack."""
    start: int
    """First row of the pack in the matrix; hot rows come before cold rows."""
    used: UsedHot
    """Hot rows that this rank's batch uses, by slots counted from 0 in the pack."""
    touched: TouchedHot
    """Hot rows that any rank's batch uses, by slots counted from 0 in the pack."""
    wanted: ExchangeSplits
    """Wanted rows in request order, by chunk and home rank, or relay."""
    wanted_by_fetch: ExchangeSplits
    """Wanted rows in fetch order."""
    served: ExchangeSplits
    """Served rows in request order, by chunk and requesting rank, or host."""
    requests: IncomingRequests
    """Requests for home rows of this rank."""
    relay: Relay | None = None
    """What this rank relays of the pack; ``None`` = ranks and home ranks exchange directly."""

    @property
    def num_rows(self) -> int:
        """Number of rows of the pack in the matrix."""
        return self.used.slots_h.numel() + self.wanted.num_rows

    @property
    def hot_slice(self) -> slice:
        """Position in the matrix of the hot rows that this rank uses, and of their gradients."""
        return slice(self.start, self.start + self.used.slots_h.numel())

    def in_matrix(self, cold: slice) -> slice:
        """Returns the position in the matrix of some of the cold rows that this rank uses."""
        start = self.hot_slice.stop
        return slice(start + cold.start, start + cold.stop)

    def cut(self, matrix: Tensor, splits: ExchangeSplits) -> Sequence[Tensor]:
        """Cuts the cold rows of this rank in their matrix into exchanges; views."""
        cold = self.in_matrix(slice(0, splits.num_rows))
        _, *parts, _ = matrix.split([cold.start, *splits.sizes, len(matrix) - cold.stop])
        return parts


RouteLayout = tuple[list[PackLayout], list[list[Pooling]]]
"""The packs of one route, and the pooling by micro-batch and matrix."""
