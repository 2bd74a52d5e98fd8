"""Replicas are a table of their own exactly where homes are in managed memory."""

import pytest
import torch
from torchrec.distributed.embedding_types import (
    EmbeddingComputeKernel,
    GroupedEmbeddingConfig,
    ShardedEmbeddingTable,
)
from torchrec.modules.embedding_configs import DataType, PoolingType

from torchrec_picasso import CompatError
from torchrec_picasso._torchrec import ComputeDevice, EmbeddingLocation
from torchrec_picasso.storage.row_tables import choose_memory

FUSED, UVM = EmbeddingComputeKernel.FUSED, EmbeddingComputeKernel.FUSED_UVM
HOST, DEVICE, MANAGED = (
    EmbeddingLocation.HOST,
    EmbeddingLocation.DEVICE,
    EmbeddingLocation.MANAGED,
)


def config_of(
    local_rows: tuple[int, ...], kernel: EmbeddingComputeKernel = FUSED, dim: int = 4
) -> GroupedEmbeddingConfig:
    """A pack of tables ``t0``, ``t1``, ... with the home rows given."""
    tables = [
        ShardedEmbeddingTable(
            name=f"t{index}",
            num_embeddings=100,
            embedding_dim=dim,
            local_rows=rows,
            local_cols=dim,
            compute_kernel=kernel,
        )
        for index, rows in enumerate(local_rows)
    ]
    return GroupedEmbeddingConfig(
        data_type=DataType.FP32,
        pooling=PoolingType.SUM,
        is_weighted=False,
        has_feature_processor=False,
        compute_kernel=kernel,
        embedding_tables=tables,
    )


@pytest.mark.parametrize(
    ("kernel", "device", "num_hot_rows", "tables"),
    [
        (FUSED, "cpu", 5, [(14, HOST)]),
        (UVM, "cpu", 5, [(14, HOST)]),
        (FUSED, "cuda", 5, [(14, DEVICE)]),
        (UVM, "cuda", 0, [(9, MANAGED)]),
        (UVM, "cuda", 5, [(9, MANAGED), (5, DEVICE)]),
    ],
)
def test_by_kernel_and_device(
    kernel: EmbeddingComputeKernel,
    device: str,
    num_hot_rows: int,
    tables: list[tuple[int, EmbeddingLocation]],
) -> None:
    layout = choose_memory(config_of((6, 3), kernel), torch.device(device), num_hot_rows)
    assert (layout.num_home_rows, layout.num_hot_rows) == (9, num_hot_rows)
    assert layout.tables == tables
    assert layout.in_two_tables == (len(tables) == 2)
    expected = ComputeDevice.CPU if device == "cpu" else ComputeDevice.CUDA
    assert layout.compute_device == expected


@pytest.mark.parametrize(
    ("kernel", "num_hot_rows", "num_rows"),
    [(FUSED, 0, [1]), (FUSED, 5, [5]), (UVM, 0, [1]), (UVM, 5, [1, 5])],
)
def test_no_table_is_empty_where_no_row_is_at_home(
    kernel: EmbeddingComputeKernel, num_hot_rows: int, num_rows: list[int]
) -> None:
    layout = choose_memory(config_of((0, 0), kernel), torch.device("cuda"), num_hot_rows)
    assert layout.num_home_rows == 0
    assert [rows for rows, _ in layout.tables] == num_rows


def test_kernels_and_dims_that_cannot_be_hot_cold_are_refused() -> None:
    caching = config_of((6,), EmbeddingComputeKernel.FUSED_UVM_CACHING)
    with pytest.raises(CompatError, match="'t0' has compute kernel 'fused_uvm_caching'; use one"):
        choose_memory(caching, torch.device("cuda"), 5)
    with pytest.raises(CompatError, match="'t0' has embedding_dim 6; FBGEMM needs a multiple of 4"):
        choose_memory(config_of((6,), dim=6), torch.device("cuda"), 5)
