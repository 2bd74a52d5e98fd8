"""The states of a pipeline: which may follow which, and what a failed step leaves."""

from __future__ import annotations

import pytest

from torchrec_picasso.errors import PicassoError
from torchrec_picasso.train_pipeline.lifecycle import Lifecycle, State


def _attached() -> Lifecycle:
    lifecycle = Lifecycle()
    lifecycle.change_to(State.ATTACHED)
    return lifecycle


def _fail(lifecycle: Lifecycle) -> None:
    with pytest.raises(KeyError), lifecycle.in_step():
        raise KeyError


def test_a_step_begins_and_ends_attached() -> None:
    lifecycle = _attached()
    with lifecycle.in_step():
        assert lifecycle.state is State.IN_STEP
        with pytest.raises(PicassoError, match="did not end"):
            lifecycle.check_step()
    assert lifecycle.state is State.ATTACHED
    lifecycle.check_step()


def test_nothing_runs_before_modules_are_taken_over() -> None:
    for state in (State.NEW, State.DETACHED):
        lifecycle = Lifecycle()
        lifecycle.change_to(state)
        with pytest.raises(PicassoError, match=f"is {state.value} and cannot become in a step"):
            lifecycle.in_step().__enter__()


def test_a_model_is_not_given_back_within_a_step() -> None:
    lifecycle = _attached()
    with lifecycle.in_step(), pytest.raises(PicassoError, match="between two calls of progress"):
        lifecycle.change_to(State.DETACHED)
    assert lifecycle.state is State.ATTACHED


@pytest.mark.parametrize("after", [None, State.DETACHED, State.NEW])
def test_a_failed_step_is_left_by_reset_alone(after: State | None) -> None:
    lifecycle = _attached()
    _fail(lifecycle)
    if after is not None:
        lifecycle.change_to(after)
    assert lifecycle.state is State.FAILED
    with pytest.raises(PicassoError, match=r"call reset\(\) on all ranks"):
        lifecycle.check_step()
    lifecycle.reset()
    assert lifecycle.state is (after or State.ATTACHED)
    lifecycle.reset()
    assert lifecycle.state is (after or State.ATTACHED)
