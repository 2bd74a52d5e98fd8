"""Wrappers of an optimizer see the gradients and rates of the plain loop: clipping, schedules.

Of optimizers that only hot/cold tables have on the CPU: checkpoints, and modules trained in turn.
What they compute is compared elsewhere: with FBGEMM's formulas over whole tables, for rows in
``tests/storage/test_row_updates.py`` and for whole trainings in ``test_against_stock.py``.
"""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torchrec
from torch import Tensor, nn
from torchrec.datasets.utils import Batch
from torchrec.distributed import DistributedModelParallel
from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

from tests.sharding import jobs
from tests.train_pipeline import programs
from tests.train_pipeline.runs import (
    Run,
    batches_of,
    compare_runs,
    pipeline_of,
    plain_steps,
    run_to_the_end,
)
from torchrec_picasso.app.launch.run_ranks import RankError, run_ranks

JOB = jobs.Job(placement={"*": 2, "one_row": 1}, tables=jobs.ODD, num_steps=6)
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
    (group,) = jobs.dense_optimizer(model).param_groups
    return _ClippedSgd(group["params"], lr=0.05)


def _clipped_by_torchrec(how: GradientClipping) -> Callable[..., torch.optim.Optimizer]:
    return lambda model: GradientClippingOptimizer(_keyed(model), how, MAX_NORM)


def _warming_up(model: nn.Module, dense: KeyedOptimizer | None = None) -> torch.optim.Optimizer:
    stages = [
        WarmupStage(WarmupPolicy.LINEAR, max_iters=3, value=0.1),
        WarmupStage(WarmupPolicy.CONSTANT, max_iters=100),
    ]
    return WarmupOptimizer(_with_fused(model, dense or _keyed(model)), stages, lr=0.1)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "plain": jobs.dense_optimizer,
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
    """Sets other rates, like a scheduler between two steps, for tables and for the dense part."""
    tables = {id(group) for group in model.fused_optimizer.param_groups}
    for group in optimizer.param_groups:
        group["lr"] *= 0.7 if id(group) in tables else 0.8


def _run(rank: int, world_size: int) -> dict[tuple[str, int], Run]:
    """Every optimizer under the plain loop (K = 0) and under the pipeline."""
    results: dict[tuple[str, int], Run] = {}
    for name, make in OPTIMIZERS.items():
        for num_micro_batches in (0, 1, 4):
            model = jobs.build(JOB, rank, world_size)
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
            results[name, num_micro_batches] = jobs.result_of(model, []), outputs
    return results


def test_clipping_and_schedules_as_in_the_plain_loop() -> None:
    by_rank = run_ranks(_run, 2, timeout_s=100)
    for name in OPTIMIZERS:
        for num_micro_batches in (1, 4):
            compare_runs(by_rank, (name, num_micro_batches), (name, 0))
        if name != "plain":  # it does something to these gradients
            with pytest.raises(AssertionError):
                compare_runs(by_rank, ("plain", 0), (name, 0))


ADAM_JOB = jobs.Job(
    placement={"a": 2, "b": 0, "*": "bags"},
    optimizer="adam",
    optimizer_kwargs={"lr": 0.1, "eps": 1e-2, "weight_decay": 0.1},
)
SAVED_AT, NUM_STEPS = 3, 7


def _train(model: DistributedModelParallel, rank: int, steps: Sequence[int]) -> list[Tensor]:
    pipeline = pipeline_of(model, num_micro_batches=2)
    return run_to_the_end(pipeline, iter(batches_of(ADAM_JOB, rank, steps)))


