"""Tables in host memory: hot rows in device memory against TorchRec's own cache there.

Homes of ``fused_uvm`` are in managed memory and replicas in the GPU's: lookups of hot rows and
their updates cross no bus. Stock ``fused_uvm_caching`` keeps rows there that were used lately, a
hot set those that are frequent; both get device memory for the same number of rows. Hot/cold
without hot rows and stock ``fused_uvm`` show what either gains, ``fused`` what is left to gain.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.types import CacheParams, EmbeddingModuleShardingPlan, ShardingPlan

from benchmarks.gpu.clock import take_turns
from benchmarks.gpu.one_rank import one_rank
from benchmarks.gpu.report import PartReport, timings
from benchmarks.gpu.settings import GpuSettings, ModelSize
from benchmarks.gpu.variants import Variant, Workload, held_hbm_bytes
from torchrec_picasso.app.launch.quiet import quiet_upstream

_WARMUP_STEPS = 5
_FLOAT_BYTES = 4
_MB = 1e6


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """Where a variant's tables are.

    Args:
        kernel: TorchRec's compute kernel.
        load_factor: Share of a table's rows that its cache holds; ``None`` = no cache.
        hot_rows: Hot rows of a hot/cold placement; ``None`` = stock table-wise.
    """

    kernel: EmbeddingComputeKernel
    load_factor: float | None = None
    hot_rows: int | None = None


def change_kernel(wanted: Kernel) -> Callable[[ShardingPlan], None]:
    """A change of plan that gives every table the kernel.

    Returns:
        For ``Trainer``'s ``change_plan``. It leaves hot/cold marks as they are.
    """

    def change(plan: ShardingPlan) -> None:
        for module_plan in plan.plan.values():
            assert isinstance(module_plan, EmbeddingModuleShardingPlan)
            for sharding in module_plan.values():
                sharding.compute_kernel = wanted.kernel.value
                if wanted.load_factor is not None:
                    sharding.cache_params = CacheParams(load_factor=wanted.load_factor)

    return change


def kernels(size: ModelSize, num_rows: int, device: torch.device) -> dict[str, Kernel]:
    """The variants, the one to compare with first."""
    in_uvm, hot = EmbeddingComputeKernel.FUSED_UVM, size.hot_rows
    stock = {
        "fused_uvm_caching": Kernel(
            kernel=EmbeddingComputeKernel.FUSED_UVM_CACHING, load_factor=hot / num_rows
        ),
        "fused_uvm": Kernel(kernel=in_uvm),
    }
    return {
        **(stock if device.type == "cuda" else {}),
        "fused, no UVM": Kernel(kernel=EmbeddingComputeKernel.FUSED),
        "hot_cold:0 fused_uvm": Kernel(kernel=in_uvm, hot_rows=0),
        f"hot_cold:{hot} fused_uvm": Kernel(kernel=in_uvm, hot_rows=hot),
    }


def uvm(rank: int, world_size: int, settings: GpuSettings) -> PartReport:
    """Runs the part; the main function of its only rank."""
    quiet_upstream()
    size = settings.uvm
    with one_rank(settings.device) as device:
        work = Workload.make(size, settings.num_batches, device)
        num_rows = sum(table.num_embeddings for table in work.source.tables)
        variants, hbm_bytes = {}, {}
        for name, wanted in kernels(size, num_rows, device).items():
            before_bytes = held_hbm_bytes(device)
            trainer = work.trainer(device, wanted.hot_rows, change_plan=change_kernel(wanted))
            hbm_bytes[name] = held_hbm_bytes(device) - before_bytes
            variants[name] = Variant(trainer, work.batches)
            variants[name].train(_WARMUP_STEPS)
        step_ms = take_turns(variants, settings.rounds, settings.block_steps, device)
    reference = next(iter(variants))
    found = timings(step_ms, reference)
    rows = [
        {
            "variant": name,
            "step ms": f"{timing.median_ms:.2f}",
            "quartiles": f"{timing.low_ms:.2f} to {timing.high_ms:.2f}",
            f"x {reference}": f"{timing.ratio:.2f}",
            "by round": f"{timing.ratio_range[0]:.2f} to {timing.ratio_range[1]:.2f}",
            "HBM MB": f"{hbm_bytes[name] / _MB:.0f}" if device.type == "cuda" else "-",
        }
        for name, timing in found.items()
    ]
    in_hbm = replicas_are_in_hbm(list(hbm_bytes.values()), size)
    return PartReport(
        name="uvm: hot rows in device memory against a cache there, for tables in host memory",
        rows=rows,
        notes=[f"{num_rows} rows in 26 tables, device memory for {size.hot_rows} of them"],
        problems=placement_problems(device, in_hbm),
        facts={
            "timings": {name: asdict(timing) for name, timing in found.items()},
            "step_ms": step_ms,
            "hbm_bytes": hbm_bytes,
            "replicas_in_hbm": in_hbm,
        },
    )


def replicas_are_in_hbm(hbm_bytes: list[int], size: ModelSize) -> bool:
    """Whether hot/cold with hot rows holds more device memory than without, by their bytes."""
    without, with_hot = hbm_bytes[-2:]
    return with_hot - without >= 0.9 * size.hot_rows * size.dim * _FLOAT_BYTES


def placement_problems(device: torch.device, in_hbm: bool) -> list[str]:
    """Failed checks of the replicas' memory; none on the CPU."""
    if device.type != "cuda" or in_hbm:
        return []
    return ["device memory did not grow by the replicas, so they are in host memory"]
