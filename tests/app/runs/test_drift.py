"""The task of a drifting run: what is counted, trained on and used. Its training is checked with
the notebook that shows it."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from torchrec_picasso.app.runs.drift import DriftTask, most_used
from torchrec_picasso.app.zoo.data.drifting import generate_drifting
from torchrec_picasso.errors import InputError

WORLD_SIZE, PER_HOUR = 2, 70


def make_task() -> DriftTask:
    ids, hours = generate_drifting(4, PER_HOUR, num_rows=50)
    return DriftTask(ids_N=ids, hour_N=hours + 3, counted_hours=1, num_hot=5, batch_size=15)


def test_what_is_counted_is_not_trained_on() -> None:
    task = make_task()
    of_ranks = [list(task.batches(rank, WORLD_SIZE)) for rank in range(WORLD_SIZE)]
    trained = [
        row
        for of_step in zip(*of_ranks)
        for batch in of_step
        for row in batch.sparse_features["id"].values().tolist()
    ]
    assert task.num_steps(WORLD_SIZE) == len(of_ranks[0]) == 7
    assert trained == task.ids_N[PER_HOUR:][: 7 * WORLD_SIZE * 15].tolist()
    assert task.first_hot_rows().tolist() == most_used(task.ids_N[:PER_HOUR], 5).tolist()


def test_uses_are_the_distinct_rows_of_each_batch() -> None:
    task = make_task()
    uses = task.uses(WORLD_SIZE)
    by_batch = {key: of["row"].tolist() for key, of in uses.groupby(["step", "rank"])}
    assert len(by_batch) == 7 * WORLD_SIZE
    for rank in range(WORLD_SIZE):
        for step, batch in enumerate(task.batches(rank, WORLD_SIZE)):
            ids = batch.sparse_features["id"].values().numpy()
            assert by_batch[step, rank] == np.unique(ids).tolist()
    hours = uses.groupby("step")["hour"].unique()
    assert [of.tolist() for of in hours] == [
        [4 + step * WORLD_SIZE * 15 // PER_HOUR] for step in range(7)
    ]
    assert uses["hour"].is_monotonic_increasing


def test_most_used_rows() -> None:
    assert most_used([7, 3, 3, 9, 9, 1, 7, 3], 2).tolist() == [3, 7]  # 7 and 9 alike
    assert most_used([4, 2], 5).tolist() == [2, 4]


@pytest.mark.parametrize(
    "change", [{"counted_hours": 0}, {"counted_hours": 4}, {"batch_size": 200}]
)
def test_too_little_to_count_or_train_on_is_refused(change: dict[str, int]) -> None:
    with pytest.raises(InputError, match=r"change counted_hours, or give a longer stream"):
        dataclasses.replace(make_task(), **change).num_steps(WORLD_SIZE)
