"""What users do between two steps: save, load, evaluate; rows fetched ahead must not be stale."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.sharding.jobs import CPU, ODD, Job, build, dense_optimizer, make_batch, result_of, whole
from torchrec_picasso import InterleavedTrainPipeline
from torchrec_picasso.app.launch.run_ranks import run_ranks

IN_ONE = Job(placement={"*": 2, "one_row": 0}, tables=ODD, num_steps=9)
JOBS = {"one wave": IN_ONE, "waves": dataclasses.replace(IN_ONE, waves={"a": 1, "d": 1})}
EVALUATED = (5, 6)  # these batches are evaluated, not trained on


def _plain(job: Job, rank: int, world_size: int) -> tuple[Any, list[Tensor]]:
    model = build(job, rank, world_size)
    optimizer, outputs = dense_optimizer(model), []
    start = copy.deepcopy(model.state_dict())
    for step in range(job.num_steps):
        if step == 3:
            model.load_state_dict(start)
        batch = make_batch(job, rank, step)
        if step in EVALUATED:
            model.eval()
            with torch.no_grad():
                outputs.append(model(batch)[1])
            model.train()
            continue
        model.fused_optimizer.zero_grad()
        optimizer.zero_grad()
        loss, output = model(batch)
        loss.backward()
        optimizer.step()
        outputs.append(output)
    return result_of(model, []), outputs


def _interleaved(
    job: Job, rank: int, world_size: int, num_micro_batches: int
) -> tuple[Any, list[Tensor]]:
    model = build(job, rank, world_size)
    pipeline = InterleavedTrainPipeline(
        model,
        dense_optimizer(model),
        CPU,
        num_micro_batches=num_micro_batches,
        loss_reduction="sum",
    )
    outputs = []
    start = copy.deepcopy(model.state_dict())
    batches = iter([make_batch(job, rank, step) for step in range(job.num_steps)])
    for step in range(job.num_steps):
        model.state_dict()  # as a checkpoint does
        if step == 3:
            model.load_state_dict(start)
        if step in EVALUATED:
            model.eval()
            with torch.no_grad():
                outputs.append(pipeline.progress(batches))
            model.train()
        else:
            outputs.append(pipeline.progress(batches))
    with pytest.raises(StopIteration):
        pipeline.progress(batches)
    in_waves = " in 2 waves" if job.waves else ""
    assert pipeline.summary().startswith(f"ebc: interleaved{in_waves}\n")
    return result_of(model, []), outputs


def _run(rank: int, world_size: int, job: Job) -> dict[Any, Any]:
    results: dict[Any, Any] = {"plain": _plain(job, rank, world_size)}
    for num_micro_batches in (1, 3):
        results[num_micro_batches] = _interleaved(job, rank, world_size, num_micro_batches)
    return results


@pytest.mark.parametrize("name", list(JOBS))
def test_saved_loaded_and_evaluated_between_steps(name: str) -> None:
    by_rank = run_ranks(_run, 2, JOBS[name], timeout_s=100)
    plain = [rank["plain"] for rank in by_rank]
    for num_micro_batches in (1, 3):
        mine = [rank[num_micro_batches] for rank in by_rank]
        for kind in ("weights", "states"):
            torch.testing.assert_close(
                whole([result for result, _ in mine], kind),
                whole([result for result, _ in plain], kind),
                rtol=1e-4,
                atol=2e-5,
            )
        for (_, outputs), (_, expected) in zip(mine, plain):
            torch.testing.assert_close(outputs, expected, rtol=1e-4, atol=2e-5)
