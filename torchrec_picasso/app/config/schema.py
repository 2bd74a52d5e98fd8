"""The settings of one training run, grouped by what they govern."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from torchrec_picasso.app.config.watch import WatchConfig
from torchrec_picasso.refresh.policy import Refresh
from torchrec_picasso.rules import Rules, rule, shown

__all__ = [
    "TrainConfig",
    "DataConfig",
    "FeatureConfig",
    "ModelConfig",
    "ShardingConfig",
    "OptimizerConfig",
    "PipelineConfig",
    "CheckpointConfig",
    "PLACEMENTS",
    "PIPELINES",
    "CARDINALITY_NAMES",
    "DATA_KINDS",
    "FEATURE_KINDS",
    "LABELS",
]

PLACEMENTS = ("hot_cold", "table_wise", "row_wise", "column_wise", "planner")
"""Who places the tables: this package, one stock sharding type, or TorchRec's planner."""

PIPELINES = ("interleaved", "sparse_dist")
"""What takes the steps: this package's pipeline, or TorchRec's SparseDist."""

CARDINALITY_NAMES = ("criteo_kaggle", "criteo_terabyte_10m", "criteo_terabyte_40m")
"""Published table sizes that the generated data and the Criteo files can use."""

DATA_KINDS = ("criteo", "clicks", "fields")
"""Samples of Criteo's columns, clicks with the history before them, or many generated fields."""

LABELS = ("own", "sines", "co_action")
"""The data's own; of generated Criteo samples waves of what ids add up to; of clicks a teacher's,
which looks at each pair of the target and a click before."""

FEATURE_KINDS = ("one_hot", "bag", "sequence")
"""One id per sample; any number, whose rows are summed; any number, each with its row."""

NUM_CRITEO_TABLES = 26


@dataclass(frozen=True, kw_only=True)
class DataConfig(Rules):
    """Where samples come from and how large the tables are that they look up."""

    kind: str = rule("criteo", "What a sample is.", choices=DATA_KINDS)
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
        "Number of tables, of fields one each; other than 26 for generated data only.",
        at_least=1,
        at_most=10_000,
    )
    zipf_exponent: float = rule(
        1.05, "Mean skew of the generated ids; 0 = uniform.", at_least=0, at_most=4
    )
    num_tasks: int = rule(
        1, "Labels of a sample; 2 for generated Criteo data only.", at_least=1, at_most=2
    )
    task_correlation: float = rule(
        0.5, "How alike the second label's taste is to the first's.", at_least=-1, at_most=1
    )
    labels: str = rule(
        "own", "What labels follow: the data's own, or something harder.", choices=LABELS
    )
    max_history: int = rule(
        50, "Clicks of a history; the latest stay. For clicks only.", at_least=1, at_most=10_000
    )
    heldout_steps: int = rule(
        4, "Global batches kept out of training, for statistics and evaluation.", at_least=1
    )
    heldout_fold: int = rule(
        0,
        "Which run of heldout_steps global batches of a Criteo file they are; 0 = the first.",
        at_least=0,
    )

    def cross_problems(self) -> list[str]:
        """A Criteo file has 26 id columns and one label; fields are in no file."""
        if self.labels == "co_action" and self.kind != "clicks":
            return [
                f"labels: co_action looks at histories, which kind {self.kind} has not; remove "
                "labels or set kind to clicks"
            ]
        if self.labels == "sines" and (self.path is not None or self.kind != "criteo"):
            return [
                "labels: only generated samples of kind criteo have sines; remove labels, or set "
                "path to null and kind to criteo"
            ]
        if self.num_tasks > 1 and (self.path is not None or self.kind != "criteo"):
            return [
                f"num_tasks: only generated samples of kind criteo have {self.num_tasks} labels; "
                "remove num_tasks, or set path to null and kind to criteo"
            ]
        if self.heldout_fold and (self.path is None or self.kind != "criteo"):
            return [
                f"heldout_fold: only a Criteo file has others than the first, got "
                f"{self.heldout_fold}; remove it, or set path and kind criteo"
            ]
        if self.kind == "fields" and self.path is not None:
            return [
                f"path: fields are generated, got {shown(self.path)}; remove path or change kind"
            ]
        if self.kind != "criteo":
            return []
        if self.path is not None and self.num_tables != NUM_CRITEO_TABLES:
            return [
                f"num_tables: a Criteo file feeds {NUM_CRITEO_TABLES} tables, got "
                f"{self.num_tables}; remove num_tables or set path to null"
            ]
        return []


