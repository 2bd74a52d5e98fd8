"""Updates by torch's operators: row-wise Adagrad is FBGEMM's, the others are the dense formulas."""

from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor
from torchrec.modules.embedding_configs import DataType

from tests.storage.test_row_tables import config_of, filled
from tests.support.dense_updates import OPTIMIZERS, DenseUpdate
from torchrec_picasso.storage import row_tables, row_updates
from torchrec_picasso.storage.row_tables import RowTables, choose_memory
from torchrec_picasso.storage.row_updates import ONLY_HERE, row_update, row_wise_adagrad

CPU = torch.device("cpu")
ROWS, NUM_HOT, STEPS = 300, 20, 6
SETTINGS = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.3, "eps": 1e-3}


def _tables(
    dim: int,
    num_hot: int,
    by_fbgemm: bool,
    settings: Any = SETTINGS,
    data_type: DataType = DataType.FP32,
) -> RowTables:
    config = config_of((ROWS,), dim=dim)
    config.data_type, config.fused_params = data_type, dict(settings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_updates, "torch_is_faster", lambda: True)
        if by_fbgemm:
            patch.setattr(row_tables, "row_update", lambda *_, **__: None)
        tables = RowTables(config, choose_memory(config, CPU, num_hot), CPU)
    return filled(tables)


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
        slots_h = torch.randint(NUM_HOT, (7 + step,), generator=generator)  # some repeat
        grads_mD = torch.randn(200 + 7 + step, dim, generator=generator)
        tables.update(rows_n, slots_h, grads_mD.clone())
    return _left(tables)


@pytest.mark.parametrize("dim", [4, 16, 100, 256])
def test_rows_are_updated_as_by_fbgemm(dim: int) -> None:
    ours, its = (_train_rows(_tables(dim, NUM_HOT, each), dim) for each in (False, True))
    torch.testing.assert_close(ours, its, rtol=2e-6, atol=2e-6)
    assert int(ours[-1]) == STEPS


def _train_bags(tables: RowTables, dim: int, weighted: bool) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    nothing = torch.empty(0, dtype=torch.int64)
    for _ in range(STEPS):
        lengths_S = torch.randint(4, (90,), generator=generator)  # some bags are empty
        offsets_S1 = torch.cat([torch.zeros(1, dtype=torch.int64), lengths_S.cumsum(0)])
        num_lookups = int(offsets_S1[-1])
        rows_N = torch.randint(ROWS, (num_lookups,), generator=generator)
        weights_N = torch.rand(num_lookups, generator=generator) if weighted else None
        grads_SD = torch.randn(90, dim, generator=generator)
        tables.update(rows_N, nothing, grads_SD.clone(), (offsets_S1, weights_N))
    no_bags = torch.zeros(1, dtype=torch.int64), None
    tables.update(nothing, nothing, torch.empty(0, dim), no_bags)
    return _left(tables)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dim", [4, 64])
def test_bags_are_updated_as_by_fbgemm(dim: int, weighted: bool) -> None:
    ours, its = (_train_bags(_tables(dim, 0, each), dim, weighted) for each in (False, True))
    torch.testing.assert_close(ours, its, rtol=2e-6, atol=2e-6)
    assert int(ours[-1]) == STEPS + 1


@pytest.mark.parametrize("data_type", [DataType.FP32, DataType.FP16])
@pytest.mark.parametrize("optimizer", row_updates._KERNELS, ids=lambda which: which.name)
def test_a_kernel_alone_leaves_the_bits_of_the_tbes_backward(
    optimizer: EmbOptimType, data_type: DataType
) -> None:
    settings = {**SETTINGS, "optimizer": optimizer, "stochastic_rounding": False}
    left: list[list[list[Tensor]]] = []
    for is_alone in (True, False):
        rows, bags, weighted = (
            _tables(12, num_hot, True, settings, data_type) for num_hot in (NUM_HOT, 0, 0)
        )
        for tables in (rows, bags, weighted):
            assert tables._kernel is not None
            if not is_alone:
                tables._kernel = None
            tables.tbe.update_hyper_parameters({"eps": 0.5})
        left.append(
            [_train_rows(rows, 12), _train_bags(bags, 12, False), _train_bags(weighted, 12, True)]
        )
    for ours, its in zip(*left):
        assert all(map(torch.equal, ours, its))


