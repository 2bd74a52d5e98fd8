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
    replicas: EmbeddingLocation
    """Memory of the replicas; the memory of the home rows if both are one table."""
    in_two_tables: bool

    def __post_init__(self) -> None:
        if self.in_two_tables:
            assert self.num_hot_rows, "FBGEMM's CPU update cannot have an empty last table"
        else:
            assert self.homes == self.replicas, "a table has one memory"

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
        return [(max(1, self.num_home_rows), self.homes), (self.num_hot_rows, self.replicas)]


def choose_memory(
    config: GroupedEmbeddingConfig, device: torch.device, num_hot_rows: int
) -> MemoryLayout:
    """Chooses the memory of a pack's tables, all with one compute kernel, on a device.

    Hot rows with home rows in managed memory have two tables, all others one.

    Raises:
        CompatError: If a hot/cold table cannot have the compute kernel or the dim.
    """
    for table in config.embedding_tables:
        refusal = why_no_memory(table.compute_kernel.value, table.local_cols)
        if refusal is not None:
            raise CompatError(f"hot/cold table {table.name!r} {refusal.what}; {refusal.instead}")
    (kernel,) = {table.compute_kernel for table in config.embedding_tables}
    homes = replicas = EmbeddingLocation.HOST
    if device.type == "cuda":
        homes = replicas = compute_kernel_to_embedding_location(kernel)
    in_two_tables = homes == EmbeddingLocation.MANAGED and num_hot_rows > 0
    if in_two_tables:
        replicas = EmbeddingLocation.DEVICE
    return MemoryLayout(
        num_home_rows=sum(table.local_rows for table in config.embedding_tables),
        num_hot_rows=num_hot_rows,
        homes=homes,
        replicas=replicas,
        in_two_tables=in_two_tables,
    )
