"""The rows of one batch: fetched from homes, read from replicas, handed out to be pooled.

Chunk j holds the rows that part j of the batch is the first to use, so forward needs chunks up to j
before part j. Clean rows, which the batch before does not update, may be fetched before its update.

Packs may also be cut into waves, by the plan. What no computing hides is then staggered: a wave is
on the wire while another is gathered or updated (PICASSO's K-Interleaving).

Shape letters: K parts and chunks, M matrices, P packs, N lookups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_picasso.errors import CompatError
from torchrec_picasso.exchange.kept_memory import keep_for_current_stream
from torchrec_picasso.exchange.packed_all_to_all import PackedAllToAll
from torchrec_picasso.ops.bag_pack import PartBags
from torchrec_picasso.ops.fetch_order import CLEAN, dirty_exchange
from torchrec_picasso.ops.part_pooling import PartPooling
from torchrec_picasso.rows.group import RowGroup
from torchrec_picasso.rows.layout import RowLayout
from torchrec_picasso.rows.memory import Matrices
from torchrec_picasso.storage.row_storage import RowStorage

__all__ = ["BatchRows", "GradientSink", "PartRows"]

_WEIGHTS_LEFT = (
    "per-sample weights changed between the input dist and the lookup (as by a feature processor), "
    "but some tables are hot/cold with form='bags', whose homes have the weights by then; use "
    "form='rows' for them"
)

GradientSink = Callable[[Sequence[Tensor]], None]
"""Takes the gradients of a part's rows, per matrix; must not hold those rows."""


class BatchRows:
    """The rows of one batch, whose every row has its place.

    Collective where it says so: on all ranks in the same order. Where a method takes a wave, it is
    for the packs of that wave, none if the module has fewer waves; ``None`` = for all packs.

    Args:
        group: The tables.
        layout: Of the batch.
    """

    def __init__(self, group: RowGroup, layout: RowLayout) -> None:
        assert layout.hot_epoch == group.hot.epoch, "slots are those of another hot set"
        self._group = group
        self.layout = layout
        self._matrices = Matrices(group.buffers_M, layout.rows_M)
        self._arrivals: list[_Arrival] = []
        self._modules_left = len(group.plan.modules)
        self._seen: set[str] = set()

    def looked_up(self, storage: RowStorage) -> Tensor:
        """Which rows of a pack that are at home here any rank's batch looks up, hot or cold.

        Args:
            storage: The pack's.

        Returns:
            Home rows, ascending, each once, int64, shape ``(n,)``. A host sync on CUDA.
        """
        pack = self.layout.packs[self._group.storages.index(storage)]
        rows = [pack.source.home_rows.to(torch.int64), pack.touched.own_rows_o]
        return torch.cat(rows).unique()

    def is_first_time(self, what: str) -> bool:
        """Whether something is done with this batch for the first time, in whichever part."""
        is_first = what not in self._seen
        self._seen.add(what)
        return is_first

    def fetch_clean(self) -> None:
        """Starts fetching the rows that the batch before does not update. Collective."""
        if self._group.plan.num_row_matrices:  # bags are never clean
            self._fetch(CLEAN)

    def fetch_dirty(self, chunk: int, wave: int | None = None) -> None:
        """Starts fetching the other rows of a chunk. Collective."""
        self._fetch(dirty_exchange(chunk), wave)

    def _fetch(self, exchange: int, wave: int | None = None) -> None:
        packs = self._group.plan.packs_of(wave)
        layouts = self.layout.packs[packs]
        if not layouts:
            return
        matrices_M = self._matrices.tensors
        with torch.no_grad():
            arrival = PackedAllToAll(
                self._group.ranks,
                [
                    pack.source.read(storage, exchange)
                    for storage, pack in zip(self._group.storages[packs], layouts)
                ],
                [pack.source.by_fetch.counts_EW[exchange] for pack in layouts],
                [
                    matrices_M[pack.matrix][pack.cold_place][pack.mine_by_fetch.rows(exchange)]
                    for pack in layouts
                ],
                [pack.mine_by_fetch.counts_EW[exchange] for pack in layouts],
                self._group.ranks.row_codec,
            )
        self._arrivals.append(_Arrival(exchange, packs, arrival))

    def read_hot(self) -> None:
        """Reads the replicas."""
        with torch.no_grad():
            for storage, pack in zip(self._group.storages, self.layout.packs):
                rows = self._matrices.tensors[pack.matrix][pack.hot_place]
                storage.gather_hot(pack.hot_slots, out_hD=rows)

    def fetch_again(self) -> None:
        """Fetches all rows again, where any rank's homes were written since. Collective."""
        num_chunks = len(self.layout.sizes_K)
        for matrix in range(len(self._group.plan.matrices)):
            self._arrive(num_chunks - 1, matrix)
        self._group.take_writes()
        self.fetch_clean()
        for chunk in range(num_chunks):
            self.fetch_dirty(chunk)
        self.read_hot()

    def arrive(self, part: int, module: int) -> Iterator[Tensor]:
        """Waits for the chunks up to a part's, matrix by matrix.

        Args:
            part: Which.
            module: Whose matrices.

        Yields:
            All rows of a matrix ``(U_m, D_m)``; dirty ones of later chunks are not filled yet.
        """
        for matrix in self._group.plan.modules[module]:
            yield self._arrive(part, matrix)

    def _arrive(self, part: int, matrix: int) -> Tensor:
        self._wait_for(dirty_exchange(part), self._group.plan.matrices[matrix])
        # a pipeline may have fetched on another stream
        return keep_for_current_stream(self._matrices.tensors[matrix])

    def _wait_for(self, exchange: int, packs: slice) -> None:
        """Waits for what brings rows of some packs, up to an exchange."""
        waited = [
            arrival
            for arrival in self._arrivals
            if arrival.exchange <= exchange and _overlap(arrival.packs, packs)
        ]
        for arrival in waited:
            arrival.rows.wait()
            self._arrivals.remove(arrival)

    def hand_out(
        self,
        part: int,
        sink: GradientSink,
        weights_N: Tensor | None = None,
        once: bool = False,
        module: int = 0,
    ) -> PartRows:
        """What one part of the batch uses: a lookup result for the output dist.

        Args:
            part: Which.
            sink: Takes the rows' gradients.
            weights_N: Per-sample weights in KeyedJaggedTensor order, with their graph; ``None`` =
                those that the batch came with.
            once: Whether the module is done with the rows when the part is pooled.
            module: Which module of the group pools them.

        Raises:
            CompatError: If weights changed that homes pool bags with.
        """
        matrices = self._group.plan.modules[module]
        are_others = weights_N is not None and weights_N is not self.layout.weights_N
        if self.layout.weights_left and are_others and self._has_bags(module):
            raise CompatError(_WEIGHTS_LEFT)
        pooling_M = [self.layout.pooling_KM[part][matrix] for matrix in matrices]
        return PartRows(
            rows=self,
            part=part,
            module=module,
            pooling_M=pooling_M,
            weights_M=self._weights_of(pooling_M, weights_N),
            batch_size=self.layout.sizes_K[part],
            sink=sink,
            once=once,
        )

    def _has_bags(self, module: int) -> bool:
        """Whether bags travel for a module."""
        plan = self._group.plan
        return any(matrix >= plan.num_row_matrices for matrix in plan.modules[module])

    def _weights_of(
        self, pooling_M: Sequence[PartPooling | PartBags], weights_N: Tensor | None
    ) -> list[Tensor | None]:
        """Weights of the rows that are pooled here, in bag order."""
        weights_N = self.layout.weights_N if weights_N is None else weights_N
        if weights_N is None:
            return [None] * len(pooling_M)
        return [
            None
            if isinstance(pooling, PartBags) or not pooling.index.has_bags
            else weights_N.float().index_select(0, self._sources(pooling))
            for pooling in pooling_M
        ]

    def _sources(self, pooling: PartPooling) -> Tensor:
        assert self.layout.source_N is not None, "the batch came without weights"
        return self.layout.source_N[pooling.lookups]

    def part_features(self, part: int, module: int) -> KeyedJaggedTensor:
        """The features of one part of a module of sequences."""
        return self.layout.part_features(part, module, self._group.plan.modules[module][0])

    def end_module(self) -> None:
        """Ends the use by one module; the last one's gives the memory back."""
        self._modules_left -= 1
        if not self._modules_left:
            self.release()

    def release(self) -> None:
        """Ends the use of the rows' memory."""
        self._matrices.release()


