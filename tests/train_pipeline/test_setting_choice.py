"""The choice of micro-batches and lookahead: the fastest measured, the same on all ranks, exact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.sharding.jobs import PLAIN, Job, build, result_of
from tests.train_pipeline.runs import Run, assert_same_runs, batches_of, pipeline_of, plain_steps
from torchrec_picasso.errors import CompatError
from torchrec_picasso.launch.run_ranks import run_ranks
from torchrec_picasso.train_pipeline.schedule import Setting
from torchrec_picasso.train_pipeline.setting_choice import SettingChoice, candidates

CPU = torch.device("cpu")


class _OneRank:
    def size(self) -> int:
        return 1


def _settle(choice: SettingChoice, step_s: Callable[[Setting], float]) -> int:
    """Trains until the choice is settled; gives the number of steps."""
    pg: Any = _OneRank()
    in_flight = [choice.current] * 3
    for step in range(1, 1000):
        choice.note_step(in_flight, step_s(in_flight[0]), pg, CPU)
        if choice.is_settled:
            return step
        in_flight = [*in_flight[1:], choice.current]
    raise AssertionError("never settled")


def test_the_fastest_is_chosen() -> None:
    choice = SettingChoice(candidates(None, True))
    steps = _settle(choice, lambda setting: 1.0 if setting.num_micro_batches == 4 else 1.1)
    assert choice.current == Setting(4, lookahead=True)
    assert steps <= 40
    assert (
        "4 micro-batches with lookahead; the fastest of 1 micro-batch with lookahead: 1100 ms"
        in (str(choice))
    )


def test_of_equals_the_plainest_is_chosen() -> None:
    choice = SettingChoice(candidates(None, None))
    _settle(choice, lambda setting: 1.0 - 0.001 * setting.num_micro_batches)
    assert choice.current == Setting(1, lookahead=True)


def test_one_slow_step_does_not_decide() -> None:
    choice = SettingChoice(candidates(None, True))
    hiccups = iter([9.0])
    _settle(
        choice,
        lambda setting: next(hiccups, 1.0) if setting.num_micro_batches == 2 else 2.0,
    )
    assert choice.current.num_micro_batches == 2


def test_what_is_given_is_not_tried() -> None:
    assert SettingChoice(candidates(4, False)).is_settled
    looks = SettingChoice(candidates(4, None))
    _settle(looks, lambda setting: 1.0 if setting.lookahead else 0.5)
    assert looks.current == Setting(4, lookahead=False)


def test_a_reason_for_whole_batches_leaves_those_or_is_raised() -> None:
    choice = SettingChoice(candidates(None, True))
    choice.restrict("BatchNorm")
    assert choice.is_settled
    assert choice.current.num_micro_batches == 1
    with pytest.raises(CompatError, match="BatchNorm"):
        SettingChoice(candidates(4, True)).restrict("BatchNorm")
    SettingChoice(candidates(4, True)).restrict(None)


def _automatic(rank: int, world_size: int) -> tuple[Run, Run, Setting, str]:
    job = Job(placement={"*": 2}, tables=PLAIN)
    batches = batches_of(job, rank, range(90))
    plain = build(job, rank, world_size)
    expected = plain_steps(plain, batches)
    model = build(job, rank, world_size)
    pipeline = pipeline_of(model, num_micro_batches=None, lookahead=None)
    iterator = iter(batches)
    outputs = [pipeline.progress(iterator) for _ in batches]
    chosen = Setting(pipeline.num_micro_batches, pipeline.lookahead)
    return (
        (result_of(model, []), outputs),
        (result_of(plain, []), expected),
        chosen,
        pipeline.summary(),
    )


def test_a_pipeline_that_chooses_trains_exactly_and_alike_on_all_ranks() -> None:
    by_rank = run_ranks(_automatic, 2, timeout_s=100)
    assert_same_runs([of[0] for of in by_rank], [of[1] for of in by_rank])
    assert by_rank[0][2] == by_rank[1][2]
    assert by_rank[0][3] == by_rank[1][3]
    assert "the fastest of" in by_rank[0][3].splitlines()[-1]
