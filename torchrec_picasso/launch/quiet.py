"""Silences what TorchRec and PyTorch say about themselves, so that a run's own lines can be read.

Only for processes that this package starts as a program; a library caller keeps every warning.
"""

from __future__ import annotations

import logging
import warnings

__all__ = ["quiet_upstream"]

_NOISY_LOGGERS = ("torchrec", "torch.distributed", "torch.fx", "fbgemm_gpu")


def quiet_upstream() -> None:
    """Lets only errors of TorchRec, FBGEMM and PyTorch through, in this process."""
    for name in _NOISY_LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    for category in (FutureWarning, DeprecationWarning, UserWarning):
        warnings.filterwarnings(
            "ignore", category=category, module=r"(torch|torchrec|fbgemm_gpu)\b.*"
        )
