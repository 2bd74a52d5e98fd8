"""The allocator of host memory, versions and hardware, saved with every measurement."""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from torchrec_picasso.version import __version__

KEEPS_FREED_MEMORY = {
    "MALLOC_TRIM_THRESHOLD_": str(2**30),
    "MALLOC_MMAP_THRESHOLD_": str(2**30),
}
"""Variables of glibc, read when a process starts: freed memory stays with the process. By default
large blocks are mapped, and filled with zeros, again in each step."""

_VECTORS = {"avx512f": "AVX-512", "avx2": "AVX2", "sve": "SVE", "asimd": "NEON"}
"""Instructions on vectors by Linux's names, the widest first: kernels are other ones, and a name of
a processor may not tell."""
_PACKAGES = ("torch", "torchrec", "fbgemm-gpu-cpu", "fbgemm-gpu", "numpy", "pyarrow")


def describe_environment() -> dict[str, str | int]:
    """Versions, hardware and date (UTC) of this process."""
    core = _core_facts()
    environment: dict[str, str | int] = {
        "date_utc": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "torchrec-picasso": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": core.get("model name") or platform.processor() or "unknown",
        "vectors": _vectors(core),
        "num_cpus": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count() or 0,
        "allocator": _allocator(),
    }
    for name in _PACKAGES:
        try:
            environment[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return environment


def other_hardware(measured_on: Mapping[str, str | int]) -> str | None:
    """Differences of processor, cores and allocator from those of measured curves, if any.

    Args:
        measured_on: Result of :func:`describe_environment` there; may be empty.
    """
    here = describe_environment()
    compared = ("cpu", "vectors", "num_cpus", "allocator")
    there = {name: measured_on.get(name, here[name]) for name in compared}
    differ = [
        f"{name} {there[name]}, here {here[name]}" for name in there if there[name] != here[name]
    ]
    return "; ".join(differ) or None


def _allocator() -> str:
    """Settings of the allocator of host memory: those of glibc, and libraries loaded before it."""
    found = [
        f"{name}={value}"
        for name, value in sorted(os.environ.items())
        if name.startswith("MALLOC_") or name == "GLIBC_TUNABLES"
    ]
    preloaded = os.environ.get("LD_PRELOAD", "").replace(":", " ").split()
    return " ".join([*found, *(Path(each).name for each in preloaded)]) or "defaults"


def _vectors(core: Mapping[str, str]) -> str:
    names = (core.get("flags") or core.get("Features") or "").split()
    return next((said for name, said in _VECTORS.items() if name in names), "unknown")


def _core_facts() -> dict[str, str]:
    """Linux's facts of a core; none elsewhere."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    pairs = (line.partition(":") for line in lines)
    return {name.strip(): fact.strip() for name, _, fact in pairs}