@pytest.mark.parametrize(
    "optimizer", [EmbOptimType.EXACT_ROWWISE_ADAGRAD, *ONLY_HERE], ids=lambda which: which.name
)
@pytest.mark.parametrize("dim", [4, 36, 128])
def test_replicas_have_the_same_bits_beside_any_homes(dim: int, optimizer: EmbOptimType) -> None:
    found = []
    for num_home in (0, 1, 3, 150):
        tables = _tables(dim, NUM_HOT, False, {**SETTINGS, "optimizer": optimizer})
        generator = torch.Generator().manual_seed(3)
        for _ in range(2):
            slots_h, grads_hD = torch.arange(13), torch.randn(13, dim, generator=generator)
            rows_n = torch.arange(num_home)
            tables.update(rows_n, slots_h, torch.cat([torch.randn(num_home, dim), grads_hD]))
        found.append([rows.replicas for rows in tables.per_row()])
    for other in found[1:]:
        for one, its in zip(found[0], other):
            assert torch.equal(one, its)


def test_eps_is_what_it_was_last_set_to() -> None:
    ours, its = (_tables(8, NUM_HOT, each) for each in (False, True))
    for tables in (ours, its):
        tables.tbe.update_hyper_parameters({"eps": 2.0})
    torch.testing.assert_close(_train_rows(ours, 8), _train_rows(its, 8), rtol=2e-6, atol=2e-6)
    plain = _tables(8, NUM_HOT, by_fbgemm=False)
    assert not torch.allclose(_train_rows(plain, 8)[0], ours.weights.homes, rtol=1e-2)


NUMBERS = {"eps": 1e-2, "beta1": 0.8, "beta2": 0.99, "weight_decay": 0.1}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_rows_are_updated_by_the_dense_formulas(name: str) -> None:
    """Repeated rows, replicas, a rate and hyperparameters that change, a step without rows."""
    dim, optimizer = 16, EmbOptimType[name.upper()]
    tables = _tables(dim, NUM_HOT, False, {**NUMBERS, "optimizer": optimizer})
    # two tables, since homes and replicas of this storage are no copies of each other
    weights = [rows.clone() for rows in (tables.weights.homes, tables.weights.replicas)]
    updates = [DenseUpdate(name=name, **NUMBERS) for _ in weights]
    generator = torch.Generator().manual_seed(1)
    for step in range(8):
        rows_n = torch.randint(ROWS, (200,), generator=generator, dtype=torch.int32)
        slots_h = torch.randint(NUM_HOT, (7 + step,), generator=generator)  # some repeat
        if step == 3:
            rows_n, slots_h = rows_n[:0], slots_h[:0]
        if step == 5:
            tables.tbe.update_hyper_parameters({"beta1": 0.5, "beta2": 0.9, "weight_decay": 0.3})
        grads_mD = torch.randn(len(rows_n) + len(slots_h), dim, generator=generator)
        tables.tbe.set_learning_rate(0.3 / (step + 1))
        tables.update(rows_n, slots_h, grads_mD.clone())
        for update, weight, rows, grads in zip(
            updates, weights, (rows_n.long(), slots_h), grads_mD.split([len(rows_n), len(slots_h)])
        ):
            update.lr = 0.3 / (step + 1)
            if step == 5:
                update.beta1, update.beta2, update.weight_decay = 0.5, 0.9, 0.3
            whole = torch.zeros_like(weight).index_add_(0, rows, grads)
            update.step(weight, whole, torch.bincount(rows, minlength=len(weight)) > 0)
    expected = [
        part
        for kind in (weights, [u.exp_avg for u in updates], [u.exp_avg_sq for u in updates])
        for part in kind
    ]
    found = _left(tables)
    torch.testing.assert_close(found[:-1], expected, rtol=2e-5, atol=2e-6)
    assert int(found[-1]) == 8
    start = _tables(dim, NUM_HOT, False, {**NUMBERS, "optimizer": optimizer})
    moved = (start.weights.homes != tables.weights.homes).any(1)
    assert torch.equal(moved, (updates[0].exp_avg != 0).any(1))  # type: ignore[operator]
    assert int(moved.sum()) > 0


