"""Hot/cold tables run unchanged in TorchRec's pipelines, bit-equal to the plain loop."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torchrec.datasets.utils import Batch
from torchrec.distributed.train_pipeline import (
    EvalPipelineSparseDist,
    TrainPipelineBase,
    TrainPipelineSparseDist,
)
from torchrec.distributed.train_pipeline.train_pipelines import TrainPipelineSparseDistLite

from tests.sharding.jobs import (
    CPU,
    ODD,
    Job,
    Result,
    build,
    dense_optimizer,
    make_batch,
    result_of,
    train,
    whole,
)
from torchrec_picasso.app.launch.run_ranks import run_ranks

JOB = Job(placement={"*": 2, "one_row": 1}, tables=ODD, batch_sizes=(6, 4), num_steps=8)
PIPELINES = {
    "base": TrainPipelineBase,
    "sparse_dist": TrainPipelineSparseDist,
    "sparse_dist_lite": TrainPipelineSparseDistLite,
}


def _batches(rank: int) -> Iterator[Batch]:
    return iter([make_batch(JOB, rank, step) for step in range(JOB.num_steps)])


def _run_all(rank: int, world_size: int) -> dict[str, Any]:
    model = build(JOB, rank, world_size)
    results: dict[str, Any] = {
        "plain": result_of(model, train(model, JOB, rank, range(JOB.num_steps)))
    }
    with torch.no_grad():
        model.eval()
        results["plain_eval"] = [model(batch)[1] for batch in _batches(rank)]
    for name, pipeline_class in PIPELINES.items():
        trained = build(JOB, rank, world_size)
        pipeline = pipeline_class(trained, dense_optimizer(trained), CPU)
        batches, num_steps = _batches(rank), 0
        while True:
            try:
                pipeline.progress(batches)
            except StopIteration:
                break
            num_steps += 1
        assert num_steps == JOB.num_steps
        results[name] = result_of(trained, [])
        if name == "sparse_dist":
            results["pipelined_modules"] = len(pipeline._pipelined_modules)
    model.eval()
    evaluation = EvalPipelineSparseDist(model, dense_optimizer(model), CPU)
    batches, outputs = _batches(rank), []
    while True:
        try:
            outputs.append(evaluation.progress(batches))
        except StopIteration:
            break
    results["eval"] = outputs
    return results


@pytest.fixture(scope="module")
def by_rank() -> list[dict[str, Any]]:
    return run_ranks(_run_all, 2, timeout_s=150)


@pytest.mark.parametrize("name", list(PIPELINES))
def test_trains_as_the_plain_loop(by_rank: list[dict[str, Any]], name: str) -> None:
    plain: list[Result] = [rank["plain"] for rank in by_rank]
    piped: list[Result] = [rank[name] for rank in by_rank]
    for kind in ("weights", "states"):
        torch.testing.assert_close(whole(piped, kind), whole(plain, kind), rtol=0, atol=0)
    for mine, its in zip(piped, plain):
        torch.testing.assert_close(mine.dense, its.dense, rtol=0, atol=0)


def test_input_dist_is_pipelined(by_rank: list[dict[str, Any]]) -> None:
    assert all(rank["pipelined_modules"] == 1 for rank in by_rank)


def test_evaluates_as_the_plain_loop(by_rank: list[dict[str, Any]]) -> None:
    for rank in by_rank:
        assert len(rank["eval"]) == JOB.num_steps
        for piped, plain in zip(rank["eval"], rank["plain_eval"]):
            torch.testing.assert_close(
                piped[1] if isinstance(piped, tuple) else piped, plain, rtol=0, atol=0
            )
