"""One pack's rows on one rank, in a single fused TBE: weights, optimizer state, one update.

Updates that ``row_updates.py`` supports on the CPU run there, on the TBE's tensors; all other
updates are the TBE's own, on the CPU by a call of its kernel.

Home rows and replicas share the TBE, hence also its optimizer, learning rate and step count. The
TBE's own update is one call for both, that of ``row_updates.py`` two calls of one step. For the TBE
every row is a bag with one lookup: on the CPU 23,000 rows of D=128 then take 10 ms, where the
unpooled kernel takes 88.

    one table:    | homes | replicas |
    two tables:   | homes |            | replicas |

A table lies in one memory. One table is simpler and faster on the CPU, and is used whenever home
rows and replicas belong in the same memory. Home rows in managed memory (UVM) are read and written
over the host's bus, and most lookups are of hot rows: the replicas are then a second table, in the
device's own memory. A TBE gives all its tables the same number of bags, so the table with fewer
rows is padded with empty bags, which touch nothing: at most twice the memory traffic on the device
for the same kernel. (FBGEMM's variable batch sizes would avoid this, but only SGD, Adam and
row-wise Adagrad have a kernel for them.)

Shape letters: n home rows, t replicas and m = n + t rows of an update; S bags of a table; D dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torchrec.distributed.embedding_types import (
    GroupedEmbeddingConfig,
    compute_kernel_to_embedding_location,
)

from torchrec_picasso._torchrec import (
    ComputeDevice,
    EmbeddingLocation,
    EmbOptimType,
    PoolingMode,
    SplitTableBatchedEmbeddingBagsCodegen,
    data_type_to_sparse_type,
)
from torchrec_picasso.errors import CompatError
from torchrec_picasso.ops.segment_reduction import sum_by_row
from torchrec_picasso.storage.exactness import why_no_memory
from torchrec_picasso.storage.row_updates import (
    ONLY_HERE,
    UpdateKernel,
    UpdateStep,
    new_states,
    row_update,
)


@dataclass(frozen=True, kw_only=True)
class MemoryLayout:
    """The memory of one pack's rows on one rank."""

    num_home_rows: int
    num_hot_rows: int
    """Number of replicas, equal on all ranks."""
    homes: EmbeddingLocation
    in_two_tables: bool

    @property
    def compute_device(self) -> ComputeDevice:
        """The device whose kernels read and write the rows."""
        on_cpu = self.homes == EmbeddingLocation.HOST
        return ComputeDevice.CPU if on_cpu else ComputeDevice.CUDA

    @property
    def tables(self) -> list[tuple[int, EmbeddingLocation]]:
        """Rows and memory of each table. No table is empty, because FBGEMM requires a row per
        table."""
        if not self.in_two_tables:
            return [(max(1, self.num_home_rows + self.num_hot_rows), self.homes)]
        is_managed = self.homes == EmbeddingLocation.MANAGED
        replicas = EmbeddingLocation.DEVICE if is_managed else self.homes
        return [(max(1, self.num_home_rows), self.homes), (self.num_hot_rows, replicas)]


def choose_memory(
    config: GroupedEmbeddingConfig, device: torch.device, num_hot_rows: int
) -> MemoryLayout:
    """Chooses the memory of a pack's tables, all with one compute kernel, on a device; raises
    CompatError if a hot/cold table cannot have the kernel or the dim."""
    for table in config.embedding_tables:
        refusal = why_no_memory(table.compute_kernel.value, table.local_cols)
        if refusal is not None:
            raise CompatError(f"hot/cold table {table.name!r} {refusal.what}; {refusal.instead}")
    (kernel,) = {table.compute_kernel for table in config.embedding_tables}
    homes = EmbeddingLocation.HOST
    if device.type == "cuda":
        homes = compute_kernel_to_embedding_location(kernel)
    return MemoryLayout(
        num_home_rows=sum(table.local_rows for table in config.embedding_tables),
        num_hot_rows=num_hot_rows,
        homes=homes,
        in_two_tables=homes == EmbeddingLocation.MANAGED and num_hot_rows > 0,
    )


