"""Tables of any model, and the published sizes of Criteo's tables."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from torchrec.modules.embedding_configs import BaseEmbeddingConfig

from torchrec_picasso.app.config import DataConfig
from torchrec_picasso.frequency.collect import table_configs

NUM_DENSE = 13
"""Dense features of a Criteo sample."""

# Rows per categorical column, as published:
# - criteo_kaggle: hpcaitech/CachedEmbedding recsys/datasets/criteo.py and facebookresearch/dlrm
#   tools/visualize.py (Criteo Display Advertising Challenge).
# - criteo_terabyte_10m: facebookresearch/dlrm tools/visualize.py (ids taken modulo 10,000,000).
# - criteo_terabyte_40m: NVIDIA-Merlin/HugeCTR SOK_DLRM_Benchmark/README.md and
#   facebookresearch/dlrm tools/visualize.py (modulo 40,000,000; the table sizes of MLPerf DLRM v1).
# fmt: off
CARDINALITIES: dict[str, tuple[int, ...]] = {
    "criteo_kaggle": (
        1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194,
        27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572,
    ),
    "criteo_terabyte_10m": (
        9980333, 36084, 17217, 7378, 20134, 3, 7112, 1442, 61, 9758201, 1333352, 313829, 10,
        2208, 11156, 122, 4, 970, 14, 9994222, 7267859, 9946608, 415421, 12420, 101, 36,
    ),
    "criteo_terabyte_40m": (
        39884406, 39043, 17289, 7420, 20263, 3, 7120, 1543, 63, 38532951, 2953546, 403346, 10,
        2208, 11938, 155, 4, 976, 14, 39979771, 25641295, 39664984, 585935, 12972, 108, 36,
    ),
}
# fmt: on


def tables_of(model: nn.Module) -> list[BaseEmbeddingConfig]:
    """The tables of all embedding collections of an unsharded model, module by module."""
    return [config for _, config in table_configs(model)]


@dataclass(frozen=True, kw_only=True)
class TableSpec:
    """A table with one feature, such as table ``t_c1`` of feature ``c1``."""

    name: str
    feature: str
    num_embeddings: int


def table_specs(data: DataConfig) -> tuple[TableSpec, ...]:
    """Criteo's tables: published sizes, scaled by ``row_scale``, capped at ``max_rows``.

    More than 26 tables repeat the published sizes from the first.
    """
    published = CARDINALITIES[data.cardinalities]
    return tuple(
        TableSpec(
            name=f"t_c{index + 1}",
            feature=f"c{index + 1}",
            num_embeddings=_scaled(published[index % len(published)], data),
        )
        for index in range(data.num_tables)
    )


def _scaled(num_rows: int, data: DataConfig) -> int:
    return min(data.max_rows, max(1, round(num_rows * data.row_scale)))
