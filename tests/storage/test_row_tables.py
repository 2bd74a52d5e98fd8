"""Replicas are a table of their own exactly where homes are in managed memory; one table and two
give the same bits, by whatever rows of either kind a step has."""

import dataclasses
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor
from torchrec.distributed.embedding_types import (
    EmbeddingComputeKernel,
    GroupedEmbeddingConfig,
    ShardedEmbeddingTable,
)
from torchrec.modules.embedding_configs import DataType

from tests.support.tables import pack_of
from torchrec_picasso import CompatError
from torchrec_picasso._torchrec import ComputeDevice, EmbeddingLocation
from torchrec_picasso.storage.row_tables import HomesAndReplicas, RowTables, choose_memory

FUSED, UVM = EmbeddingComputeKernel.FUSED, EmbeddingComputeKernel.FUSED_UVM
HOST, DEVICE = EmbeddingLocation.HOST, EmbeddingLocation.DEVICE
MANAGED = EmbeddingLocation.MANAGED


def filled(tables: RowTables) -> RowTables:
    generator = torch.Generator().manual_seed(0)
    for rows in (tables.weights.homes, tables.weights.replicas):
        rows.copy_(torch.randn(rows.shape, generator=generator))
    return tables


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
    return pack_of(tables, kernel)


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


CPU = torch.device("cpu")
NUM_HOT = 5
STEPS = (
    ([0, 8, 3, 8, 8], [4, 0]),
    ([2], [3, 1, 0]),
    ([], [2]),
    ([5, 5], []),
    ([], []),
    ([7, 1, 0], [0, 1, 2]),
)
"""Home rows, some of them twice, and hot slots: more of the one, of the other, none."""

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"optimizer": EmbOptimType.EXACT_SGD},
    "adagrad": {"optimizer": EmbOptimType.EXACT_ADAGRAD},
    "rowwise_adagrad": {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD},
    "adam": {"optimizer": EmbOptimType.ADAM, "weight_decay": 0.1},
    "partial_lamb": {"optimizer": EmbOptimType.PARTIAL_ROWWISE_LAMB},
}


def _tables(
    in_two: bool,
    settings: dict[str, Any],
    data_type: DataType = DataType.FP32,
    local_rows: tuple[int, ...] = (6, 3),
) -> RowTables:
    config = config_of(local_rows)
    config.data_type = data_type
    config.fused_params = {"learning_rate": 0.5, "stochastic_rounding": False, **settings}
    layout = choose_memory(config, CPU, NUM_HOT)
    tables = RowTables(config, dataclasses.replace(layout, in_two_tables=in_two), CPU)
    return filled(tables)


def _train(tables: RowTables, steps: Any = STEPS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    for rows, slots in steps:
        grads_mD = torch.randn(len(rows) + len(slots), 4, generator=generator)
        rows_n = torch.tensor(rows, dtype=torch.int32)
        tables.update(rows_n, torch.tensor(slots, dtype=torch.int64), grads_mD.clone())
    return [part for rows in tables.per_row() for part in (rows.homes, rows.replicas)]


@pytest.mark.parametrize(
    ("name", "data_type"),
    [
        *((name, DataType.FP32) for name in OPTIMIZERS),
        *((name, DataType.FP16) for name in ("sgd", "adagrad", "rowwise_adagrad")),
    ],
)
def test_two_tables_train_as_one(name: str, data_type: DataType) -> None:
    settings = OPTIMIZERS[name]
    before = [rows.clone() for rows in _train(_tables(True, settings, data_type), steps=())]
    one, two = (_train(_tables(in_two, settings, data_type)) for in_two in (False, True))
    assert [t.shape for t in two] == [t.shape for t in one]
    assert len(two) == {"sgd": 2, "adam": 6, "partial_lamb": 6}.get(name, 4)
    for mine, its, was in zip(two, one, before):
        assert torch.equal(mine, its)
        assert not torch.equal(mine, was)


@pytest.mark.parametrize("in_two", [False, True])
def test_a_rank_that_is_no_home(in_two: bool) -> None:
    """FBGEMM's kernels see a home row that nobody has; replicas train as beside any homes."""
    settings = OPTIMIZERS["adagrad"]
    steps = tuple(([], slots) for _, slots in STEPS)
    tables = _tables(in_two, settings, local_rows=(0, 0))
    beside = _tables(in_two, settings)
    tables.weights.replicas.copy_(beside.weights.replicas)
    homes, replicas, home_state, replica_state = _train(tables, steps)
    assert homes.shape == home_state.shape == (0, 4)
    _, expected, _, expected_state = _train(beside, steps)
    assert torch.equal(replicas, expected)
    assert torch.equal(replica_state, expected_state)


def test_only_homes_are_in_the_first_table_and_only_replicas_in_the_second() -> None:
    tables = _tables(True, OPTIMIZERS["rowwise_adagrad"])
    homes, replicas = tables.tbe.split_embedding_weights()
    assert tables.weights.homes.data_ptr() == homes.data_ptr() == tables.flat_homes().data_ptr()
    assert tables.weights.replicas.data_ptr() == replicas.data_ptr()
    assert (len(homes), len(replicas)) == (9, NUM_HOT)
    (state,) = tables.row_states.values()
    assert (state.homes.shape, state.replicas.shape) == ((9,), (NUM_HOT,))
    assert not tables.shared_states


@pytest.mark.parametrize("which", ["homes", "replicas"])
def test_a_write_into_either_shows_where_they_share_no_memory(which: str) -> None:
    """On the CPU both tables are views of one buffer, and hence of one count of writes."""
    rows = HomesAndReplicas(torch.zeros(3, 4), torch.zeros(2, 4))
    before = rows.versions()
    assert rows.versions() == before
    getattr(rows, which)[0].fill_(1.0)
    assert rows.versions() != before


def test_learning_rate_reaches_both() -> None:
    for in_two in (False, True):
        tables = _tables(in_two, OPTIMIZERS["sgd"])
        homes, replicas = tables.weights.homes.clone(), tables.weights.replicas.clone()
        tables.tbe.set_learning_rate(0.25)
        tables.update(torch.tensor([4]), torch.tensor([1]), torch.ones(2, 4))
        torch.testing.assert_close(homes[4] - tables.weights.homes[4], torch.full((4,), 0.25))
        torch.testing.assert_close(replicas[1] - tables.weights.replicas[1], torch.full((4,), 0.25))
