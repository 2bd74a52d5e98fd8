"""Which optimizer and kernel settings train through homes and replicas as in stock TorchRec.

The home receives one gradient per row and step, already summed over a rank's lookups. Settings
that look at gradients before that sum, at counts of lookups, or at random numbers would silently
differ, so they are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torchrec.modules.embedding_configs import DataType

from torchrec_picasso._torchrec import EmbOptimType
from torchrec_picasso.errors import CompatError

__all__ = ["check_exact"]

_CPU_OPTIMIZERS = (
    EmbOptimType.SGD,
    EmbOptimType.EXACT_SGD,
    EmbOptimType.EXACT_ADAGRAD,
    EmbOptimType.EXACT_ROWWISE_ADAGRAD,
)
"""Optimizers with a CPU kernel in FBGEMM 1.8; the others raise in backward."""

_LOOKUP_COUNTING_DECAY = ("COUNTER", "COWCLIP", "DECOUPLE_GLOBAL")


def check_exact(
    fused_params: Mapping[str, Any],
    tables: Sequence[str],
    *,
    data_type: DataType,
    device: torch.device,
    num_hot_rows: int,
) -> None:
    """Refuses what cannot be trained exactly.

    Args:
        fused_params: TBE arguments of one pack, FBGEMM types.
        tables: Names of its tables, for the message.
        data_type: Type of the weights.
        device: Where the tables are.
        num_hot_rows: Replicated rows of the pack.

    Raises:
        CompatError: Naming the tables, the setting and what to use instead.
    """

    def refuse(what: str, instead: str) -> None:
        raise CompatError(
            f"hot/cold tables {', '.join(map(repr, tables))}: {what}; {instead}, or place these "
            "tables without HotColdParams"
        )

    optimizer = fused_params.get("optimizer", EmbOptimType.EXACT_SGD)
    if device.type == "cpu" and optimizer not in _CPU_OPTIMIZERS:
        refuse(
            f"the optimizer {optimizer.name} has no CPU kernel in FBGEMM",
            f"on CPU use one of {', '.join(o.name for o in _CPU_OPTIMIZERS)}",
        )
    if fused_params.get("gradient_clipping"):
        refuse(
            "gradient_clipping clips each lookup's gradient before they are summed",
            "clip in the dense part",
        )
    decay = fused_params.get("weight_decay_mode")
    if decay is not None and decay.name in _LOOKUP_COUNTING_DECAY:
        refuse(
            f"weight_decay_mode {decay.name} depends on how often a row is looked up",
            "use NONE, L2 or DECOUPLE",
        )
    output = fused_params.get("output_dtype")
    if output is not None and output.as_dtype() != torch.float32:
        refuse(f"output_dtype {output} rounds before pooling", "leave output_dtype at FP32")
    if data_type not in (DataType.FP32, DataType.FP16):
        refuse(f"weights of type {data_type.name} are not supported", "use FP32 or FP16 weights")
    rounds_at_random = data_type == DataType.FP16 and fused_params.get("stochastic_rounding", True)
    if rounds_at_random and num_hot_rows:
        refuse(
            "stochastic rounding would give every replica another value",
            "set fused_params['stochastic_rounding'] = False",
        )
