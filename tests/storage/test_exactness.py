"""Every setting that would silently differ from stock TorchRec is refused by name.

Weight decay: which rows FBGEMM's CPU kernels decay, hence why a mode is refused for FP32 rows, and
only those. The kernel of a table with one feature is told a decay of 0; those for more features,
for sequences and for FP16 are told the user's. A weight_decay without a mode decays nothing.
"""

from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
    WeightDecayMode,
)
from torch import Tensor
from torchrec.modules.embedding_configs import DataType

from tests.storage.test_row_tables import config_of
from torchrec_picasso import CompatError
from torchrec_picasso.storage.exactness import check_exact
from torchrec_picasso.storage.row_tables import RowTables, choose_memory
from torchrec_picasso.storage.row_updates import ONLY_HERE

ADAM = {"optimizer": EmbOptimType.ADAM}
PARTIAL_ADAM = {"optimizer": EmbOptimType.PARTIAL_ROWWISE_ADAM}
ADAGRAD = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD}
HALF = {"data_type": DataType.FP16, "stochastic_rounding": False}
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def _check(device: torch.device = CPU, **settings: Any) -> None:
    data_type = settings.pop("data_type", DataType.FP32)
    num_hot_rows = settings.pop("num_hot_rows", 1)
    check_exact(settings, ["t"], data_type=data_type, device=device, num_hot_rows=num_hot_rows)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"optimizer": EmbOptimType.LARS_SGD}, "the optimizer LARS_SGD has no CPU kernel"),
        (ADAM | {"data_type": DataType.FP16}, "ADAM on the CPU updates weights of type FP32 only"),
        (ADAM | {"extra_optimizer_config": object()}, "extra_optimizer_config of ADAM is for GPUs"),
        (PARTIAL_ADAM | {"optimizer_state_dtypes": {}}, "optimizer_state_dtypes of PARTIAL_ROW"),
        (ADAM | {"betas": (0.9, 0.9)}, "betas is no argument of FBGEMM's optimizers; .* beta1 and"),
        (ADAGRAD | {"weight_decay_mode": WeightDecayMode.L2}, "weight_decay_mode L2 for FP32 bags"),
        (ADAGRAD | {"weight_decay_mode": WeightDecayMode.DECOUPLE}, "weight_decay_mode DECOUPLE"),
        ({"gradient_clipping": True}, "gradient_clipping clips each lookup's gradient"),
        ({"weight_decay_mode": WeightDecayMode.COUNTER}, "weight_decay_mode COUNTER"),
        ({"weight_decay_mode": WeightDecayMode.COWCLIP}, "weight_decay_mode COWCLIP"),
        ({"output_dtype": SparseType.FP16}, "rounds before pooling"),
        ({"data_type": DataType.INT8}, "weights of type INT8"),
        ({"data_type": DataType.FP16}, "stochastic rounding would give every replica another"),
    ],
)
def test_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(CompatError, match=message) as caught:
        _check(**settings)
    found = str(caught.value)
    assert found.startswith("hot/cold tables 't': ")
    # TorchRec has no CPU kernel for these optimizers either
    assert ("without HotColdParams" in found) == ("no CPU kernel" not in message)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"optimizer": EmbOptimType.EXACT_SGD},
        {"optimizer": EmbOptimType.EXACT_ADAGRAD},
        {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD},
        *({"optimizer": optimizer} for optimizer in ONLY_HERE),
        {"optimizer": EmbOptimType.LARS_SGD, "device": CUDA},
        ADAM | {"data_type": DataType.FP16, "num_hot_rows": 0, "device": CUDA},
        ADAM | {"weight_decay": 0.1, "weight_decay_mode": WeightDecayMode.L2},
        ADAGRAD | {"weight_decay_mode": WeightDecayMode.L2, "device": CUDA},
        ADAGRAD | {"weight_decay_mode": WeightDecayMode.L2, **HALF},
        ADAGRAD | {"weight_decay": 0.1},
        {"weight_decay_mode": WeightDecayMode.L2},
        {"output_dtype": SparseType.FP32},
        {"data_type": DataType.FP16, "num_hot_rows": 0},
        {"data_type": DataType.FP16, "stochastic_rounding": False},
    ],
)
def test_allowed(settings: dict[str, Any]) -> None:
    _check(**settings)


