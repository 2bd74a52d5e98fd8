"""Measures what a step costs once: all that prices of tables and of the dense part leave out.

Two pipelines train a small DLRM: TorchRec's with stock tables, this package's with hot/cold tables
in one micro-batch. The time of a step less its predicted time is the pipeline's own work, the dense
optimizer, and waits that grow with the number of exchanges, not with bytes.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import replace
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.distributed.planner import Topology

from torchrec_picasso.app.config import (
    DataConfig,
    ModelConfig,
    PipelineConfig,
    ShardingConfig,
    TrainConfig,
)
from torchrec_picasso.app.runs.dense_probe import measure_dense
from torchrec_picasso.app.runs.pace import times_fitting
from torchrec_picasso.app.runs.placements import hot_cold_sharders
from torchrec_picasso.app.runs.trainer import Trainer, unsharded_model
from torchrec_picasso.app.zoo.registry import make_source
from torchrec_picasso.cost import CommCurves
from torchrec_picasso.planner import hot_cold_planner

_BATCH_SIZE, _DIM, _MAX_ROWS, _HIDDEN = 128, 16, 2_000, (16,)
_NUM_BATCHES, _WARMUP_STEPS, _TIMED_STEPS = 8, 10, 6
_BUDGET_S, _FEWEST_TURNS, _MOST_TURNS = 5.0, 3, 20
_SIDES = {"stock": ("table_wise", "sparse_dist"), "rows": ("hot_cold", "interleaved")}
"""Placement and pipeline of each side, by the name of the planner's price."""


def with_step_costs(curves: CommCurves, device: torch.device) -> CommCurves:
    """Adds the measured costs per step to curves with measured local costs.

    Collective: every rank of the default process group calls this, in the same order.
    """
    config = TrainConfig(
        data=DataConfig(batch_size=_BATCH_SIZE, max_rows=_MAX_ROWS, heldout_steps=1),
        model=ModelConfig(embedding_dim=_DIM, dense_layers=_HIDDEN, over_layers=_HIDDEN),
        sharding=ShardingConfig(hot_rows=0),
    )
    source = make_source(config.data, config.seed)
    planner = hot_cold_planner(
        Topology(world_size=dist.get_world_size(), compute_device=device.type),
        curves=replace(curves, dense=measure_dense(config, device)),
        batch_size=_BATCH_SIZE,
        debug=False,
    )
    planner.plan(unsharded_model(config, source), hot_cold_sharders())
    priced_ms = planner.decision.priced_ms
    rank_batches = source.batches(dist.get_rank(), dist.get_world_size())
    batches = [batch.to(device) for batch in itertools.islice(rank_batches, _NUM_BATCHES)]
    steps: dict[str, Iterator[Tensor]] = {}
    for side, (placement, kind) in _SIDES.items():
        pipeline = PipelineConfig(kind=kind)
        if kind == "interleaved":
            pipeline = replace(pipeline, num_micro_batches=1, lookahead=True)
        trainer = Trainer(replace(config, pipeline=pipeline), source, placement, device)
        steps[side] = trainer.steps(itertools.cycle(batches))
    ms = _step_ms(steps)
    own_ms = {side: max(0.0, ms[side] - priced_ms[side]) for side in _SIDES}
    local = curves.local
    return replace(
        curves,
        local=replace(
            local,
            stock=replace(local.stock, step_ms=own_ms["stock"]),
            hot_cold=replace(local.hot_cold, step_ms=own_ms["rows"]),
        ),
    )


def _step_ms(steps: dict[str, Iterator[Tensor]]) -> dict[str, float]:
    """Time of a step of each side, which take turns: the median, on the slowest rank."""
    began_s = time.perf_counter()
    for own in steps.values():
        _take(own, _WARMUP_STEPS)
    turn_s = (time.perf_counter() - began_s) * (1 + _TIMED_STEPS) / _WARMUP_STEPS
    fitting = times_fitting(_BUDGET_S, turn_s)
    turns: dict[str, list[float]] = {side: [] for side in steps}
    for _ in range(int(min(_MOST_TURNS, max(_FEWEST_TURNS, fitting)))):
        for side, own in steps.items():
            _take(own, 1)
            dist.barrier()
            start_s = time.perf_counter()
            _take(own, _TIMED_STEPS)
            turns[side].append((time.perf_counter() - start_s) / _TIMED_STEPS * 1e3)
    slowest = torch.tensor(list(turns.values()), dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return {side: median(row) for side, row in zip(turns, slowest.tolist())}


def _take(steps: Iterator[Tensor], number: int) -> None:
    for loss in itertools.islice(steps, number):
        loss.item()
