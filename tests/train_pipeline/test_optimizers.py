"""What wraps an optimizer sees the gradients and rates of the plain loop: clipping, schedules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torchrec.distributed import DistributedModelParallel
from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

from tests.sharding.jobs import ODD, Job, build, dense_optimizer, result_of
from tests.train_pipeline.runs import Run, batches_of, compare_runs, pipeline_of, plain_steps
from torchrec_picasso.app.launch.run_ranks import run_ranks

JOB = Job(placement={"*": 2, "one_row": 1}, tables=ODD, num_steps=6)
MAX_NORM = 0.05
"""Far below the norms of this job's gradients."""


def _keyed(model: DistributedModelParallel) -> KeyedOptimizer:
    parameters = {name: p for name, p in model.named_parameters() if "over" in name}
    return KeyedOptimizerWrapper(parameters, lambda params: torch.optim.SGD(params, lr=0.05))


def _with_fused(model: DistributedModelParallel, dense: KeyedOptimizer) -> CombinedOptimizer:
    return CombinedOptimizer([("fused", model.fused_optimizer), ("dense", dense)])


class _ClippedSgd(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        (group,) = self.param_groups
        torch.nn.utils.clip_grad_norm_(group["params"], MAX_NORM)
        return super().step(closure)


def _clipped_sgd(model: DistributedModelParallel) -> torch.optim.Optimizer:
    (group,) = dense_optimizer(model).param_groups
    return _ClippedSgd(group["params"], lr=0.05)


def _clipped_by_torchrec(how: GradientClipping) -> Callable[..., torch.optim.Optimizer]:
    return lambda model: GradientClippingOptimizer(_keyed(model), how, MAX_NORM)


def _warming_up(
    model: DistributedModelParallel, dense: KeyedOptimizer | None = None
) -> torch.optim.Optimizer:
    stages = [
        WarmupStage(WarmupPolicy.LINEAR, max_iters=3, value=0.1),
        WarmupStage(WarmupPolicy.CONSTANT, max_iters=100),
    ]
    return WarmupOptimizer(_with_fused(model, dense or _keyed(model)), stages, lr=0.1)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "plain": dense_optimizer,
    "clip_grad_norm_": _clipped_sgd,
    "clipping by norm": _clipped_by_torchrec(GradientClipping.NORM),
    "clipping by value": _clipped_by_torchrec(GradientClipping.VALUE),
    "warm-up": _warming_up,
    "warm-up over clipping": lambda model: _warming_up(
        model, GradientClippingOptimizer(_keyed(model), GradientClipping.NORM, MAX_NORM)
    ),
    "rates per step": lambda model: _with_fused(model, _keyed(model)),
}


def _set_rates(model: DistributedModelParallel, optimizer: torch.optim.Optimizer) -> None:
    """As a scheduler does between two steps, other rates for tables and for the dense part."""
    tables = {id(group) for group in model.fused_optimizer.param_groups}
    for group in optimizer.param_groups:
        group["lr"] *= 0.7 if id(group) in tables else 0.8


def _run(rank: int, world_size: int) -> dict[tuple[str, int], Run]:
    """Every optimizer under the plain loop (K = 0) and under the pipeline."""
    results: dict[tuple[str, int], Run] = {}
    for name, make in OPTIMIZERS.items():
        for num_micro_batches in (0, 1, 4):
            model = build(JOB, rank, world_size)
            optimizer = make(model)
            listed = batches_of(JOB, rank, range(JOB.num_steps))
            pipeline = pipeline_of(
                model, optimizer=optimizer, num_micro_batches=num_micro_batches or 1
            )
            batches, outputs = iter(listed), list[Tensor]()
            for step in range(JOB.num_steps):
                if name == "rates per step" and step:
                    _set_rates(model, optimizer)
                if num_micro_batches:
                    outputs.append(pipeline.progress(batches))
                else:
                    outputs += plain_steps(model, [listed[step]], optimizer)
            results[name, num_micro_batches] = result_of(model, []), outputs
    return results


def test_clipping_and_schedules_as_in_the_plain_loop() -> None:
    by_rank = run_ranks(_run, 2, timeout_s=100)
    for name in OPTIMIZERS:
        for num_micro_batches in (1, 4):
            compare_runs(by_rank, (name, num_micro_batches), (name, 0))
        if name != "plain":  # it does something to these gradients
            with pytest.raises(AssertionError):
                compare_runs(by_rank, ("plain", 0), (name, 0))
