"""Workload of each model: published sizes, and batches that two cores can take in seconds.

Where a folder of real data is given, models of fields read Criteo's samples and models of histories
Alimama's rows; MMoE needs two labels and DHEN many fields, which only generated samples have.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from torchrec_picasso.app.config import DataConfig, FeatureConfig, ModelConfig, TrainConfig
from torchrec_picasso.app.zoo.model_kinds import data_kind
from torchrec_picasso.errors import InputError

_CRITEO, _ALIMAMA = "criteo_tb_80k.parquet", "alimama_10k.parquet"
_MOST_ROWS = 200_000
_GENERATED_ROW_SCALE = 0.02
_COUNTED_STEPS = 8
"""Global batches that lookups are counted in."""


STOCK = ("table_wise", "planner")
_EVERY_STOCK = (
    *("table_wise", "row_wise", "column_wise", "planner"),
    *("table_wise_loop", "row_wise_loop", "column_wise_loop"),
)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A line of the scoreboard.

    Args:
        model: Kind and sizes; those left out are the published ones.
        batch_size: Samples per rank and step.
        features: Dims that differ.
        max_history: Longest history.
        num_tasks: Labels.
        num_fields: Generated fields of any skew and number of ids; ``None`` = Criteo's columns.
        stock: Variants of stock TorchRec.
        ours: Variants of this package.
    """

    model: ModelConfig
    batch_size: int
    features: dict[str, FeatureConfig] | None = None
    max_history: int = 50
    num_tasks: int = 1
    num_fields: int | None = None
    stock: tuple[str, ...] = STOCK
    ours: tuple[str, ...] = ("ours",)

    @property
    def data_kind(self) -> str:
        """One of :data:`torchrec_picasso.app.config.DATA_KINDS`."""
        if self.num_fields is not None:
            return "fields"
        return data_kind(self.model.kind)

    @property
    def real_file(self) -> str | None:
        """Where real samples are; ``None`` = there are none."""
        if self.num_fields is not None or self.num_tasks > 1:
            return None
        return _ALIMAMA if self.data_kind == "clicks" else _CRITEO


_PROFILE = {"profile": FeatureConfig(dim=16)}

_LONG = Entry(
    model=ModelConfig(kind="hstu", embedding_dim=256),
    batch_size=32,
    max_history=256,
    num_tasks=2,
    stock=_EVERY_STOCK,
)

FIELDS = {"fields_40": (40, 1024), "fields_130": (130, 2048), "fields_460": (460, 2048)}
"""The sweep over generated fields of :mod:`benchmarks.fields`: how many, and samples per rank."""

ENTRIES = {
    "wide_deep": Entry(model=ModelConfig(kind="wide_deep", embedding_dim=32), batch_size=2048),
    "dlrm": Entry(
        model=ModelConfig(embedding_dim=128, dense_layers=(512, 256), over_layers=(512, 512, 256)),
        batch_size=2048,
    ),
    "deepfm": Entry(model=ModelConfig(kind="deepfm", embedding_dim=12), batch_size=2048),
    "din": Entry(
        model=ModelConfig(kind="din", embedding_dim=64), batch_size=2048, features=_PROFILE
    ),
    "dien": Entry(
        model=ModelConfig(kind="dien", embedding_dim=64), batch_size=1024, features=_PROFILE
    ),
    "mmoe": Entry(model=ModelConfig(kind="mmoe", embedding_dim=16), batch_size=2048, num_tasks=2),
    "can": Entry(model=ModelConfig(kind="can", embedding_dim=16), batch_size=1024),
    "wukong": Entry(model=ModelConfig(kind="wukong", embedding_dim=128), batch_size=1024),
    "dhen": Entry(model=ModelConfig(kind="dhen", embedding_dim=64), batch_size=512, num_fields=100),
    "tbsm": Entry(
        model=ModelConfig(kind="tbsm", embedding_dim=16), batch_size=1024, max_history=20
    ),
    "hstu": Entry(model=ModelConfig(kind="hstu", embedding_dim=64), batch_size=128, num_tasks=2),
    "hstu_client": Entry(
        model=ModelConfig(kind="hstu", embedding_dim=64),
        batch_size=128,
        num_tasks=2,
        stock=("table_wise", "row_wise", "table_wise_loop", "row_wise_loop"),
        ours=("ours", "ours_loop", "ours_plain", "rows:1"),
    ),
    "hstu_long": _LONG,
    "hstu_long_64": replace(_LONG, model=ModelConfig(kind="hstu", embedding_dim=64)),
}
"""By name, in the order in which they were published or nearly so."""


def train_config(name: str, data_folder: str | None, seed: int) -> TrainConfig:
    """Configuration of a line's training.

    Raises:
        InputError: If the folder lacks the file.
    """
    entry = ENTRIES[name]
    path = None
    if data_folder is not None and entry.real_file is not None:
        path = Path(data_folder) / entry.real_file
        if not path.is_file():
            raise InputError(f"--data-folder: there is no {path}; leave it out for generated data")
    return TrainConfig(
        seed=seed,
        features=entry.features,
        model=entry.model,
        data=DataConfig(
            kind=entry.data_kind,
            path=None if path is None else str(path),
            batch_size=entry.batch_size,
            max_rows=_MOST_ROWS,
            row_scale=1.0 if path is not None else _GENERATED_ROW_SCALE,
            num_tables=entry.num_fields or DataConfig().num_tables,
            num_tasks=entry.num_tasks,
            max_history=entry.max_history,
            heldout_steps=1 if entry.data_kind == "clicks" else _COUNTED_STEPS,
        ),
    )
