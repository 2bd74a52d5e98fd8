"""One pack of an interleaved batch: its rows and gradients, from the first fetch to the update.

Shape letters: n and m rows of an exchange, h hot rows used here, t touched anywhere, D dim.
"""

from __future__ import annotations

from torch import Tensor

from torchrec_picasso.exchange.hot_reduction import HotReduction
from torchrec_picasso.exchange.packed_all_to_all import PackedAllToAll
from torchrec_picasso.ops.fetch_order import CLEAN, dirty_exchange
from torchrec_picasso.sharding.row_layout import PackLayout
from torchrec_picasso.sharding.row_matrix import RowMatrix
from torchrec_picasso.storage.row_storage import RowStorage

__all__ = ["PackRows"]


class PackRows:
    """Rows and gradients of one pack; several may share an exchange, and a matrix.

    Args:
        storage: The pack's homes and replicas.
        layout: Of the batch.
        matrix: Where the rows and gradients of this rank are, beside those of other packs.
        place: The pack's part of it.
    """

    def __init__(
        self, storage: RowStorage, layout: PackLayout, matrix: RowMatrix, place: slice
    ) -> None:
        self.storage = storage
        self.layout = layout
        self.matrix = matrix
        hot_end = place.start + layout.num_hot
        self._hot_place, self._cold_place = slice(place.start, hot_end), slice(hot_end, place.stop)
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
        return self.matrix.rows[self._cold_place][self.layout.mine_by_fetch.rows(exchange)]

    def come_by(self, exchange: int, arrival: PackedAllToAll) -> None:
        """Notes what brings the rows of an exchange."""
        self._arrivals[exchange] = arrival

    def read_hot(self) -> None:
        """Reads the replicas."""
        self.storage.gather_hot(self.layout.hot_slots, out_hD=self.matrix.rows[self._hot_place])

    def arrive(self, chunk: int) -> None:
        """Waits for the chunks up to one; dirty rows of later ones are not filled yet."""
        for exchange in (CLEAN, *map(dirty_exchange, range(chunk + 1))):
            arrival = self._arrivals.pop(exchange, None)
            if arrival is not None:
                arrival.wait()

    # -- gradients -----------------------------------------------------------------------------

    def gradients(self, chunk: int) -> Tensor:
        """The sums of a chunk's cold rows, ``(n, D)``."""
        return self.matrix.sums[self._cold_place][self.layout.mine.rows(chunk)]

    def hot_gradients(self) -> Tensor:
        """The sums of the hot rows, ``(h, D)``."""
        return self.matrix.sums[self._hot_place]

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
        self._gradients, self._hot = [], None  # they hold the memory that is given back
        grads = self._at_home()
        self.storage.update(
            self.layout.asked_rows,
            self.layout.touched_slots,
            grads.div_(num_ranks) if num_ranks > 1 else grads,
        )
        self.matrix.buffers.give_back(grads)
        self._arrived = None
        self.matrix.release()

    def _at_home(self) -> Tensor:
        """Gradients of home rows, then of replicas."""
        if self._arrived is None:
            num_rows = self.layout.asked.num_rows + self.layout.touched_slots.numel()
            self._arrived = self.matrix.buffers.take(num_rows)
        return self._arrived
