"""What curves were measured on: a few words for the reader of the file."""

from __future__ import annotations

import datetime
import os
import platform
from pathlib import Path

import torch

__all__ = ["cpu_name", "describe_hardware"]


def describe_hardware(device: torch.device) -> dict[str, str | int]:
    """Date (UTC), processor or accelerator, and torch's version."""
    return {
        "date_utc": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "hardware": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name(),
        "num_cpus": os.cpu_count() or 0,
        "torch": torch.__version__,
    }


def cpu_name() -> str:
    """The processor's model, as the operating system names it."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"
