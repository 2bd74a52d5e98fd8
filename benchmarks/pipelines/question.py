"""Settings of a comparison: cluster, data, model, number of steps, and variants."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torchrec_picasso.app.config import DataConfig, ModelConfig, ShardingConfig, TrainConfig
from torchrec_picasso.placement import Form

TOWERS = {"thin": ((64,), (64,)), "dlrm": ((512, 256), (512, 512, 256))}
GENERATED = {"uniform": 0.0, "zipf": 1.05}
"""Data without a file: exponent of the ids' distribution."""
VARIANTS = (
    *("table_wise", "row_wise", "column_wise", "planner", "fused"),
    *("hot_cold", "hot_cold:0", "hot_cold:5000", "interleaved", "interleaved:4"),
)

_AUTOMATIC, _BY_HAND = ("hot_cold", "interleaved"), ("interleaved:4:5000", "interleaved:8:0")
_BEST_STOCK = "table_wise"
"""Fastest stock plan of this model at 1 Gbit/s; alone where a step takes seconds."""
_FEW = {"rounds": 4, "block_steps": 3}
_HOT_ROWS = (
    _BEST_STOCK,
    "hot_cold:0",
    "hot_cold:5000",
    "interleaved:auto:0",
    "interleaved:auto:5000",
)
FORMS: tuple[Form, ...] = ("rows", "node_rows")
"""Forms of row-exchanged tables."""


def _hosts(hosts: int, ranks_per_host: int, rate_mbit: float, batch_size: int) -> dict[str, Any]:
    """Returns a cluster, and what is compared there; rows by host need several ranks on each."""
    by_form = tuple(f"interleaved+{form}" for form in FORMS)
    by_hand = by_form if ranks_per_host > 1 else ("interleaved:4:5000",)
    return {
        "hosts": hosts,
        "ranks_per_host": ranks_per_host,
        "rate_mbit": rate_mbit,
        "batch_size": batch_size,
        "dim": 64,
        "variants": (_BEST_STOCK, "interleaved", *by_hand),
        "heldout_steps": 1,
        **_FEW,
    }


SCENARIOS: dict[str, dict[str, Any]] = {
    "1gbit_thin": {},
    "1gbit_dlrm": {"towers": "dlrm"},
    "100mbit_thin": {
        "rate_mbit": 100.0,
        "variants": (_BEST_STOCK, *_AUTOMATIC, *_BY_HAND),
        **_FEW,
    },
    "200mbit_thin": {
        "rate_mbit": 200.0,
        "variants": (_BEST_STOCK, "interleaved"),
        "rounds": 4,
        "block_steps": 8,
    },
    "1gbit_thin_16384": {
        "batch_size": 16384,
        "heldout_steps": 1,  # of 80,000 samples, one global batch for statistics leaves a circle
        "variants": (_BEST_STOCK, *_AUTOMATIC, "interleaved:16:0"),
        **_FEW,
    },
    "1gbit_uniform": {"data": "uniform", "variants": (*VARIANTS[:5], *_AUTOMATIC)},
    "loopback_thin": {"rate_mbit": None},
    "2x4_200mbit": _hosts(2, 4, 200.0, batch_size=1024),
    "2x2_500mbit": _hosts(2, 2, 500.0, batch_size=2048),
    "4x1_200mbit": _hosts(4, 1, 200.0, batch_size=2048),
    "8x1_100mbit": _hosts(8, 1, 100.0, batch_size=1024),
    "hot_rows_2x1_1gbit": {"variants": _HOT_ROWS, **_FEW},
    "hot_rows_2x4_200mbit": {
        **_hosts(2, 4, 200.0, batch_size=1024),
        "variants": (
            _BEST_STOCK,
            *(f"interleaved:auto:{number}+{form}" for form in FORMS for number in (0, 5000)),
        ),
    },
}
"""Published comparisons, as arguments of :class:`Question`."""
for _asked in SCENARIOS.values():
    _asked.setdefault("variants", (*VARIANTS[:5], *_AUTOMATIC, *_BY_HAND))

WARMUP_STEPS, COUNTED_STEPS = 3, 2
"""Steps before, and under the byte meter."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings that every comparison has.

    Args:
        hosts: Hosts of the cluster.
        rate_mbit: Rate of each host's link, Mbit/s; ``None`` = loopback.
        batch_size: Samples per rank and step.
        max_rows: Cap on a table's rows; ids wrap around.
        heldout_steps: Global batches that hot rows are chosen from, and none is trained on.
        rounds: Turns of every variant.
        block_steps: Timed steps of a turn.
        variants: Names of the variants.
    """

    hosts: int = 2
    rate_mbit: float | None = 1000.0
    batch_size: int
    max_rows: int = 100_000
    heldout_steps: int
    rounds: int
    block_steps: int
    variants: tuple[str, ...]

    @property
    def num_steps(self) -> int:
        """Steps that every variant takes, without those of a pipeline's choice."""
        return WARMUP_STEPS + COUNTED_STEPS + self.rounds * (self.block_steps + 1)

    @property
    def link(self) -> str:
        """The links in words."""
        return f"{self.rate_mbit:g} Mbit/s" if self.rate_mbit is not None else "loopback"


@dataclass(frozen=True, kw_only=True)
class Question(Settings):
    """Settings of a comparison of pipelines.

    Args:
        data: A Criteo file, or a name in :data:`GENERATED`.
        ranks_per_host: Ranks on each host.
        dim: Columns of every table.
        towers: A name in :data:`TOWERS`.
    """

    data: str
    ranks_per_host: int = 1
    batch_size: int = 4096
    dim: int = 128
    towers: str = "thin"
    heldout_steps: int = 4
    rounds: int = 6
    block_steps: int = 4
    variants: tuple[str, ...] = VARIANTS

    @property
    def world_size(self) -> int:
        """Ranks of all hosts."""
        return self.hosts * self.ranks_per_host

    def config(self) -> TrainConfig:
        """The training run, but for the placement."""
        dense_layers, over_layers = TOWERS[self.towers]
        generated = self.data in GENERATED
        return TrainConfig(
            data=DataConfig(
                path=None if generated else self.data,
                zipf_exponent=GENERATED.get(self.data, 0.0),
                batch_size=self.batch_size,
                cardinalities="criteo_terabyte_10m",
                max_rows=self.max_rows,
                heldout_steps=self.heldout_steps,
            ),
            model=ModelConfig(
                embedding_dim=self.dim, dense_layers=dense_layers, over_layers=over_layers
            ),
            sharding=ShardingConfig(),
        )
