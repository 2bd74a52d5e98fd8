"""The states of a pipeline and the transitions between them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum

from torchrec_picasso.errors import PicassoError


class State(Enum):
    """The state of a pipeline."""

    NEW = "new"
    """The model has its own forwards; the next step takes over its sharded modules."""
    ATTACHED = "attached"
    """Between two steps, with the forwards of sharded modules replaced."""
    IN_STEP = "in a step"
    """Operations of a schedule run."""
    FAILED = "failed"
    """An operation raised; only :meth:`Lifecycle.reset` leaves this state."""
    DETACHED = "detached"
    """The model was given back, with its own forwards."""


_NEXT = {
    State.NEW: {State.NEW, State.ATTACHED, State.DETACHED},
    State.ATTACHED: {State.NEW, State.IN_STEP, State.DETACHED},
    State.IN_STEP: {State.ATTACHED, State.FAILED},
    State.DETACHED: {State.NEW, State.DETACHED},
}
"""The states that may follow each state."""


class Lifecycle:
    """Holds the state of a pipeline, and refuses transitions that are not allowed."""

    def __init__(self) -> None:
        self.state = self._after_reset = State.NEW

    def change_to(self, state: State) -> None:
        """Changes the state; of a failed pipeline, the state that it has after a reset."""
        if self.state is State.FAILED:
            self._after_reset = state
        elif state in _NEXT[self.state]:
            self.state = state
        else:
            raise PicassoError(
                f"the pipeline is {self.state.value} and cannot become {state.value}; attach, "
                "detach and take steps between two calls of progress()"
            )

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """In this context operations run; an exception makes the pipeline fail."""
        if self.state is State.IN_STEP:  # the outer context changes the state
            yield
            return
        self.change_to(State.IN_STEP)
        try:
            yield
        except BaseException:
            self.state, self._after_reset = State.FAILED, State.ATTACHED
            raise
        self.change_to(State.ATTACHED)

    def check_step(self) -> None:
        """Raises PicassoError if the step before raised, or runs."""
        if self.state in (State.IN_STEP, State.FAILED):
            raise PicassoError(
                "the step before raised and did not end; call reset() on all ranks, which forgets "
                "its batches, then go on"
            )

    def reset(self) -> None:
        """Leaves the failed state; does nothing in other states."""
        if self.state is State.FAILED:
            self.state = self._after_reset
