"""Every setting that would silently differ from stock TorchRec is refused by name."""

from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import WeightDecayMode
from torchrec.modules.embedding_configs import DataType

from torchrec_picasso import CompatError
from torchrec_picasso.storage.exactness import check_exact
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
    told = str(caught.value)
    assert told.startswith("hot/cold tables 't': ")
    # TorchRec has no CPU kernel for these optimizers either
    assert ("without HotColdParams" in told) == ("no CPU kernel" not in message)


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
