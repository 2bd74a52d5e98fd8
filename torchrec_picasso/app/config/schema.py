"""The settings of a training run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from torchrec_picasso.app.config.rules import Rules, rule, shown
from torchrec_picasso.rows.refresh_policy import Refresh

PLACEMENTS = ("hot_cold", "table_wise", "row_wise", "column_wise", "planner")
"""This package's planner, one stock sharding type, or TorchRec's planner."""

PIPELINES = ("interleaved", "sparse_dist")
"""This package's pipeline, or TorchRec's TrainPipelineSparseDist."""

CARDINALITY_NAMES = ("criteo_kaggle", "criteo_terabyte_10m", "criteo_terabyte_40m")
"""Published table sizes for generated data and Criteo files."""

DATA_KINDS = ("criteo", "clicks", "stream", "fields")
"""Criteo's columns; clicks with histories, or with times, candidates and crossed features too; many
generated fields."""

LABELS = ("own", "sines", "co_action")
"""The data's own; sines of a sum over ids (generated Criteo samples); a random teacher over pairs
of the target and an earlier click (clicks)."""

FEATURE_KINDS = ("one_hot", "bag", "sequence")
"""One id per sample; any number of ids, sum-pooled; any number of ids, a row each."""

NUM_CRITEO_TABLES = 26


@dataclass(frozen=True, kw_only=True)
class DataConfig(Rules):
    """Source of the samples, and sizes of the tables."""

    kind: str = rule("criteo", "Kind of the samples.", choices=DATA_KINDS)
    path: str | None = rule(
        None,
        "Criteo file, Parquet or published text; for clicks a Parquet file of Alimama's rows or "
        "Globo's clicks; null = generated data.",
    )
    batch_size: int = rule(2048, "Samples per rank and step.", at_least=1)
    cardinalities: str = rule(
        "criteo_kaggle", "Published table sizes to start from.", choices=CARDINALITY_NAMES
    )
    row_scale: float = rule(
        1.0, "Factor on the published table sizes; at least one row stays.", above=0, at_most=1
    )
    max_rows: int = rule(1_000_000, "Cap on the rows of one table; ids wrap around.", at_least=1)
    num_tables: int = rule(
        NUM_CRITEO_TABLES,
        "Number of tables; other than 26 for generated data only.",
        at_least=1,
        at_most=10_000,
    )
    zipf_exponent: float = rule(
        1.05, "Mean skew of the generated ids; 0 = uniform.", at_least=0, at_most=4
    )
    num_tasks: int = rule(
        1, "Labels of a sample; 2 for generated Criteo data and streams.", at_least=1, at_most=2
    )
    task_correlation: float = rule(
        0.5, "Correlation of the two labels' id parts.", at_least=-1, at_most=1
    )
    labels: str = rule("own", "The data's own labels, or generated ones.", choices=LABELS)
    max_history: int = rule(
        50, "Longest history of clicks; the latest are kept.", at_least=1, at_most=10_000
    )
    num_candidates: int | None = rule(
        None,
        "Items of a sample of a stream, the first of them clicked; null = 4, or 1 for rows with "
        "their own histories.",
        at_least=1,
        at_most=1000,
    )
    cross_rows: int = rule(
        100_000, "Rows of each table of a stream's crossed features.", at_least=1
    )
    window_steps: int | None = rule(
        None,
        "Steps of a window in time order: each is evaluated before it is trained on, the one after "
        "the last step at the end; null = the held-out samples at the end.",
        at_least=1,
    )
    heldout_steps: int = rule(
        4, "Global batches held out of training, for statistics and evaluation.", at_least=1
    )
    heldout_fold: int = rule(
        0, "Which heldout_steps global batches of a Criteo file; 0 = the first.", at_least=0
    )

    def cross_problems(self) -> list[str]:
        """Refuses keys that do not fit the kind of the data; the first problem is reported."""
        is_criteo, is_file = self.kind == "criteo", self.path is not None
        checks = (
            (
                self.labels == "co_action" and self.kind != "clicks",
                f"labels: co_action needs histories, and kind {self.kind} has none; remove labels "
                "or set kind to clicks",
            ),
            (
                self.labels == "sines" and (is_file or not is_criteo),
                "labels: only generated samples of kind criteo have sines; remove labels, or set "
                "path to null and kind to criteo",
            ),
            (
                self.num_tasks > 1 and self.kind != "stream" and (is_file or not is_criteo),
                f"num_tasks: only generated samples of kind criteo and streams have "
                f"{self.num_tasks} labels; remove num_tasks, or set path to null and kind to "
                "criteo, or kind to stream",
            ),
            (
                self.heldout_fold and not (is_criteo and is_file),
                f"heldout_fold: only a Criteo file has several, got {self.heldout_fold}; remove "
                "it, or set path and kind criteo",
            ),
            (
                self.kind == "fields" and is_file,
                f"path: fields are generated, got {shown(self.path)}; remove path or change kind",
            ),
            (
                is_criteo and is_file and self.num_tables != NUM_CRITEO_TABLES,
                f"num_tables: a Criteo file feeds {NUM_CRITEO_TABLES} tables, got "
                f"{self.num_tables}; remove num_tables or set path to null",
            ),
        )
        return [problem for is_wrong, problem in checks if is_wrong][:1]


@dataclass(frozen=True, kw_only=True)
class FeatureConfig(Rules):
    """Changes to a group of columns of a model; keys left out keep the model's values."""

    columns: tuple[str, ...] | None = rule(None, "Columns; null = all of the group's role.")
    dim: int | None = rule(
        None,
        "Width of the tables; null = the model's, or model.embedding_dim.",
        at_least=4,
        multiple_of=4,
    )
    kind: str | None = rule(None, "Ids per sample; null = the model's.", choices=FEATURE_KINDS)
    tables_of: str | None = rule(
        None, "Group whose tables these columns read; null = the model's choice."
    )


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Rules):
    """The model: TorchRec's DLRM, or another by kind and sizes."""

    kind: str = rule("dlrm", "Name of the model; `torchrec-picasso models` lists them.")
    embedding_dim: int = rule(
        64, "Columns of every table (FBGEMM needs a multiple of 4).", at_least=4, multiple_of=4
    )
    dense_layers: tuple[int, ...] = rule(
        (256,),
        "Hidden sizes under a DLRM's dense features; embedding_dim is appended.",
        at_least=1,
    )
    over_layers: tuple[int, ...] = rule(
        (256, 128),
        "Hidden sizes above a DLRM's interaction; a size of 1 is appended.",
        at_least=1,
    )
    sizes: Mapping[str, bool | int | float | str | tuple[int, ...]] | None = rule(
        None, "Sizes of any other model; those left out are the published ones."
    )

    def cross_problems(self) -> list[str]:
        """Refuses sizes of a DLRM, and a DLRM's keys for other models."""
        if self.kind == "dlrm":
            if not self.sizes:
                return []
            return [
                f"sizes: a dlrm has dense_layers and over_layers, got "
                f"{shown(', '.join(self.sizes), quoted=False)}; remove sizes"
            ]
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        return [
            f"{name}: only kind dlrm has it, got {shown(list(getattr(self, name)))} with kind "
            f"{self.kind}; give model.sizes"
            for name in ("dense_layers", "over_layers")
            if getattr(self, name) != defaults[name]
        ]


