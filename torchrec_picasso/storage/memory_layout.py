"""Memory of a pack's home rows and replicas, and the number of tables in its TBE.

    one table:    | homes | replicas |
    two tables:   | homes |            | replicas |

A table lies in one memory. One table is simpler and faster on the CPU, and is used whenever home
rows and replicas belong in the same memory. Home rows in managed memory (UVM) are read and written
over the host's bus, and most lookups are of hot rows: the replicas are then a second table, in the
device's own memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torchrec.distributed.embedding_types import (
    GroupedEmbeddingConfig,
    compute_kernel_to_embedding_location,
)

from torchrec_picasso._torchrec import ComputeDevice, EmbeddingLocation
from torchrec_picasso.errors import CompatError
from torchrec_picasso.storage.exactness import why_no_memory

__all__ = ["MemoryLayout", "choose_memory"]


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
