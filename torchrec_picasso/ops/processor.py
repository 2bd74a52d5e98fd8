"""What differs between processors, so that operators can choose the faster of two equal ways."""

from __future__ import annotations

from functools import cache
from pathlib import Path

__all__ = ["is_intel"]


@cache
def is_intel() -> bool:
    """Whether the processor is one of Intel's; ``False`` where the system does not say.

    There numpy's sorts run on AVX-512 and outrun torch's, and FBGEMM's row-wise Adagrad mixes SSE
    with AVX instructions, which stalls. On AMD's processors torch and FBGEMM are faster, or as fast
    from D=128 on (docs/decisions/cpu_updates.md).
    """
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.is_file() and "GenuineIntel" in cpuinfo.read_text()
