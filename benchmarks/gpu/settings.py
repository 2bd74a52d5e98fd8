"""How large the runs on the GPU are: one frozen value that every part gets, pickled by value."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """A generated 26-table DLRM.

    Args:
        batch_size: Samples per step.
        dim: Columns of every table.
        max_rows: Cap on a table's rows.
        layers: Hidden layers of both towers.
        hot_rows: Replicated rows over all tables, where there are any.
    """

    batch_size: int
    dim: int
    max_rows: int
    layers: tuple[int, ...]
    hot_rows: int


@dataclass(frozen=True, kw_only=True)
class GpuSettings:
    """The whole check.

    Args:
        device: ``"cuda"``; ``"cpu"`` runs the same code over gloo, to show that it works.
        repeats: Runs of each pipeline from the same weights on the same batches, for races.
        race_steps: Steps of each such run.
        micro_batches: Micro-batches K of the pipelines that are run so.
        rounds: Turns of every variant on the clock.
        block_steps: Timed steps of a turn.
        num_batches: Batches that variants use again and again.
        races: The model that races are looked for with; small, so that runs are many.
        timed: The model of what is timed.
        uvm: The model whose tables are in host memory.
    """

    device: str = "cuda"
    repeats: int = 20
    race_steps: int = 8
    micro_batches: tuple[int, ...] = (1, 2, 4)
    rounds: int = 10
    block_steps: int = 10
    num_batches: int = 16
    races: ModelSize = ModelSize(
        batch_size=2048, dim=32, max_rows=20_000, layers=(64,), hot_rows=500
    )
    timed: ModelSize = ModelSize(
        batch_size=8192, dim=128, max_rows=1_000_000, layers=(512, 256), hot_rows=20_000
    )
    uvm: ModelSize = ModelSize(
        batch_size=8192, dim=128, max_rows=1_000_000, layers=(64,), hot_rows=200_000
    )
