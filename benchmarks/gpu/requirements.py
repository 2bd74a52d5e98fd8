"""Whether this machine can run the check, by name of what it lacks; and what it is.

The one place that knows of differences between releases of TorchRec, FBGEMM and PyTorch.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.cuda import nccl

from torchrec_picasso.app.launch.environment import describe_environment

_AN_OPERATOR = "fbgemm::permute_1D_sparse_data"  # every build has it, CUDA builds for CUDA too


def missing_piece() -> str | None:
    """First requirement that this machine does not meet, or ``None``."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    if not dist.is_nccl_available():
        return "no NCCL in this build of PyTorch"
    try:
        import fbgemm_gpu  # noqa: F401  (registers its operators)
    except (ImportError, OSError) as error:
        return f"no fbgemm_gpu ({error})"
    if not _has_cuda_kernel(_AN_OPERATOR):
        return "no CUDA kernels in this fbgemm_gpu; install fbgemm-gpu instead of fbgemm-gpu-cpu"
    return None


def _has_cuda_kernel(operator: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(operator, "CUDA")


def describe_machine(device: str) -> dict[str, str | int]:
    """The environment of :func:`describe_environment`, and the GPU."""
    facts = describe_environment()
    if device == "cuda":
        gpu = torch.cuda.get_device_properties(0)
        facts["gpu"] = gpu.name
        facts["gpu_memory_bytes"] = gpu.total_memory
        facts["gpu_compute_capability"] = f"{gpu.major}.{gpu.minor}"
        facts["cuda"] = str(torch.version.cuda)
        facts["nccl"] = ".".join(map(str, nccl.version()))
    return facts
