"""Describes the hardware of a measurement."""

from __future__ import annotations

import datetime
import os
import platform
from pathlib import Path

import torch

__all__ = ["describe_hardware"]


def describe_hardware(device: torch.device) -> dict[str, str | int]:
    """Returns the date (UTC), the processor or accelerator, and the version of torch."""
    return {
        "date_utc": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "hardware": torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name(),
        "num_cpus": os.cpu_count() or 0,
        "torch": torch.__version__,
    }


def _cpu_name() -> str:
    """Returns the processor model that the operating system reports."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"
