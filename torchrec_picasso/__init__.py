"""Hot/cold embedding rows and packed exchanges for TorchRec: exact, measured, plain.

A plug-in after PICASSO (Zhang et al., ICDE 2022, arXiv 2204.04903).
"""

from torchrec_picasso.compat import check_installed

check_installed()  # before anything imports torch, whose own message would help nobody

from torchrec_picasso.config.refresh import Refresh
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
from torchrec_picasso.sharding.hot_row_refresher import HotRowRefresher
from torchrec_picasso.sharding.plain_state import export_plain
from torchrec_picasso.sharding.processed_sharder import (
    HotColdFeatureProcessedEmbeddingBagCollectionSharder,
)
from torchrec_picasso.sharding.sharder import (
    HotColdEmbeddingBagCollectionSharder,
    HotColdEmbeddingCollectionSharder,
)
from torchrec_picasso.train_pipeline.interleaved import InterleavedTrainPipeline
from torchrec_picasso.train_pipeline.step_report import StepReport, StepReports
from torchrec_picasso.train_pipeline.tensorboard_reports import TensorBoardReports
from torchrec_picasso.version import __version__

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
    "export_plain",
    "hot_cold_planner",
]
