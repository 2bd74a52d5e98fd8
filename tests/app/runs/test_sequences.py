"""The task of a sequence run: which samples are counted, which trained on. Its training is checked
with the notebook that shows it."""

from __future__ import annotations

import dataclasses

import pytest

from torchrec_picasso.app.runs.sequences import SequenceTask
from torchrec_picasso.app.zoo.data.click_log import generate_log, samples_of_log
from torchrec_picasso.errors import InputError


def make_task() -> SequenceTask:
    clicks = samples_of_log(
        generate_log(200), user="user", targets=["item", "category"], profiles=["user"]
    )
    return SequenceTask(clicks=clicks, batch_size=10, heldout_steps=3, steps=4)


def test_samples_are_taken_once_and_in_time_order() -> None:
    task, world_size = make_task(), 2
    trained = [list(task.training(rank, world_size)) for rank in range(world_size)]
    batches = [*task.heldout(world_size), *(of for pair in zip(*trained) for of in pair)]
    assert len(batches) == (3 + 4) * world_size
    items = [item for of in batches for item in of.sparse_features["item"].values().tolist()]
    assert items == task.clicks.targets["item"][: len(items)].tolist()


def test_too_few_clicks_are_refused() -> None:
    task = dataclasses.replace(make_task(), steps=100)
    with pytest.raises(InputError, match=r"samples, but 2,060 are needed .* give a longer log"):
        next(task.training(0, 2))