@dataclass(frozen=True, kw_only=True)
class FeatureConfig(Rules):
    """A group of columns that a model treats alike; what is left out the model says itself."""

    columns: tuple[str, ...] | None = rule(None, "Columns; null = all that the data has for it.")
    dim: int | None = rule(
        None,
        "Columns of their tables; null = the model's own, or model.embedding_dim.",
        at_least=4,
        multiple_of=4,
    )
    kind: str | None = rule(None, "Ids of a sample; null = the model's.", choices=FEATURE_KINDS)
    tables_of: str | None = rule(
        None, "Group whose tables these columns read; null = the model's, or their own."
    )


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Rules):
    """The model: TorchRec's DLRM by width, any other one by its kind and its sizes."""

    kind: str = rule("dlrm", "Which model; `torchrec-picasso models` lists them.")
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
        None, "Arguments of any other model by name; those left out are the published ones."
    )

    def cross_problems(self) -> list[str]:
        """A DLRM has keys of its own, other models have not."""
        if self.kind == "dlrm":
            if not self.sizes:
                return []
            return [
                f"sizes: a dlrm has dense_layers and over_layers, got "
                f"{shown(', '.join(self.sizes), quoted=False)}; remove sizes"
            ]
        plain = {field.name: field.default for field in dataclasses.fields(self)}
        return [
            f"{name}: only kind dlrm has it, got {shown(list(getattr(self, name)))} with kind "
            f"{self.kind}; give model.sizes"
            for name in ("dense_layers", "over_layers")
            if getattr(self, name) != plain[name]
        ]


@dataclass(frozen=True, kw_only=True)
class ShardingConfig(Rules):
    """How the tables are spread over the ranks."""

    placement: str = rule("hot_cold", "Who places the tables.", choices=PLACEMENTS)
    hot_rows: int | Mapping[str, int] | None = rule(
        None,
        "Replicated rows: a total over all tables, or a count per table; 0 = no replicas; null = "
        "the cost model chooses, for each table, between hot/cold and stock too.",
        at_least=0,
    )
    num_waves: int = rule(
        1, "Waves that hot/cold tables travel in under an interleaved pipeline.", at_least=1
    )
    stats: str | None = rule(
        None, "Statistics file (torchrec-picasso stats); null = count the held-out samples."
    )
    curves: str | None = rule(
        None, "Curves file (torchrec-picasso calibrate); null = TorchRec's bandwidths."
    )


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Rules):
    """The optimizers of the tables (fused into backward) and of the dense weights."""

    embedding_optimizer: str = rule(
        "rowwise_adagrad", "Update of the tables.", choices=("rowwise_adagrad", "adagrad", "sgd")
    )
    embedding_lr: float = rule(0.05, "Learning rate of the tables.", above=0)
    embedding_eps: float = rule(1e-8, "Term that keeps Adagrad's division finite.", above=0)
    dense_optimizer: str = rule(
        "sgd",
        "Update of the towers; adagrad amplifies rounding in its first steps.",
        choices=("adagrad", "sgd"),
    )
    dense_lr: float = rule(0.05, "Learning rate of the towers.", above=0)


@dataclass(frozen=True, kw_only=True)
class PipelineConfig(Rules):
    """How the exchange of rows and gradients is hidden behind the dense part."""

    kind: str = rule("interleaved", "What takes the steps.", choices=PIPELINES)
    num_micro_batches: int | None = rule(
        None, "Pieces that a batch is cut into; null = chosen on the first steps.", at_least=1
    )
    lookahead: bool | None = rule(
        None, "Whether clean rows of the next batch are fetched early; null = chosen likewise."
    )
    refresh: Refresh | None = dataclasses.field(default_factory=Refresh)
    """How hot rows follow what is looked up; null = they stay the plan's."""
    verify_every: int | None = rule(
        None,
        "Steps between two comparisons of all replicas with their homes; null = none.",
        at_least=1,
    )

    def cross_problems(self) -> list[str]:
        """Only the interleaved pipeline has these settings."""
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
    """Where and how often the whole training state is written."""

    folder: str | None = rule(None, "Folder of the checkpoints; null = write none.")
    every_steps: int = rule(100, "Steps between two checkpoints.", at_least=1)
    keep_last: int | None = rule(
        3, "Newest checkpoints to keep, older ones are deleted; null = all.", at_least=1
    )
    async_save: bool = rule(
        False, "Train on while a checkpoint is written, from a copy of the state in host memory."
    )


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Rules):
    """One training run: ``torchrec-picasso train --config FILE``."""

    steps: int = rule(200, "Steps to train, counted from the first, not from a resume.", at_least=1)
    ranks: int = rule(
        2, "Processes to spawn; under torchrun its world size counts.", at_least=1, at_most=64
    )
    seed: int = rule(0, "Seed of the weights and of the generated data.", at_least=0)
    log_every: int = rule(10, "Steps between two lines of progress.", at_least=1)
    timeout_s: int = rule(3600, "Seconds after which spawned ranks are ended.", at_least=1)
    features: Mapping[str, FeatureConfig] | None = rule(
        None, "Groups of columns by name, of any model but a dlrm; those left out are the model's."
    )
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    sharding: ShardingConfig = dataclasses.field(default_factory=ShardingConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    pipeline: PipelineConfig = dataclasses.field(default_factory=PipelineConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    watch: WatchConfig = dataclasses.field(default_factory=WatchConfig)
