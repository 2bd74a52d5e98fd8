"""Whether torchrun has started this process; imports nothing else."""

from __future__ import annotations

import os


def under_torchrun() -> bool:
    """Whether this process is a rank of torchrun."""
    return "RANK" in os.environ
