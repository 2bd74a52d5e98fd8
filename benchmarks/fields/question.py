"""Settings of a comparison: cluster, workload, variants and number of steps."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.pipelines.question import Settings
from torchrec_picasso.app.config import OptimizerConfig, TrainConfig

MODELS = ("fields", "columns", "sequences")
ZOO = "zoo"
UNIFORM = "uniform"
"""In place of a file: uniform ids."""


@dataclass(frozen=True, kw_only=True)
class Question(Settings):
    """Settings of a comparison on a workload of fields.

    Args:
        fields: Generated fields, each with a table of its own.
        model: One of :data:`MODELS`: generated fields; columns of a log, one id each; or a DIN-like
            model of sequences. The latter two have their own tables. Or :data:`ZOO`.
        zoo: The configuration of a model of the zoo.
        data: File of columns, or :data:`UNIFORM`; or of sequences, ``None`` = generated ones.
        dim: Columns of every table of a log, of sequences, and of the widest generated fields.
        seed: Draws fields, ids, labels and weights.
        local_costs: Whether the planner's local costs are measured too, not only the links.
        dense: Whether the model's dense part is measured, too.
    """

    fields: int = 40
    model: str = "fields"
    zoo: TrainConfig | None = None
    data: str | None = None
    dim: int = 64
    batch_size: int = 1024
    rounds: int = 8
    block_steps: int = 8
    seed: int = 0
    local_costs: bool = False
    dense: bool = False
    heldout_steps: int = 8
    variants: tuple[str, ...] = ("table_wise", "planner", "ours", "ours_plain", "all_rows")

    @property
    def optimizer(self) -> OptimizerConfig:
        """Optimizer of the dense part: a model of the zoo has its own."""
        if self.zoo is not None:
            return self.zoo.optimizer
        return OptimizerConfig(dense_optimizer="adagrad", dense_lr=0.02)
