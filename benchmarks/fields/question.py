"""Settings of a comparison: cluster, fields and number of steps."""

from __future__ import annotations

from dataclasses import dataclass

from torchrec_picasso.app.config import OptimizerConfig, TrainConfig

WARMUP_STEPS, COUNTED_STEPS = 3, 2
"""Steps before, and under the byte meter."""
MODELS = ("fields", "columns", "sequences")
ZOO = "zoo"
UNIFORM = "uniform"
"""In place of a file: ids that are all alike often."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """Settings of a comparison.

    Args:
        fields: Generated fields, each with a table of its own.
        model: One of :data:`MODELS`: generated fields; columns of a log, one id each; or a DIN-like
            model of sequences. The latter two have their own tables. Or :data:`ZOO`.
        zoo: The configuration of a model of the zoo.
        data: File of columns, or :data:`UNIFORM`; or of sequences, ``None`` = generated ones.
        dim: Columns of every table of a log.
        batch_size: Samples per rank and step.
        rate_mbit: Rate of each host's link, Mbit/s; ``None`` = loopback.
        hosts: Hosts of the cluster, one rank on each.
        rounds: Turns of every variant.
        block_steps: Timed steps of a turn.
        seed: Draws fields, ids, labels and weights.
        local_costs: Whether the planner's local costs are measured too, not only the links.
        dense: Whether the model's dense part is measured, too.
        heldout_steps: Global batches that hot rows are chosen from, and none is trained on.
        max_rows: Most rows of a table.
        variants: Names of the variants.
    """

    fields: int = 40
    model: str = "fields"
    zoo: TrainConfig | None = None
    data: str | None = None
    dim: int = 64
    batch_size: int = 1024
    rate_mbit: float | None = 1000.0
    hosts: int = 2
    rounds: int = 8
    block_steps: int = 8
    seed: int = 0
    local_costs: bool = False
    dense: bool = False
    heldout_steps: int = 8
    max_rows: int = 100_000
    variants: tuple[str, ...] = ("table_wise", "planner", "ours", "ours_plain", "all_rows")

    @property
    def optimizer(self) -> OptimizerConfig:
        """Optimizer of the dense part: a model of the zoo has its own."""
        if self.zoo is not None:
            return self.zoo.optimizer
        return OptimizerConfig(dense_optimizer="adagrad", dense_lr=0.02)

    @property
    def num_steps(self) -> int:
        """Steps that every variant takes, without those of a pipeline's choice."""
        return WARMUP_STEPS + COUNTED_STEPS + self.rounds * (self.block_steps + 1)

    @property
    def link(self) -> str:
        """The links in words."""
        return f"{self.rate_mbit:g} Mbit/s" if self.rate_mbit is not None else "loopback"
