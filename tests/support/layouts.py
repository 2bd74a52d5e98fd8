"""Both layouts of homes and replicas, on the CPU.

Two tables are chosen on a GPU only, for replicas in its memory beside homes in managed memory. What
does not depend on the memory itself is shown on the CPU, by asking for them there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torchrec.distributed.embedding_types import GroupedEmbeddingConfig

from torchrec_picasso.storage import row_storage
from torchrec_picasso.storage.memory_layout import MemoryLayout, choose_memory


@contextmanager
def layout_in_tables(num_tables: int) -> Iterator[None]:
    """Storages made meanwhile have two tables wherever they have hot rows, or one as chosen."""

    def choose(
        config: GroupedEmbeddingConfig, device: torch.device, num_hot_rows: int
    ) -> MemoryLayout:
        layout = choose_memory(config, device, num_hot_rows)
        assert not layout.in_two_tables
        return dataclasses.replace(layout, in_two_tables=num_tables == 2 and num_hot_rows > 0)

    with mock.patch.object(row_storage, "choose_memory", choose):
        yield
