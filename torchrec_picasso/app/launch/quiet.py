"""Silences what TorchRec and PyTorch say about themselves, so that a run's own lines can be read.

Only for processes that this package starts as a program; a library caller keeps every warning.
"""

from __future__ import annotations

import logging
import os
import warnings

__all__ = ["quiet_upstream"]

_NOISY_LOGGERS = ("torchrec", "torch.distributed", "torch.fx", "fbgemm_gpu")
_PROFILER_LOG_LEVEL = "KINETO_LOG_LEVEL"  # the profiler writes its lines itself, and asks only here
_ABOVE_ALL = "99"


def quiet_upstream() -> None:
    """Lets only errors of TorchRec, FBGEMM and PyTorch through, in this process.

    PyTorch's profiler is silenced whole, if it has not run here before.
    """
    os.environ.setdefault(_PROFILER_LOG_LEVEL, _ABOVE_ALL)
    for name in _NOISY_LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    for category in (FutureWarning, DeprecationWarning, UserWarning):
        warnings.filterwarnings(
            "ignore", category=category, module=r"(torch|torchrec|fbgemm_gpu)\b.*"
        )