@dataclass(frozen=True, eq=False)
class _Arrival:
    """Rows of some packs on their way."""

    exchange: int
    packs: slice
    rows: PackedAllToAll


def _overlap(one: slice, other: slice) -> bool:
    return one.start < other.stop and other.start < one.stop


@dataclass(frozen=True, kw_only=True)
class PartRows:
    """The rows that one part of a batch uses, of one module."""

    rows: BatchRows
    part: int
    module: int
    pooling_M: Sequence[PartPooling | PartBags]
    """Which rows each bag sums, or where bags lie that came pooled."""
    weights_M: Sequence[Tensor | None]
    """Per-sample weights in bag order."""
    batch_size: int | None
    """Samples per feature, or ``None`` when each feature has its own."""
    sink: GradientSink
    once: bool

    def view(self, *_: int) -> PartRows:
        """The rows, where TorchRec shapes what a lookup gives; they arrive as matrices."""
        return self

    @property
    def own_sizes(self) -> Sequence[int] | None:
        """Samples of each feature, where features were filled up to one number of them."""
        features = self.rows.layout.features_of[self.module]
        is_filled_up = self.batch_size is not None and features.variable_stride_per_key()
        return features.stride_per_key() if is_filled_up else None

    @property
    def features(self) -> KeyedJaggedTensor:
        """The part's own features, in the order of the tables; all of sequences."""
        return self.rows.part_features(self.part, self.module)

    def arrive(self) -> Iterator[Tensor]:
        """Waits for the rows; gives those of one matrix after the other."""
        return self.rows.arrive(self.part, self.module)

    def end(self) -> None:
        """Ends the use of the rows, if no other part of the module needs them."""
        if self.once:
            self.rows.end_module()