@dataclass(frozen=True)
class HomesAndReplicas:
    """Home rows and replicas in a tensor of weights or of a state: views of the TBE's memory."""

    homes: Tensor
    """Entries of the home rows, shape ``(num_home_rows, ...)``."""
    replicas: Tensor
    """Entries of the replicas by hot slot of the pack, shape ``(num_hot_rows, ...)``."""

    @staticmethod
    def from_tables(tables: list[Tensor], layout: MemoryLayout) -> HomesAndReplicas:
        """Returns the views of home rows and replicas in one tensor per table of the TBE."""
        homes = tables[0][: layout.num_home_rows]
        if layout.in_two_tables:
            return HomesAndReplicas(homes, tables[1])
        # Home rows, then replicas; a padding row may follow, see MemoryLayout.tables.
        return HomesAndReplicas(homes, tables[0][layout.num_home_rows :][: layout.num_hot_rows])

    def versions(self) -> tuple[int, int]:
        """Counts of in-place writes; views of one tensor share one count."""
        return self.homes._version, self.replicas._version


class RowTables(nn.Module):
    """Home rows and replicas of one pack, stored in a TBE."""

    def __init__(
        self, config: GroupedEmbeddingConfig, layout: MemoryLayout, device: torch.device
    ) -> None:
        super().__init__()
        self.layout = layout
        self._dim = config.embedding_tables[0].local_cols
        name = "+".join(table.name for table in config.embedding_tables)
        arguments = dict(config.fused_params or {})
        self._row_update = row_update(
            arguments,
            data_type=config.data_type,
            is_on_host=layout.homes == EmbeddingLocation.HOST,
            has_replicas=layout.num_hot_rows > 0,
        )
        optimizer = arguments.get("optimizer", EmbOptimType.EXACT_SGD)
        keeps_state_here = self._row_update is not None and optimizer in ONLY_HERE
        if keeps_state_here:
            arguments["optimizer"] = EmbOptimType.EXACT_SGD  # SGD keeps no state
        self.tbe = SplitTableBatchedEmbeddingBagsCodegen(
            embedding_specs=[
                (num_rows, self._dim, location, layout.compute_device)
                for num_rows, location in layout.tables
            ],
            pooling_mode=PoolingMode.SUM,
            weights_precision=data_type_to_sparse_type(config.data_type),
            device=device,
            table_names=[name, f"{name}, replicas"][: len(layout.tables)],
            **arguments,
        )
        self._kernel = UpdateKernel.find(self.tbe, arguments)
        self.weights = HomesAndReplicas.from_tables(self.tbe.split_embedding_weights(), layout)
        # get_optimizer_state returns one dict per table, and an empty list for plain SGD.
        states_by_table: list[dict[str, Tensor]] = self.tbe.get_optimizer_state()
        if keeps_state_here:
            states_by_table = [
                new_states(optimizer, num_rows, self._dim, device) for num_rows, _ in layout.tables
            ]
        self.row_states: Mapping[str, HomesAndReplicas] = {}
        """Optimizer states with one entry per row."""
        self.shared_states: Mapping[str, Tensor] = {}
        """Optimizer states that all rows share."""
        num_rows = [rows for rows, _ in layout.tables]
        for key in states_by_table[0] if states_by_table else ():
            states = [states_by_key[key] for states_by_key in states_by_table]
            # A state with as many entries as rows in every table is per row; other states are
            # shared.
            if [len(state) for state in states if state.dim()] == num_rows:
                self.row_states[key] = HomesAndReplicas.from_tables(states, layout)
            else:
                self.shared_states[key] = states[0]
        self._counting = torch.empty(0, dtype=torch.int64, device=device)

    def per_row(self) -> list[HomesAndReplicas]:
        """Returns the weights and every optimizer state that has one entry per row."""
        return [self.weights, *self.row_states.values()]

    def flat_homes(self) -> Tensor:
        """Returns the TBE's one-dimensional buffer that begins with the home rows' weights."""
        if self.layout.homes == EmbeddingLocation.HOST:
            return self.tbe.weights_host
        on_device = self.layout.homes == EmbeddingLocation.DEVICE
        return self.tbe.weights_dev if on_device else self.tbe.weights_uvm

    @torch.no_grad()
    def update(
        self,
        rows_n: Tensor,
        slots_t: Tensor,
        grads_mD: Tensor,
        bags: tuple[Tensor, Tensor | None] | None = None,
    ) -> None:
        """Applies the optimizer once to every given row, and counts one step.

        Gradients of a repeated row or slot are summed first.

        Args:
            rows_n: Home rows, integer.
            slots_t: Hot slots of the replicas, int64.
            grads_mD: Gradients of the home rows, or of the weighted sums of the bags, then of the
                replicas; may be overwritten.
            bags: First row of each bag, and n, int64, shape ``(S + 1,)``, and the weight of each
                row, float32, ``None`` = ones; the pack has no replicas. ``None`` = every row is its
                own bag.
        """
        if self._row_update is None:
            self._update_by_fbgemm(rows_n, slots_t, grads_mD, bags)
            return
        # Home rows and replicas are updated by separate calls of one step: the replica call then
        # has equal shapes, hence equal bits, on all ranks.
        step = UpdateStep.begin(self.tbe)
        num_hot = slots_t.numel()
        home_grads, hot_grads = grads_mD.split([len(grads_mD) - num_hot, num_hot])
        rows_U, grads_UD = sum_by_row(rows_n, home_grads, self.layout.num_home_rows, *(bags or ()))
        weights, *states = self.per_row()
        if rows_U.numel():
            homes = [state.homes for state in states]
            self._row_update(step, weights.homes, homes, rows_U, grads_UD)
        if num_hot:
            # A slot repeats where several lookups of one graph used it.
            rows_U, grads_UD = sum_by_row(slots_t, hot_grads, self.layout.num_hot_rows)
            replicas = [state.replicas for state in states]
            self._row_update(step, weights.replicas, replicas, rows_U, grads_UD)

    def _update_by_fbgemm(
        self,
        rows_n: Tensor,
        slots_t: Tensor,
        grads_mD: Tensor,
        bags: tuple[Tensor, Tensor | None] | None,
    ) -> None:
        """Updates by the fused TBE, whose backward applies its optimizer, or by that kernel alone.
        Both sum gradients of repeated rows."""
        if not len(grads_mD):
            # one empty bag per table: the step counts, as in stock TorchRec
            self.tbe(slots_t, slots_t.new_zeros(1 + len(self.layout.tables)))
            return
        indices = rows_n.to(torch.int64)
        if bags is not None:
            offsets, weights = bags
        else:
            weights = None
            num_hot, in_two = slots_t.numel(), self.layout.in_two_tables
            num_home = len(grads_mD) - num_hot
            if num_hot:
                # In one table the replicas follow the home rows.
                slots_t = slots_t if in_two else slots_t + self.layout.num_home_rows
                indices = torch.cat([indices, slots_t])
            offsets = self._two_offsets(num_home, num_hot) if in_two else self._up_to(len(indices))
            grads_mD = _side_by_side(grads_mD, num_home) if in_two else grads_mD
        if self._kernel is not None:
            self._kernel(indices, offsets, weights, grads_mD)
            return
        with torch.enable_grad():
            pooled = self.tbe(indices, offsets, per_sample_weights=weights)
            torch.autograd.backward(pooled, grads_mD)

    def _two_offsets(self, num_home: int, num_hot: int) -> Tensor:
        """Offsets of the bags of two tables, padded with empty bags: int64, ``(2 S + 1,)``."""
        counting_S1 = self._up_to(max(num_home, num_hot))
        # 0, 1, .., num_home, num_home, ..: a bag per row, then empty bags; the second table
        # continues.
        home_S = counting_S1[:-1].clamp(max=num_home)
        return torch.cat([home_S, counting_S1.clamp(max=num_hot) + num_home])

    def _up_to(self, end: int) -> Tensor:
        """Returns the integers ``0 .. end``, a view of a cached tensor."""
        if self._counting.numel() <= end:
            self._counting = torch.arange(2 * end + 1, device=self._counting.device)
        return self._counting[: end + 1]


def _side_by_side(grads_mD: Tensor, num_home: int) -> Tensor:
    """Gradients by bag, with the two tables' gradients side by side: shape ``(S, 2 D)``."""
    num_bags = max(num_home, grads_mD.size(0) - num_home)
    # A TBE's output for bag s is the concatenation of its tables; padded bags have zero gradients.
    grads_STD = grads_mD.new_zeros(num_bags, 2, grads_mD.size(1))
    grads_STD[:num_home, 0] = grads_mD[:num_home]
    grads_STD[: grads_mD.size(0) - num_home, 1] = grads_mD[num_home:]
    return grads_STD.flatten(1)
