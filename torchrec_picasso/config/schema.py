"""The settings of one training run, grouped by what they govern."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from torchrec_picasso.config.rules import Rules, rule

__all__ = [
    "TrainConfig",
    "DataConfig",
    "ModelConfig",
    "ShardingConfig",
    "OptimizerConfig",
    "PipelineConfig",
    "CheckpointConfig",
    "PLACEMENTS",
    "PIPELINES",
    "CARDINALITY_NAMES",
]

PLACEMENTS = ("hot_cold", "table_wise", "row_wise", "column_wise", "planner")
"""Who places the tables: this package, one stock sharding type, or TorchRec's planner."""

PIPELINES = ("interleaved", "sparse_dist")
"""What takes the steps: this package's pipeline, or TorchRec's SparseDist."""

CARDINALITY_NAMES = ("criteo_kaggle", "criteo_terabyte_10m", "criteo_terabyte_40m")
"""Published table sizes that the generated data and the Criteo files can use."""

NUM_CRITEO_TABLES = 26


@dataclass(frozen=True, kw_only=True)
class DataConfig(Rules):
    """Where samples come from and how large the tables are that they look up."""

    path: str | None = rule(None, "Criteo file, Parquet or published text; null = generated data.")
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
    heldout_steps: int = rule(
        4, "Global batches kept out of training, for statistics and evaluation.", at_least=1
    )

    def cross_problems(self) -> list[str]:
        """A Criteo file has 26 id columns, so it cannot feed another number of tables."""
        if self.path is not None and self.num_tables != NUM_CRITEO_TABLES:
            return [
                f"num_tables: a Criteo file feeds {NUM_CRITEO_TABLES} tables, got "
                f"{self.num_tables}; remove num_tables or set path to null"
            ]
        return []


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Rules):
    """The DLRM: width of the embeddings and of the two towers around them."""

    embedding_dim: int = rule(
        64, "Columns of every table (FBGEMM needs a multiple of 4).", at_least=4, multiple_of=4
    )
    dense_layers: tuple[int, ...] = rule(
        (256,), "Hidden sizes under the dense features; embedding_dim is appended.", at_least=1
    )
    over_layers: tuple[int, ...] = rule(
        (256, 128), "Hidden sizes above the interaction; a size of 1 is appended.", at_least=1
    )


@dataclass(frozen=True, kw_only=True)
class ShardingConfig(Rules):
    """How the tables are spread over the ranks."""

    placement: str = rule("hot_cold", "Who places the tables.", choices=PLACEMENTS)
    hot_rows: int | Mapping[str, int] | None = rule(
        5_000,
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

    def cross_problems(self) -> list[str]:
        """Only the interleaved pipeline has these settings."""
        if self.kind == "interleaved":
            return []
        return [
            f"{name}: only kind interleaved has it, got {value} with kind {self.kind}; remove "
            f"{name} or set kind to interleaved"
            for name in ("num_micro_batches", "lookahead")
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
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    sharding: ShardingConfig = dataclasses.field(default_factory=ShardingConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    pipeline: PipelineConfig = dataclasses.field(default_factory=PipelineConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
