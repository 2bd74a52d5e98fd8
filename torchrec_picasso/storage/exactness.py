"""Optimizer and kernel settings for which hot/cold training is exact, i.e. equals stock TorchRec.

The home rank receives one gradient per row and step, already summed over a rank's lookups. A
setting that depends on gradients before that sum, on counts of lookups, or on random numbers would
silently differ, so it is refused by name: by the sharder, and earlier by the planner, which calls
the same functions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torchrec.distributed.embedding_types import EmbeddingComputeKernel, GroupedEmbeddingConfig
from torchrec.modules.embedding_configs import DataType

from torchrec_picasso._torchrec import EmbOptimType
from torchrec_picasso.errors import CompatError
from torchrec_picasso.storage.row_updates import ONLY_HERE, PARTIAL_ROW_WISE

HOT_COLD_KERNELS = (EmbeddingComputeKernel.FUSED.value, EmbeddingComputeKernel.FUSED_UVM.value)
"""Compute kernels that can hold the rows of a hot/cold table."""

_CPU_OPTIMIZERS = (
    *(EmbOptimType.SGD, EmbOptimType.EXACT_SGD, EmbOptimType.EXACT_ADAGRAD),
    *(EmbOptimType.EXACT_ROWWISE_ADAGRAD, *ONLY_HERE),
)
"""Optimizers with a CPU kernel in FBGEMM 1.8, and optimizers that this package updates."""

_DECAY_MODES = ("L2", "DECOUPLE")
_LOOKUP_COUNTING_DECAY = ("COUNTER", "COWCLIP", "DECOUPLE_GLOBAL")


@dataclass(frozen=True)
class Refusal:
    """The reason why a table cannot be hot/cold, or cannot have hot rows."""

    what: str
    """The setting, and its effect."""
    instead: str
    """The setting to use instead."""
    stock_trains: bool = True
    """Whether stock TorchRec trains such a table."""

    def advice(self, stock: str) -> str:
        """Returns what to do; ``stock`` says how to place the table as a stock TorchRec table."""
        return f"{self.instead}, or {stock}" if self.stock_trains else self.instead


_REFUSED_FLAGS: Mapping[str, Refusal] = {
    "use_virtual_table": Refusal(
        "use_virtual_table makes it a virtual table, which has no fixed rows to be at home",
        "leave the table to TorchRec",
    ),
    "enable_embedding_update": Refusal(
        "enable_embedding_update lets DMP.write change rows at home but not their replicas",
        "leave the flag out and write through the state dict",
    ),
    "stash_weights": Refusal(
        "stash_weights takes the weights off the device, where homes and replicas are read",
        "leave the flag out (kernel fused_uvm keeps homes in host memory)",
    ),
}
"""Flags of a table's configuration that conflict with this package's ownership of its rows."""


def check_exact(
    fused_params: Mapping[str, Any],
    tables: Sequence[str],
    *,
    data_type: DataType,
    device: torch.device,
    num_hot_rows: int,
) -> None:
    """Raises CompatError for settings with which a pack cannot be trained exactly."""
    refusal = why_not_exact(fused_params, data_type=data_type, device_type=device.type)
    if refusal is None and num_hot_rows:
        refusal = why_no_hot_rows(fused_params, data_type=data_type)
    if refusal is not None:
        advice = refusal.advice("place these tables without HotColdParams")
        raise CompatError(
            f"hot/cold tables {', '.join(map(repr, tables))}: {refusal.what}; {advice}"
        )


def check_states(config: GroupedEmbeddingConfig) -> None:
    """Raises CompatError, on all ranks, for state that TorchRec would place wrongly when saved.

    TorchRec treats a state tensor with one element as the state of a whole shard. A partial
    row-wise optimizer has such a tensor if one of several shards of a table has one row.
    """
    if (config.fused_params or {}).get("optimizer") not in PARTIAL_ROW_WISE:
        return
    for table in config.embedding_tables:
        # The global metadata has the shards of all ranks, so all ranks raise.
        metadata = table.global_metadata
        rows = [] if metadata is None else [s.shard_sizes[0] for s in metadata.shards_metadata]
        if len(rows) > 1 and 1 in rows:
            raise CompatError(
                f"hot/cold table {table.name!r}: its shards have {rows} rows, and TorchRec cannot "
                "save the state that partial row-wise optimizers keep of a shard of one row; use "
                "the optimizer that is not partial, or place the table whole with "
                "HotColdParams(form='bags')"
            )


def why_not_exact(
    fused_params: Mapping[str, Any], *, data_type: DataType, device_type: str
) -> Refusal | None:
    """Returns the first reason why tables cannot be hot/cold, even without hot rows, or ``None``.

    ``fused_params`` are TBE arguments of FBGEMM types, ``device_type`` is ``"cpu"`` or ``"cuda"``.
    """
    optimizer = fused_params.get("optimizer", EmbOptimType.EXACT_SGD)
    if device_type == "cpu" and optimizer not in _CPU_OPTIMIZERS:
        return Refusal(
            what=f"the optimizer {optimizer.name} has no CPU kernel in FBGEMM",
            instead=f"on CPU use one of {', '.join(o.name for o in _CPU_OPTIMIZERS)}",
            stock_trains=False,
        )
    if "betas" in fused_params:
        return Refusal(
            "betas is no argument of FBGEMM's optimizers",
            "give torchrec.optim.Adam beta1 and beta2",
        )
    if device_type == "cpu" and (refusal := _why_not_on_cpu(fused_params, data_type)) is not None:
        return refusal
    # The settings below depend on single gradients or on counts of lookups, or they round values.
    if fused_params.get("gradient_clipping"):
        return Refusal(
            "gradient_clipping clips each lookup's gradient before they are summed",
            "clip in the dense part",
        )
    decay = fused_params.get("weight_decay_mode")
    if decay is not None and decay.name in _LOOKUP_COUNTING_DECAY:
        return Refusal(
            f"weight_decay_mode {decay.name} depends on how often a row is looked up",
            "use NONE, L2 or DECOUPLE",
        )
    output = fused_params.get("output_dtype")
    if output is not None and output.as_dtype() != torch.float32:
        return Refusal(f"output_dtype {output} rounds before pooling", "leave output_dtype at FP32")
    if data_type not in (DataType.FP32, DataType.FP16):
        return Refusal(
            f"weights of type {data_type.name} are not supported", "use FP32 or FP16 weights"
        )
    return None


def why_not_its_rows(config: Any) -> Refusal | None:
    """Returns why a table's configuration, of before or after sharding, prevents it from being
    hot/cold, or ``None``."""
    flags = [name for name in _REFUSED_FLAGS if getattr(config, name, False)]
    return _REFUSED_FLAGS[flags[0]] if flags else None


def _why_not_on_cpu(fused_params: Mapping[str, Any], data_type: DataType) -> Refusal | None:
    """Returns why neither FBGEMM nor this package updates exactly on a CPU, or ``None``."""
    optimizer = fused_params.get("optimizer", EmbOptimType.EXACT_SGD)
    decay = fused_params.get("weight_decay_mode")
    if optimizer in ONLY_HERE:
        for name in ("optimizer_state_dtypes", "extra_optimizer_config"):
            if fused_params.get(name) is not None:
                return Refusal(
                    what=f"{name} of {optimizer.name} is for GPUs only", instead=f"leave out {name}"
                )
        if data_type != DataType.FP32:
            return Refusal(
                f"{optimizer.name} on the CPU updates weights of type FP32 only", "use FP32 weights"
            )
    elif (
        optimizer == EmbOptimType.EXACT_ROWWISE_ADAGRAD
        and data_type == DataType.FP32
        and decay is not None
        and decay.name in _DECAY_MODES
    ):
        return Refusal(
            what=f"FBGEMM's CPU kernels ignore weight_decay_mode {decay.name} for FP32 bags of one "
            "feature, and for no others",
            instead="leave out weight_decay_mode",
        )
    return None


def why_no_hot_rows(fused_params: Mapping[str, Any], *, data_type: DataType) -> Refusal | None:
    """Returns why tables with these settings can be hot/cold only without hot rows, or ``None``."""
    # Each rank rounds its replica with its own random numbers.
    if data_type == DataType.FP16 and fused_params.get("stochastic_rounding", True):
        return Refusal(
            "stochastic rounding would give every replica another value",
            "set fused_params['stochastic_rounding'] = False",
        )
    return None


def is_updated_only_here(fused_params: Mapping[str, Any], *, device_type: str) -> bool:
    """Whether FBGEMM has no kernel for these settings, so tables must be hot/cold to be trained."""
    return device_type == "cpu" and fused_params.get("optimizer") in ONLY_HERE


def why_no_memory(kernel: str, dim: int) -> Refusal | None:
    """Returns why rows of ``dim`` columns cannot be home rows and replicas, or ``None``."""
    if kernel not in HOT_COLD_KERNELS:
        kernels = ", ".join(map(repr, HOT_COLD_KERNELS))
        return Refusal(what=f"has compute kernel {kernel!r}", instead=f"use one of {kernels}")
    if dim % 4:
        return Refusal(what=f"has embedding_dim {dim}", instead="FBGEMM needs a multiple of 4")
    return None
