"""Names of the models that a configuration can ask for."""

from __future__ import annotations

import pkgutil

from torchrec_picasso.app.zoo import models

__all__ = ["DLRM", "model_kinds"]

DLRM = "dlrm"
"""TorchRec's own, which is none of the files in ``zoo/models``."""


def model_kinds() -> list[str]:
    """Names of all models, sorted."""
    return sorted([DLRM, *(module.name for module in pkgutil.iter_modules(models.__path__))])
