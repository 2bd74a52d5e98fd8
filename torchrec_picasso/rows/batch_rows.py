"""The rows of one batch: fetched from home ranks, read from replicas, provided for pooling.

``ops/row_order.py`` explains chunks, clean and dirty rows. The plan may also split packs into
waves. Communication that no computation hides is then staggered: one wave is on the wire while
another is gathered or updated (PICASSO's K-Interleaving).

Shape letters: K micro-batches and chunks, M matrices, P packs, N lookups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_picasso.exchange.packed import Payload
from torchrec_picasso.exchange.waiting import Pending
from torchrec_picasso.ops.row_order import CLEAN, FIRST_DIRTY
from torchrec_picasso.ops.streams import keep_for_current_stream
from torchrec_picasso.rows.group import Matrices, RowGroup
from torchrec_picasso.rows.request import RowLayout
from torchrec_picasso.rows.route import Pooling
from torchrec_picasso.storage.row_storage import RowStorage

GradientSink = Callable[[Sequence[Tensor]], None]
"""Receives the gradients of a micro-batch's rows, by matrix; must not keep those rows alive."""


class BatchRows:
    """The rows of one batch whose layout is complete.

    The rows are freed once no module needs them: :meth:`acquire` is told which micro-batch is a
    module's last, :meth:`MicroBatchRows.end` ends the module's use after it, and the last module
    releases the memory. A driver may release it earlier or later by :meth:`release`.
    """

    def __init__(self, group: RowGroup, layout: RowLayout) -> None:
        assert layout.hot_epoch == group.hot_epoch, "slots are those of another hot set"
        self.group = group
        self.layout = layout
        self._matrices = Matrices(group.buffers_M, layout.num_rows_M)
        self._wanted_PE: dict[int, Sequence[Tensor]] = {}
        """Views of wanted rows in the matrices, by pack and exchange."""
        # exchanges in progress: index in fetch order, packs, handle
        self._arrivals: list[tuple[int, set[int], Pending]] = []
        # rows that this rank relays, in fetch order
        self._relayed_P = Matrices(
            [group.buffers_M[pack.matrix] for pack in layout.packs],
            [pack.relay.wanted.num_rows if pack.relay else 0 for pack in layout.packs],
        )
        self.modules_left = len(group.plan.modules)
        """Modules that still need the rows."""
        self._num_unread = 0  # micro-batches whose output nobody has waited for yet
        self.tracked: set[int] = set()
        """Modules whose rows TorchRec's trackers have recorded."""

    def looked_up(self, storage: RowStorage) -> Tensor:
        """Returns the home rows of a pack on this rank that any rank's batch looks up, hot or cold.
        Distinct, ascending, int64, shape ``(n,)``. One host sync on CUDA."""
        pack = self.layout.packs[self.group.storages.index(storage)]
        rows = [pack.requests.home_row_numbers_n.to(torch.int64), pack.touched.own_rows_o]
        return torch.cat(rows).unique()

    def fetch_clean(self) -> None:
        """Starts fetching all clean rows; bags are never clean. Collective."""
        packs = self.group.plan.packs_of(None)
        self._fetch(CLEAN, [p for p in packs if self.layout.packs[p].requests.sends_rows])

    def fetch_dirty(self, chunk: int, wave: int | None = None) -> None:
        """Starts fetching the dirty rows of a chunk. Collective."""
        self._fetch(FIRST_DIRTY + chunk, self.group.plan.packs_of(wave))

    def _fetch(self, exchange: int, packs: Sequence[int]) -> None:
        if not packs:
            return
        with torch.no_grad():
            # Home ranks gather (n, D) in fetch order; they land directly in their slice of the
            # requesting rank's matrix, also in fetch order.
            payloads: list[Payload] = []
            relayed: list[Callable[[], Payload]] = []
            for p in packs:
                pack = self.layout.packs[p]
                served, wanted = pack.requests.served_by_fetch, pack.wanted_by_fetch
                rows = pack.requests.read(self.group.storages[p], exchange)
                if p not in self._wanted_PE:
                    self._wanted_PE[p] = pack.cut(self._matrices.tensors[pack.matrix], wanted)
                into = self._wanted_PE[p][exchange]
                served_W, wanted_W = served.counts_EW[exchange], wanted.counts_EW[exchange]
                if pack.relay is not None:
                    passing, order = self._relayed_P.tensors[p], pack.relay.wanted_by_fetch
                    relayed.append(partial(pack.relay.answer, passing, exchange, into, wanted_W))
                    into, wanted_W = passing[order.slice_of(exchange)], order.counts_EW[exchange]
                payloads.append(Payload(rows, served_W, into, wanted_W))
            pending = self.group.exchanges.start(
                payloads,
                lambda: [payload() for payload in relayed],
                self.layout.most_asked,
                self.group.ranks.row_codec,
                to_homes=False,
            )
        self._arrivals.append((exchange, set(packs), pending))

    def read_hot(self) -> None:
        """Reads the replicas of this batch's hot rows into its matrices."""
        with torch.no_grad():
            for storage, pack in zip(self.group.storages, self.layout.packs):
                if pack.used.slots_h.numel():
                    rows = self._matrices.tensors[pack.matrix][pack.hot_slice]
                    storage.gather_hot(pack.used.slots_h, out_hD=rows)

    def fetch_again(self) -> None:
        """Fetches all rows again after a write to home rows of any rank. Collective."""
        # Finish the exchanges in progress first: they write into the same matrices.
        for _, _, pending in self._arrivals:
            pending.wait()
        self._arrivals.clear()
        self.group.apply_writes()
        self.fetch_clean()
        for chunk in range(len(self.layout.sizes_K)):
            self.fetch_dirty(chunk)
        self.read_hot()

    def relay(self, micro_batch: int) -> None:
        """Passes on what this rank relays of the rows that a micro-batch needs on any rank, with
        samples there or none. Collective."""
        self.wait_for(micro_batch, [p for p, pack in enumerate(self.layout.packs) if pack.relay])

    def wait_for(self, micro_batch: int, packs: Iterable[int]) -> None:
        """Waits for the exchanges of these packs that a micro-batch needs; those of later chunks
        stay in progress."""
        for arrival in list(self._arrivals):
            exchange, brought, pending = arrival
            if not brought.isdisjoint(packs) and exchange <= FIRST_DIRTY + micro_batch:
                pending.wait()
                self._arrivals.remove(arrival)

    def acquire(
        self,
        micro_batch: int,
        sink: GradientSink,
        weights_N: Tensor | None = None,
        is_last: bool = False,
        module: int = 0,
    ) -> MicroBatchRows:
        """Returns the rows of one micro-batch of one module: a lookup result for the output dist.

        Their gradients go to ``sink``. ``weights_N`` are per-sample weights in KeyedJaggedTensor
        order, with their graph; ``None`` = the weights of the batch. After the last micro-batch the
        module needs the rows no more. Raises CompatError if the weights changed after home ranks
        received them for pooling.
        """
        pooling_M = self.layout.pooling_KM[micro_batch]
        pooling_M = [pooling_M[matrix] for matrix in self.group.plan.modules[module]]
        self._num_unread += 1
        given_N = self.layout.weights_N
        are_new = weights_N is not None and weights_N is not given_N
        weights_N = given_N if weights_N is None else weights_N
        return MicroBatchRows(
            batch_rows=self,
            micro_batch=micro_batch,
            module=module,
            pooling_M=pooling_M,
            scales_M=[pooling.scales(weights_N, are_new) for pooling in pooling_M],
            batch_size=self.layout.sizes_K[micro_batch],
            sink=sink,
            is_last=is_last,
        )

    def release(self) -> None:
        """Ends the use of the rows' memory; that of relayed rows once they have been passed on.

        Rows that nobody has waited for stay: a model may return an output that it does not use, and
        its user may read it after the step.
        """
        if not self._num_unread:
            self._wanted_PE.clear()
            self._matrices.release()
        if not self._arrivals:
            self._relayed_P.release()