@dataclass(frozen=True, kw_only=True)
class ShardingConfig(Rules):
    """Placement of the tables on the ranks."""

    placement: str = rule("hot_cold", "Planner or sharding type.", choices=PLACEMENTS)
    hot_rows: int | Mapping[str, int] | None = rule(
        None,
        "Replicated rows, in total or by table; 0 = none; null = the planner chooses, also between "
        "hot/cold and stock sharding.",
        at_least=0,
    )
    num_waves: int = rule(
        1, "Pack groups that an interleaved pipeline exchanges one by one.", at_least=1
    )
    stats: str | None = rule(
        None, "Statistics (torchrec-picasso stats); null = count the held-out samples."
    )
    curves: str | None = rule(
        None, "Curves (torchrec-picasso calibrate); null = TorchRec's bandwidths."
    )


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Rules):
    """Optimizers of the tables (fused into backward) and of the dense weights."""

    embedding_optimizer: str = rule(
        "rowwise_adagrad", "Optimizer of the tables.", choices=("rowwise_adagrad", "adagrad", "sgd")
    )
    embedding_lr: float = rule(0.05, "Learning rate of the tables.", above=0)
    embedding_eps: float = rule(1e-8, "Adagrad's eps.", above=0)
    dense_optimizer: str = rule(
        "sgd",
        "Optimizer of the dense weights; adagrad and adam amplify rounding in their first steps.",
        choices=("adagrad", "adam", "sgd"),
    )
    dense_lr: float = rule(0.05, "Learning rate of the dense weights.", above=0)
    warmup_steps: int = rule(0, "Steps in which both learning rates rise to theirs.", at_least=0)
    clip_norm: float | None = rule(
        None, "Largest norm of the dense gradients together; null = not clipped.", above=0
    )