ROWS, DIM, LOOKUPS = 12, 8, 5
MODES = (WeightDecayMode.L2, WeightDecayMode.DECOUPLE)


def _settings(mode: WeightDecayMode, weight_decay: float) -> dict[str, Any]:
    return {
        "optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        "learning_rate": 0.1,
        "stochastic_rounding": False,
        "weight_decay": weight_decay,
        "weight_decay_mode": mode,
    }


def _start(dtype: torch.dtype) -> Tensor:
    return torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(0)).to(dtype)


def _by_fbgemm(
    mode: WeightDecayMode,
    weight_decay: float,
    num_features: int = 1,
    precision: SparseType = SparseType.FP32,
    pooling: PoolingMode = PoolingMode.SUM,
) -> Tensor:
    """Weights after two steps of stock FBGEMM, each of lookups 0 to 4 by every feature."""
    tbe = SplitTableBatchedEmbeddingBagsCodegen(
        [(ROWS, DIM, EmbeddingLocation.HOST, ComputeDevice.CPU)],
        feature_table_map=[0] * num_features,
        pooling_mode=pooling,
        weights_precision=precision,
        device=CPU,
        **_settings(mode, weight_decay),
    )
    (weights,) = tbe.split_embedding_weights()
    weights.copy_(_start(weights.dtype))
    rows = torch.arange(LOOKUPS).repeat(num_features)
    for _ in range(2):
        tbe(rows, torch.arange(len(rows) + 1)).float().sum().backward()
    return weights.float()


def _by_ours(mode: WeightDecayMode, weight_decay: float) -> Tensor:
    config = config_of((ROWS,), dim=DIM)
    config.data_type, config.fused_params = DataType.FP16, _settings(mode, weight_decay)
    tables = RowTables(config, choose_memory(config, CPU, 0), CPU)
    tables.weights.homes.copy_(_start(torch.float16))
    for _ in range(2):
        tables.update(torch.arange(LOOKUPS), torch.arange(0), torch.ones(LOOKUPS, DIM))
    return tables.weights.homes.float()


DECAYED: dict[str, dict[str, Any]] = {
    "two features": {"num_features": 2},
    "sequences": {"pooling": PoolingMode.NONE},
    "fp16": {"precision": SparseType.FP16},
}


@pytest.mark.parametrize("mode", MODES)
def test_fbgemm_decays_rows_but_not_those_of_one_feature(mode: WeightDecayMode) -> None:
    assert torch.equal(_by_fbgemm(mode, 0.5), _by_fbgemm(mode, 0.0))
    for how in DECAYED.values():
        decayed, kept = _by_fbgemm(mode, 0.5, **how), _by_fbgemm(mode, 0.0, **how)
        assert (decayed - kept)[:LOOKUPS].abs().max() > 0.05
        assert torch.equal(decayed[LOOKUPS:], kept[LOOKUPS:])


@pytest.mark.parametrize("how", DECAYED.values(), ids=list(DECAYED))
def test_without_a_mode_nothing_decays(how: dict[str, Any]) -> None:
    none = WeightDecayMode.NONE
    assert torch.equal(_by_fbgemm(none, 0.5, **how), _by_fbgemm(none, 0.0, **how))


@pytest.mark.parametrize("mode", MODES)
def test_fp16_rows_decay_as_in_fbgemm(mode: WeightDecayMode) -> None:
    decayed = _by_ours(mode, 0.5)
    assert torch.equal(decayed, _by_fbgemm(mode, 0.5, precision=SparseType.FP16))
    assert not torch.equal(decayed, _by_ours(mode, 0.0))
