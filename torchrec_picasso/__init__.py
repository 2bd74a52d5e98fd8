"""Hot/cold embedding rows and packed exchanges for TorchRec.

A plug-in after PICASSO (Zhang et al., ICDE 2022, arXiv 2204.04903). Public names are imported on
first use, so that ``torchrec-picasso --help`` does not import PyTorch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from torchrec_picasso.compat import check_installed
from torchrec_picasso.version import __version__

check_installed()  # before torch is imported, because its own error message names no version

if TYPE_CHECKING:
    from torchrec_picasso.app.runs.tensorboard_reports import TensorBoardReports
    from torchrec_picasso.cost.curves import CommCurves
    from torchrec_picasso.errors import (
        CompatError,
        ConfigError,
        InputError,
        PeerError,
        PicassoError,
        PlanError,
    )
    from torchrec_picasso.frequency.stats import FrequencyStats
    from torchrec_picasso.placement import HotColdParams
    from torchrec_picasso.planner.planner import hot_cold_planner
    from torchrec_picasso.rows.refresh_policy import Refresh
    from torchrec_picasso.sharding.sharded_module import HotRowRefresher
    from torchrec_picasso.sharding.sharder import (
        HotColdEmbeddingBagCollectionSharder,
        HotColdEmbeddingCollectionSharder,
        HotColdFeatureProcessedEmbeddingBagCollectionSharder,
    )
    from torchrec_picasso.train_pipeline.interleaved import InterleavedTrainPipeline
    from torchrec_picasso.train_pipeline.step_report import StepReport, StepReports

MODULES = {
    "CommCurves": "cost.curves",
    "CompatError": "errors",
    "ConfigError": "errors",
    "FrequencyStats": "frequency.stats",
    "HotColdEmbeddingBagCollectionSharder": "sharding.sharder",
    "HotColdEmbeddingCollectionSharder": "sharding.sharder",
    "HotColdFeatureProcessedEmbeddingBagCollectionSharder": "sharding.sharder",
    "HotColdParams": "placement",
    "HotRowRefresher": "sharding.sharded_module",
    "InputError": "errors",
    "InterleavedTrainPipeline": "train_pipeline.interleaved",
    "PeerError": "errors",
    "PicassoError": "errors",
    "PlanError": "errors",
    "Refresh": "rows.refresh_policy",
    "StepReport": "train_pipeline.step_report",
    "StepReports": "train_pipeline.step_report",
    "TensorBoardReports": "app.runs.tensorboard_reports",
    "hot_cold_planner": "planner.planner",
}
"""Module that defines each public name."""

__all__ = [
    "CommCurves",
    "CompatError",
    "ConfigError",
    "FrequencyStats",
    "HotColdEmbeddingBagCollectionSharder",
    "HotColdEmbeddingCollectionSharder",
    "HotColdFeatureProcessedEmbeddingBagCollectionSharder",
    "HotColdParams",
    "HotRowRefresher",
    "InputError",
    "InterleavedTrainPipeline",
    "PeerError",
    "PicassoError",
    "PlanError",
    "Refresh",
    "StepReport",
    "StepReports",
    "TensorBoardReports",
    "__version__",
    "hot_cold_planner",
]


def __getattr__(name: str) -> Any:
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