def _save_and_resume(rank: int, world_size: int, folder: Path, names: Sequence[str]) -> Any:
    found: dict[str, dict[str, Run]] = {}
    for name in names:
        job = dataclasses.replace(ADAM_JOB, optimizer=name)
        model = jobs.build(job, rank, world_size)
        _train(model, rank, range(SAVED_AT))
        dcp.save(jobs.checkpoint_of(model), checkpoint_id=folder / name)
        rest = range(SAVED_AT, NUM_STEPS)
        runs = {"went on": (_train(model, rank, rest), model)}
        for how in ("resumed", "from step 0"):
            model = jobs.build(job, rank, world_size)
            states = jobs.checkpoint_of(model)
            dcp.load(states, checkpoint_id=folder / name)
            model.load_state_dict(states["model"])
            model.fused_optimizer.load_state_dict(states["optim"])
            if how == "resumed":
                model.fused_optimizer.set_optimizer_step(SAVED_AT)
            runs[how] = _train(model, rank, rest), model
        found[name] = {how: (jobs.result_of(m, []), outputs) for how, (outputs, m) in runs.items()}
    return found


def test_a_run_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    names = ["adam", "partial_rowwise_lamb"]
    by_rank = run_ranks(_save_and_resume, 2, tmp_path, names, timeout_s=100)
    for name in names:
        found = [on_rank[name] for on_rank in by_rank]
        compare_runs(found, "resumed", "went on")
        states = {key.rpartition(".")[2] for key in found[0]["went on"][0].states}
        assert states == {"momentum1", "exp_avg_sq"}
        with pytest.raises(AssertionError):  # the step count is no part of TorchRec's state dicts
            compare_runs(found, "from step 0", "went on")


class _Towers(nn.Module):
    """Two collections under one linear layer, of which some steps train only one."""

    def __init__(self, is_frozen: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = programs.ebc("f"), programs.ebc("g")
        self.over = nn.Linear(programs.DIM, 1)
        self.is_frozen, self.num_calls = is_frozen, 0

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        first = self.first(batch.sparse_features)["f"]
        second = self.second(batch.sparse_features)["g"]
        is_odd = not self.is_frozen and self.num_calls % 2
        pooled = first.detach() + second if is_odd else first + second.detach()
        self.num_calls += 1
        out = self.over(pooled).squeeze(1)
        return ((out - batch.labels) ** 2).sum() / 6, out.detach()


def _in_turn(rank: int, world_size: int) -> Any:
    """The plain loop, and the pipeline on data that ends or begins late on rank 1."""
    found = {}
    for is_frozen in (False, True):
        empty = set()
        if rank == 1:
            empty = {0, 1} if is_frozen else {3, 4, 5, 6, 7}
        batches = [
            programs.batch_of(rank, step, num_samples=0 if step in empty else 6)
            for step in range(8)
        ]
        for is_plain in (True, False):
            model = programs.build(
                _Towers(is_frozen),
                stock=[],
                optimizer=torchrec.optim.Adam,
                optimizer_kwargs={"lr": 0.1, "eps": 1e-2, "weight_decay": 0.5},
            )
            if is_plain:
                plain_steps(model, batches)
            else:
                given = batches if is_frozen else [b for b in batches if len(b.labels)]
                run_to_the_end(pipeline_of(model, num_micro_batches=1), iter(given))
            found[is_frozen, is_plain] = programs.left_behind(model), jobs.replicas_of(model)
    return found


def test_ranks_without_samples_leave_what_the_others_leave() -> None:
    """Adam and its decay move a row by a gradient of zero, so an update too many shows."""
    by_rank = run_ranks(_in_turn, 2, timeout_s=100)
    for is_frozen in (False, True):
        for found in by_rank:
            torch.testing.assert_close(
                found[is_frozen, False], found[is_frozen, True], rtol=1e-4, atol=2e-5
            )
        first, second = (found[is_frozen, False][1] for found in by_rank)
        assert first
        torch.testing.assert_close(first, second, rtol=0, atol=0)


def _one_row(rank: int, world_size: int, name: str) -> None:
    jobs.build(
        dataclasses.replace(ADAM_JOB, tables=jobs.ODD, optimizer=name, placement={"*": 1}),
        rank,
        world_size,
    )


def test_partial_state_of_one_row_is_refused() -> None:
    run_ranks(_one_row, 2, "adam", timeout_s=60)
    with pytest.raises(RankError, match=r"'one_row': its shards have \[1, 0\] rows"):
        run_ranks(_one_row, 2, "partial_rowwise_adam", timeout_s=60)
