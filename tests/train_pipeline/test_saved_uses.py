"""What was counted of rows goes on under another plan: other hot rows, homes and ranks."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tests.sharding.jobs import ODD, Job, build
from tests.train_pipeline.runs import batches_of, pipeline_of
from torchrec_picasso import Refresh
from torchrec_picasso.app.launch.run_ranks import run_ranks
from torchrec_picasso.refresh.saved_uses import SavedUses

JOB = Job(placement={"*": 3, "one_row": 1}, tables=ODD)
SELDOM = Refresh(every_steps=1000, check_steps=None)


def of_rows(saved: SavedUses | None) -> dict[str, dict[int, float]]:
    """Uses by row; those that there are."""
    assert saved is not None
    return {
        name: {int(row): float(use) for row, use in zip(rows, uses) if use}
        for name, (rows, uses) in saved.uses_by_table.items()
    }


def counted(rank: int, world_size: int) -> SavedUses:
    pipeline = pipeline_of(build(JOB, rank, world_size), refresh=SELDOM)
    batches = iter(batches_of(JOB, rank, range(5)))
    for _ in range(5):
        pipeline.progress(batches)
    saved = pipeline.saved_uses()
    assert saved is not None
    return saved


def count_on(rank: int, world_size: int, saved: SavedUses, num_hot: int) -> Any:
    job = dataclasses.replace(JOB, placement={"*": num_hot, "one_row": 0})
    model = build(job, rank, world_size)
    model.eval()  # nothing is counted
    pipeline = pipeline_of(model, refresh=SELDOM)
    assert pipeline.saved_uses() is None
    pipeline.go_on_with(saved)
    pipeline.progress(iter(batches_of(job, rank, range(1))))
    again = pipeline.saved_uses()
    assert again is not None
    return of_rows(again), again.num_batches


@pytest.mark.parametrize(("world_size", "num_hot"), [(2, 6), (3, 5)])
def test_uses_go_on_under_another_plan(world_size: int, num_hot: int) -> None:
    first, second = run_ranks(counted, 2, timeout_s=60)
    expected = of_rows(first)
    assert expected == of_rows(second)
    assert sum(map(len, expected.values())) > 10
    assert first.num_batches > 0
    for found, num_batches in run_ranks(count_on, world_size, first, num_hot, timeout_s=60):
        assert num_batches == first.num_batches
        for name, uses in found.items():
            assert uses == pytest.approx(expected.get(name, {})), name
        assert set(found) >= {name for name, uses in expected.items() if uses} - {"one_row"}