def test_adam_of_all_rows_is_pytorchs() -> None:
    dim, steps = 8, 12
    settings = {"optimizer": EmbOptimType.ADAM, "learning_rate": 0.05, "eps": 1e-3}
    tables = _tables(dim, NUM_HOT, False, settings)
    parameter = torch.nn.Parameter(tables.weights.homes.clone())
    adam = torch.optim.Adam([parameter], lr=0.05, eps=1e-3)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        parameter.grad = torch.randn(ROWS, dim, generator=generator)
        tables.update(torch.arange(ROWS), torch.arange(0), parameter.grad.clone())
        adam.step()
    # of float32 1 - beta2 is 1.3e-5 smaller
    torch.testing.assert_close(tables.weights.homes, parameter.detach(), rtol=2e-5, atol=2e-5)
    for key in ("exp_avg", "exp_avg_sq"):
        its = adam.state[parameter][key]
        torch.testing.assert_close(tables.row_states[key].homes, its, rtol=5e-5, atol=1e-6)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_bags_are_updated_as_their_rows(name: str) -> None:
    settings = {**NUMBERS, "optimizer": EmbOptimType[name.upper()]}
    bags, rows = (_tables(8, 0, False, settings) for _ in range(2))
    generator = torch.Generator().manual_seed(2)
    lengths_S = torch.randint(4, (90,), generator=generator)
    offsets_S1 = torch.cat([torch.zeros(1, dtype=torch.int64), lengths_S.cumsum(0)])
    rows_N = torch.randint(ROWS, (int(offsets_S1[-1]),), generator=generator)
    grads_SD = torch.randn(90, 8, generator=generator)
    bags.update(rows_N, torch.arange(0), grads_SD.clone(), (offsets_S1, None))
    rows.update(rows_N, torch.arange(0), grads_SD.repeat_interleave(lengths_S, 0))
    torch.testing.assert_close(_left(bags), _left(rows), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("optimizer", ONLY_HERE, ids=lambda which: which.name)
def test_state_is_named_and_shaped_as_on_a_gpu(optimizer: EmbOptimType) -> None:
    tables = _tables(8, 0, False, {"optimizer": optimizer})
    (on_gpu,) = SplitTableBatchedEmbeddingBagsCodegen(
        [(ROWS, 8, EmbeddingLocation.DEVICE, ComputeDevice.CUDA)],
        optimizer=optimizer,
        device=torch.device("meta"),
    ).get_optimizer_state()
    ours = {key: rows.homes for key, rows in tables.row_states.items()}
    assert list(ours) == list(on_gpu)
    for key, its in on_gpu.items():
        assert (ours[key].shape, ours[key].dtype) == (its.shape, its.dtype)


def test_a_step_count_that_is_set_is_taken_where_fbgemm_takes_it() -> None:
    """Before the first step; later FBGEMM goes on counting on its own."""
    begun, fresh = (_tables(8, 0, False, {"optimizer": EmbOptimType.ADAM}) for _ in range(2))
    begun.update(torch.arange(0), torch.arange(0), torch.zeros(0, 8))
    for tables in (begun, fresh):
        tables.tbe.set_optimizer_step(10)
        tables.update(torch.arange(0), torch.arange(0), torch.zeros(0, 8))
        assert int(tables.tbe.iter) == 11
    assert [int(tables.tbe.iter_cpu) for tables in (begun, fresh)] == [2, 11]


@pytest.mark.parametrize(
    ("changed", "data_type", "is_on_host"),
    [
        ({"optimizer": EmbOptimType.EXACT_ADAGRAD}, DataType.FP32, True),
        ({"optimizer": EmbOptimType.EXACT_SGD}, DataType.FP32, True),
        ({"optimizer": EmbOptimType.ADAM}, DataType.FP32, False),
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
    where = {"data_type": data_type, "is_on_host": is_on_host, "has_replicas": True}
    assert row_update({**SETTINGS, **changed}, **where) is None
    where = {"data_type": DataType.FP32, "is_on_host": True, "has_replicas": True}
    assert row_update(SETTINGS, **where) is row_wise_adagrad


@pytest.mark.parametrize(
    ("is_intel", "vectors", "expected"),
    [
        (True, "AVX512", row_wise_adagrad),
        (False, "AVX512", None),
        (False, "AVX2", row_wise_adagrad),
    ],
)
def test_the_processor_decides_where_no_row_has_replicas(
    is_intel: bool, vectors: str, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_updates, "is_intel", lambda: is_intel)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: vectors)
    uncached = row_updates.torch_is_faster.__wrapped__
    monkeypatch.setattr(row_updates, "torch_is_faster", uncached)
    where = {"data_type": DataType.FP32, "is_on_host": True}
    assert row_update(SETTINGS, has_replicas=False, **where) is expected
    assert row_update(SETTINGS, has_replicas=True, **where) is row_wise_adagrad
    adam = {"optimizer": EmbOptimType.ADAM}
    assert row_update(adam, has_replicas=False, **where) is ONLY_HERE[EmbOptimType.ADAM]
