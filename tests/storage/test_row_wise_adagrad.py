"""Row-wise Adagrad by torch's operators is FBGEMM's, and is used where it is the same update."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor
from torchrec.modules.embedding_configs import DataType

from tests.storage.test_memory_layout import config_of
from torchrec_picasso.storage import row_tables
from torchrec_picasso.storage.memory_layout import choose_memory
from torchrec_picasso.storage.row_tables import RowTables
from torchrec_picasso.storage.row_wise_adagrad import RowWiseAdagrad

CPU = torch.device("cpu")
ROWS, NUM_HOT, STEPS = 300, 20, 6
SETTINGS = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.3, "eps": 1e-3}


def _tables(dim: int, num_hot: int, by_fbgemm: bool) -> RowTables:
    config = config_of((ROWS,), dim=dim)
    config.data_type, config.fused_params = DataType.FP32, dict(SETTINGS)
    with pytest.MonkeyPatch.context() as patch:
        if by_fbgemm:
            patch.setattr(row_tables.RowWiseAdagrad, "of", lambda *_, **__: None)
        tables = RowTables(config, choose_memory(config, CPU, num_hot), CPU)
    generator = torch.Generator().manual_seed(0)
    for rows in (tables.weights.homes, tables.weights.replicas):
        rows.copy_(torch.randn(rows.shape, generator=generator))
    return tables


def _left(tables: RowTables) -> list[Tensor]:
    return [
        *(part for rows in tables.per_row() for part in (rows.homes, rows.replicas)),
        tables.tbe.iter,
    ]


def _train_rows(tables: RowTables, dim: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        tables.tbe.set_learning_rate(0.3 / (step + 1))
        rows_n = torch.randint(ROWS, (200,), generator=generator, dtype=torch.int32)
        slots_h = torch.randperm(NUM_HOT, generator=generator)[: 7 + step]
        grads_mD = torch.randn(200 + 7 + step, dim, generator=generator)
        tables.update(rows_n, slots_h, grads_mD.clone())
    return _left(tables)


@pytest.mark.parametrize("dim", [4, 16, 100, 256])
def test_rows_are_updated_as_by_fbgemm(dim: int) -> None:
    ours, its = (_train_rows(_tables(dim, NUM_HOT, of), dim) for of in (False, True))
    torch.testing.assert_close(ours, its, rtol=2e-6, atol=2e-6)
    assert int(ours[-1]) == STEPS


def _train_bags(tables: RowTables, dim: int, weighted: bool) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    for _ in range(STEPS):
        lengths_S = torch.randint(4, (90,), generator=generator)  # some bags are empty
        offsets_S1 = torch.cat([torch.zeros(1, dtype=torch.int64), lengths_S.cumsum(0)])
        num_lookups = int(offsets_S1[-1])
        rows_N = torch.randint(ROWS, (num_lookups,), generator=generator)
        weights_N = torch.rand(num_lookups, generator=generator) if weighted else None
        grads_SD = torch.randn(90, dim, generator=generator)
        tables.update_bags(rows_N, offsets_S1, weights_N, grads_SD.clone())
    nothing = torch.empty(0, dtype=torch.int64)
    tables.update_bags(nothing, torch.zeros(1, dtype=torch.int64), None, torch.empty(0, dim))
    return _left(tables)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dim", [4, 64])
def test_bags_are_updated_as_by_fbgemm(dim: int, weighted: bool) -> None:
    ours, its = (_train_bags(_tables(dim, 0, of), dim, weighted) for of in (False, True))
    torch.testing.assert_close(ours, its, rtol=2e-6, atol=2e-6)
    assert int(ours[-1]) == STEPS + 1


@pytest.mark.parametrize("dim", [4, 8, 36, 128])
def test_replicas_have_the_same_bits_beside_any_homes(dim: int) -> None:
    found = []
    for num_home in (0, 1, 3, 150):
        tables = _tables(dim, NUM_HOT, by_fbgemm=False)
        generator = torch.Generator().manual_seed(3)
        slots_h, grads_hD = torch.arange(13), torch.randn(13, dim, generator=generator)
        rows_n = torch.arange(num_home)
        tables.update(rows_n, slots_h, torch.cat([torch.randn(num_home, dim), grads_hD]))
        found.append([rows.replicas for rows in tables.per_row()])
    for other in found[1:]:
        for one, its in zip(found[0], other):
            assert torch.equal(one, its)


@pytest.mark.parametrize(
    ("changed", "data_type", "is_on_host"),
    [
        ({"optimizer": EmbOptimType.EXACT_ADAGRAD}, DataType.FP32, True),
        ({"optimizer": EmbOptimType.EXACT_SGD}, DataType.FP32, True),
        ({"weight_decay": 0.1}, DataType.FP32, True),
        ({"max_norm": 1.0}, DataType.FP32, True),
        ({"extra_optimizer_config": object()}, DataType.FP32, True),
        ({}, DataType.FP16, True),
        ({}, DataType.FP32, False),
    ],
)
def test_any_other_update_is_fbgemms(
    changed: dict[str, Any], data_type: DataType, is_on_host: bool
) -> None:
    params = {**SETTINGS, **changed}
    assert RowWiseAdagrad.of(params, data_type=data_type, is_on_host=is_on_host) is None
    assert RowWiseAdagrad.of(SETTINGS, data_type=DataType.FP32, is_on_host=True) is not None
