"""Names of the models, without importing torch."""

from __future__ import annotations

import pkgutil

from torchrec_picasso.app.zoo import models

DLRM = "dlrm"
"""TorchRec's own model, which is no file of ``zoo/models``."""


def model_kinds() -> list[str]:
    """Names of all models, sorted."""
    return sorted([DLRM, *(module.name for module in pkgutil.iter_modules(models.__path__))])
