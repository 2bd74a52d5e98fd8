"""Silences warnings of TorchRec and PyTorch in programs of this package, not in library use."""

from __future__ import annotations

import logging
import os
import warnings

_NOISY_LOGGERS = ("torchrec", "torch.distributed", "torch.fx", "fbgemm_gpu")
_PROFILER_LOG_LEVEL = "KINETO_LOG_LEVEL"  # the profiler does not use logging


def quiet_upstream() -> None:
    """Shows only errors of TorchRec, FBGEMM and PyTorch, and nothing of a profiler not yet used."""
    os.environ.setdefault(_PROFILER_LOG_LEVEL, "99")
    for name in _NOISY_LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    for category in (FutureWarning, DeprecationWarning, UserWarning):
        warnings.filterwarnings(
            "ignore", category=category, module=r"(torch|torchrec|fbgemm_gpu)\b.*"
        )
