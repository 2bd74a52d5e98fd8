"""The states of a pipeline: which may follow which, and what a failed step leaves."""

from __future__ import annotations

import pytest

from torchrec_picasso.errors import PicassoError
from torchrec_picasso.train_pipeline.lifecycle import Lifecycle, State


def _attached() -> Lifecycle:
    lifecycle = Lifecycle()
    lifecycle.change_to(State.ATTACHED)
    return lifecycle


def test_a_step_begins_and_ends_attached() -> None:
    lifecycle = _attached()
    with lifecycle.in_step():
        with pytest.raises(PicassoError, match="did not end"):
            lifecycle.check_step()
        with pytest.raises(PicassoError, match="is in a step and cannot become detached"):
            lifecycle.change_to(State.DETACHED)
    lifecycle.check_step()
    assert lifecycle.state is State.ATTACHED


@pytest.mark.parametrize("state", [State.NEW, State.DETACHED])
def test_nothing_runs_before_modules_are_taken_over(state: State) -> None:
    lifecycle = Lifecycle()
    lifecycle.change_to(state)
    with pytest.raises(PicassoError, match="cannot become in a step"), lifecycle.in_step():
        pass


@pytest.mark.parametrize("after", [State.ATTACHED, State.DETACHED, State.NEW])
def test_only_reset_leaves_a_failed_step(after: State) -> None:
    lifecycle = _attached()
    with pytest.raises(KeyError), lifecycle.in_step():
        raise KeyError
    lifecycle.change_to(after)  # as detach() and attach() do
    assert lifecycle.state is State.FAILED
    with pytest.raises(PicassoError, match=r"call reset\(\) on all ranks"):
        lifecycle.check_step()
    lifecycle.reset()
    assert lifecycle.state is after
