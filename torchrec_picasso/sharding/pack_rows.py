"""One pack of an interleaved batch: its rows and gradients, from the first fetch to the update."""

from __future__ import annotations

from torch import Tensor

from torchrec_picasso.exchange.hot_reduction import HotReduction
from torchrec_picasso.exchange.packed_all_to_all import PackedAllToAll
from torchrec_picasso.ops.fetch_order import CLEAN, dirty_exchange
from torchrec_picasso.sharding.row_layout import PackLayout
from torchrec_picasso.storage.row_buffers import RowBuffers
from torchrec_picasso.storage.row_storage import RowStorage

__all__ = ["PackRows"]


class PackRows:
    """Rows and gradients of one pack; several may share an exchange.

    Three matrices: the rows that this rank uses, the gradients that it sums for them, and the
    gradients that arrive for its homes and replicas. Hot rows stand first in the first two.

    Args:
        storage: The pack's homes and replicas.
        buffers: Memory for the matrices.
        layout: Of the batch.
    """

    def __init__(self, storage: RowStorage, buffers: RowBuffers, layout: PackLayout) -> None:
        self.storage = storage
        self.layout = layout
        self._buffers = buffers
        self._rows: Tensor | None = None
        self._totals: Tensor | None = None
        self._arrived: Tensor | None = None
        self._arrivals: dict[int, PackedAllToAll] = {}
        self._gradients: list[PackedAllToAll] = []
        self._hot: HotReduction | None = None

    # -- rows ----------------------------------------------------------------------------------

    def gather(self, exchange: int) -> Tensor:
        """Reads the home rows that others get in one exchange, ``(n, D)``."""
        layout = self.layout
        return self.storage.gather(layout.asked_rows_by_fetch[layout.asked_by_fetch.rows(exchange)])

    def room_for_rows(self, exchange: int) -> Tensor:
        """Where the rows that come in one exchange go, ``(m, D)``."""
        cold = self._own_rows()[self.layout.num_hot :]
        return cold[self.layout.mine_by_fetch.rows(exchange)]

    def come_by(self, exchange: int, arrival: PackedAllToAll) -> None:
        """Notes what brings the rows of an exchange."""
        self._arrivals[exchange] = arrival

    def read_hot(self) -> None:
        """Reads the replicas."""
        layout = self.layout
        self.storage.gather_hot(layout.hot_slots, out_hD=self._own_rows()[: layout.num_hot])

    def arrive(self, chunk: int) -> Tensor:
        """Waits for the chunks up to one.

        Returns:
            All rows, ``(U, D)``; dirty ones of later chunks are not filled yet.
        """
        for exchange in (CLEAN, *map(dirty_exchange, range(chunk + 1))):
            arrival = self._arrivals.pop(exchange, None)
            if arrival is not None:
                arrival.wait()
        return self._own_rows()

    def _own_rows(self) -> Tensor:
        """The rows that this rank uses: hot ones, then cold ones in fetch order."""
        if self._rows is None:
            self._rows = self._take_one_for_each()
        return self._rows

    # -- gradients -----------------------------------------------------------------------------

    def add_gradients(self, places_U: Tensor, grads_UD: Tensor) -> None:
        """Adds a micro-batch's gradients to those of the later ones."""
        self._sums().index_add_(0, places_U, grads_UD)

    def gradients(self, chunk: int) -> Tensor:
        """The sums of a chunk's cold rows, ``(n, D)``."""
        return self._sums()[self.layout.num_hot :][self.layout.mine.rows(chunk)]

    def hot_gradients(self) -> Tensor:
        """The sums of the hot rows, ``(h, D)``."""
        return self._sums()[: self.layout.num_hot]

    def room_for_gradients(self, chunk: int) -> Tensor:
        """Where the gradients go that arrive for home rows in a chunk, ``(m, D)``."""
        return self._at_home()[self.layout.asked.rows(chunk)]

    def room_for_hot_gradients(self) -> Tensor:
        """Where the sums over ranks go, of touched replicas, ``(t, D)``."""
        return self._at_home()[self.layout.asked.num_rows :]

    def sent_by(self, gradients: PackedAllToAll) -> None:
        """Notes what brings gradients of a chunk."""
        self._gradients.append(gradients)

    def reduced_by(self, hot: HotReduction) -> None:
        """Notes what sums the hot rows' gradients."""
        self._hot = hot

    def update(self, num_ranks: int) -> None:
        """Waits for all gradients and updates every row once, at home and at the replicas.

        Args:
            num_ranks: What to divide the gradients by.
        """
        assert self._hot is not None, "the hot rows are reduced before the update"
        for gradients in self._gradients:
            gradients.wait()
        self._hot.wait()
        grads = self._at_home()
        self.storage.update(
            self.layout.asked_rows,
            self.layout.touched_slots,
            grads.div_(num_ranks) if num_ranks > 1 else grads,
        )
        for matrix in (self._rows, self._totals, self._arrived):
            if matrix is not None:
                self._buffers.give_back(matrix)
        self._rows = self._totals = self._arrived = None

    def _sums(self) -> Tensor:
        """Sums of gradients so far: of hot rows, then of cold ones in request order."""
        if self._totals is None:
            self._totals = self._take_one_for_each().zero_()
        return self._totals

    def _at_home(self) -> Tensor:
        """Gradients of home rows, then of replicas."""
        if self._arrived is None:
            layout = self.layout
            num_rows = layout.asked.num_rows + layout.touched_slots.numel()
            self._arrived = self._buffers.take(num_rows)
        return self._arrived

    def _take_one_for_each(self) -> Tensor:
        """A matrix with a row for each that this rank uses."""
        return self._buffers.take(self.layout.num_hot + self.layout.mine.num_rows)