@dataclass(frozen=True, kw_only=True)
class MicroBatchRows:
    """The rows that one micro-batch of one module uses."""

    batch_rows: BatchRows
    micro_batch: int
    module: int
    pooling_M: Sequence[Pooling]
    scales_M: Sequence[Tensor | None]
    """Factor of each lookup, in bag order: its weight, over the divisor of a mean."""
    batch_size: int | None
    """Samples per feature, or ``None`` when each feature has its own."""
    sink: GradientSink
    is_last: bool
    """Whether the module needs the batch's rows no more after this micro-batch."""

    def view(self, *_: int) -> MicroBatchRows:
        """Returns the rows themselves: TorchRec reshapes lookup results, but these are matrices."""
        return self

    @property
    def own_sizes(self) -> Sequence[int] | None:
        """Samples of each feature if features were padded to one batch size, else ``None``."""
        features = self.batch_rows.layout.features_by_module[self.module]
        is_padded = self.batch_size is not None and features.variable_stride_per_key()
        return features.stride_per_key() if is_padded else None

    @property
    def features(self) -> KeyedJaggedTensor:
        """Features of a sequence module's micro-batch, in the order of its tables. Lengths are
        known on the host; the module has one matrix."""
        layout, k = self.batch_rows.layout, self.micro_batch
        sizes_K = [size for size in layout.sizes_K if size is not None]
        assert sizes_K, "sequences have one batch size"
        features = layout.features_by_module[self.module]
        (matrix,) = self.batch_rows.group.plan.modules[self.module]
        lookups_KF = [pooling_M[matrix].lookups_F for pooling_M in layout.pooling_KM]
        low, batch_size = sum(sizes_K[:k]), sizes_K[k]
        lengths_FB = features.lengths().view(len(lookups_KF[k]), sum(sizes_K))
        # Values are ordered by feature, then micro-batch: F K pieces, of which every K-th from
        # index k belongs to this micro-batch.
        by_micro_batch = list(zip(*lookups_KF))
        pieces = features.values().split([n for lookups_K in by_micro_batch for n in lookups_K])
        return KeyedJaggedTensor(
            keys=features.keys(),
            values=torch.cat(pieces[k :: len(sizes_K)]),
            lengths=lengths_FB[:, low : low + batch_size].reshape(-1),
            stride=batch_size,
            length_per_key=list(lookups_KF[k]),
        )

    def arrive(self) -> Iterator[Tensor]:
        """Waits for the chunks that the micro-batch needs; yields the rows of one matrix at a time.
        Shape ``(U_m, D_m)``; dirty rows of later chunks are not filled yet."""
        rows, plan = self.batch_rows, self.batch_rows.group.plan
        for matrix in plan.modules[self.module]:
            packs = plan.matrices[matrix]
            rows.wait_for(self.micro_batch, range(packs.start, packs.stop))
            # A pipeline may have started the fetch on another stream.
            yield keep_for_current_stream(rows._matrices.tensors[matrix])
        rows._num_unread -= 1

    def end(self) -> None:
        """Ends the use of the rows by this micro-batch; the last use of all modules frees them."""
        if self.is_last:
            self.batch_rows.modules_left -= 1
            if not self.batch_rows.modules_left:
                self.batch_rows.release()
