"""Measures what a step costs once: all that prices of tables and of the dense part leave out.

Two pipelines train a small DLRM: TorchRec's with stock tables, this package's with hot/cold tables
in one micro-batch. The time of a step less its predicted time is the pipeline's own work, the dense
optimizer, and waits that grow with the number of exchanges, not with bytes.
"""

from __future__ import annotations

import itertools
import logging
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
_BUDGET_S, _FEWEST_TURNS = 4.0, 3
_SIDES = {"stock": ("table_wise", "sparse_dist"), "rows": ("hot_cold", "interleaved")}
"""Placement and pipeline of each side, by the name of the planner's price."""


class StepProbe:
    """Times steps of both sides, in turns between other measurements: the speed of a shared core
    changes within seconds, and turns that are spread over a calibration see what its other parts
    see.

    Collective: every rank of the default process group makes one and
    calls its methods, in the same order.

    Args:
        device: Device of the models.
        num_turns: Number of times that :meth:`take_turn` is called.
    """

    def __init__(self, device: torch.device, num_turns: int) -> None:
        self._config = TrainConfig(
            data=DataConfig(batch_size=_BATCH_SIZE, max_rows=_MAX_ROWS, heldout_steps=1),
            model=ModelConfig(embedding_dim=_DIM, dense_layers=_HIDDEN, over_layers=_HIDDEN),
            sharding=ShardingConfig(hot_rows=0),
        )
        self._source, self._device = make_source(self._config.data, self._config.seed), device
        self._steps = {side: self._train(side) for side in _SIDES}
        began_s = time.perf_counter()
        for steps in self._steps.values():
            _take(steps, _WARMUP_STEPS)
        turn_s = (time.perf_counter() - began_s) * (1 + _TIMED_STEPS) / _WARMUP_STEPS
        fitting = times_fitting(_BUDGET_S, turn_s)
        # of the calls of take_turn, those that time steps
        self._share = min(1.0, max(_FEWEST_TURNS, fitting) / num_turns)
        self._num_calls = 0
        self._turns_ms: dict[str, list[float]] = {side: [] for side in self._steps}

    def _train(self, side: str) -> Iterator[Tensor]:
        """Losses of a small model, step by step."""
        placement, kind = _SIDES[side]
        pipeline = PipelineConfig(kind=kind)
        if kind == "interleaved":
            pipeline = replace(pipeline, num_micro_batches=1, lookahead=True)
        config = replace(self._config, pipeline=pipeline)
        trainer = Trainer(config, self._source, placement, self._device)
        rank_batches = self._source.batches(dist.get_rank(), dist.get_world_size())
        batches = [batch.to(self._device) for batch in itertools.islice(rank_batches, _NUM_BATCHES)]
        return trainer.steps(itertools.cycle(batches))

    def take_turn(self) -> None:
        """Times a few steps of each side; in some calls only, if steps are slow. Collective."""
        self._num_calls += 1
        if int(self._num_calls * self._share) == int((self._num_calls - 1) * self._share):
            return
        for side, steps in self._steps.items():
            _take(steps, 1)
            dist.barrier()
            start_s = time.perf_counter()
            _take(steps, _TIMED_STEPS)
            self._turns_ms[side].append((time.perf_counter() - start_s) / _TIMED_STEPS * 1e3)

    def add_costs(self, curves: CommCurves) -> CommCurves:
        """Adds the costs per step to curves with measured local costs: the median over turns of the
        slowest rank, less the predicted step. Hot/cold tables get at least stock's: on the CPU
        they take more operators, so less is noise."""
        planner = hot_cold_planner(
            Topology(world_size=dist.get_world_size(), compute_device=self._device.type),
            curves=replace(curves, dense=measure_dense(self._config, self._device)),
            batch_size=_BATCH_SIZE,
            debug=False,
        )
        logger = logging.getLogger("torchrec_picasso.planner")
        # its warning of a plan without effect would be of this small model
        was_disabled, logger.disabled = logger.disabled, True
        try:
            planner.plan(unsharded_model(self._config, self._source), hot_cold_sharders())
        finally:
            logger.disabled = was_disabled
        slowest = torch.tensor(list(self._turns_ms.values()), dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        own_ms = {
            side: max(0.0, median(turns_ms) - planner.decision.priced_ms[side])
            for side, turns_ms in zip(self._turns_ms, slowest.tolist())
        }
        stock = replace(curves.local.stock, step_ms=own_ms["stock"])
        hot_cold = replace(curves.local.hot_cold, step_ms=max(own_ms.values()))
        return replace(curves, local=replace(curves.local, stock=stock, hot_cold=hot_cold))


def _take(steps: Iterator[Tensor], number: int) -> None:
    for loss in itertools.islice(steps, number):
        loss.item()