@dataclass(frozen=True, kw_only=True)
class PipelineConfig(Rules):
    """The pipeline that overlaps exchanges with the dense part."""

    kind: str = rule("interleaved", "Which pipeline.", choices=PIPELINES)
    num_micro_batches: int | None = rule(
        None, "Micro-batches per batch; null = chosen on the first steps.", at_least=1
    )
    lookahead: bool | None = rule(
        None, "Whether clean rows of the next batch are fetched early; null = chosen too."
    )
    refresh: Refresh | None = dataclasses.field(default_factory=Refresh)
    """Updates of the hot set; null = the hot set of the plan is kept."""
    verify_every: int | None = rule(
        None,
        "Steps between two comparisons of all replicas with their home rows; null = none.",
        at_least=1,
    )

    def cross_problems(self) -> list[str]:
        """Refuses settings of the interleaved pipeline for another."""
        if self.kind == "interleaved":
            return []
        return [
            f"{name}: only kind interleaved has it, got {value} with kind {self.kind}; remove "
            f"{name} or set kind to interleaved"
            for name in ("num_micro_batches", "lookahead", "verify_every")
            if (value := getattr(self, name)) is not None
        ]


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Rules):
    """Checkpoints of the training state."""

    folder: str | None = rule(None, "Folder of the checkpoints; null = none.")
    every_steps: int = rule(100, "Steps between two checkpoints.", at_least=1)
    keep_last: int | None = rule(3, "Newest checkpoints to keep; null = all.", at_least=1)
    async_save: bool = rule(
        False, "Write from a copy of the state in host memory while training continues."
    )


@dataclass(frozen=True, kw_only=True)
class WatchConfig(Rules):
    """Curves of a run."""

    tensorboard: str | None = rule(
        None, "Folder of TensorBoard's event files, written by rank 0; null = none."
    )
    every_steps: int = rule(
        1, "Steps between two points of a curve; a point is a mean over them.", at_least=1
    )


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Rules):
    """A training run: ``torchrec-picasso train --config FILE``."""

    steps: int = rule(200, "Steps to train, those before a resume included.", at_least=1)
    ranks: int = rule(
        2, "Ranks to spawn; torchrun's world size takes precedence.", at_least=1, at_most=64
    )
    seed: int = rule(0, "Seed of weights and generated data.", at_least=0)
    log_every: int = rule(10, "Steps between two lines of progress.", at_least=1)
    timeout_s: int = rule(3600, "Seconds until spawned ranks are terminated.", at_least=1)
    features: Mapping[str, FeatureConfig] | None = rule(
        None, "Changes to the model's groups of columns, by name; not for a dlrm."
    )
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    sharding: ShardingConfig = dataclasses.field(default_factory=ShardingConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    pipeline: PipelineConfig = dataclasses.field(default_factory=PipelineConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    watch: WatchConfig = dataclasses.field(default_factory=WatchConfig)
