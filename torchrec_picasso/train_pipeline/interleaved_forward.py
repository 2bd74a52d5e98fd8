"""What a sharded module's forward is while the pipeline has the model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

from torchrec.distributed.types import LazyAwaitable, LazyNoWait

from torchrec_picasso._torchrec import PipelinedForward

__all__ = ["InterleavedForward"]


class InterleavedForward(PipelinedForward):
    """Stands in for a sharded module's forward while a micro-batch runs."""

    _taken: Callable[[], Any] | None = None
    _parts: Sequence[InterleavedForward] = ()
    _join: Callable[[Sequence[LazyAwaitable[Any]]], LazyAwaitable[Any]] | None = None

    def of_part(self, module: Any, name: str) -> InterleavedForward:
        """The forward of a part of the module, on the same input.

        Args:
            module: The part.
            name: Of the part.
        """
        part = copy.copy(self)
        part._module, part._name = module, name
        module.forward = part
        return part

    def put_together(
        self,
        parts: Sequence[InterleavedForward],
        join: Callable[[Sequence[LazyAwaitable[Any]]], LazyAwaitable[Any]],
    ) -> None:
        """From now on a call gives what calls of the parts give, joined."""
        self._parts, self._join = parts, join

    def take(self, output: Callable[[], Any]) -> None:
        """The next call gives what this gives then."""
        self._taken = output

    def give(self, output: Any) -> None:
        """The next call returns this output."""
        is_lazy = isinstance(output, LazyAwaitable)
        self._taken = lambda: output if is_lazy else LazyNoWait(output)

    def of_whole_batch(self) -> Any:
        """What TorchRec's pipelined forward returns."""
        return super().__call__()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Gives what the micro-batch asks for."""
        if self._join is not None:
            return self._join([part() for part in self._parts])
        taken, self._taken = self._taken, None
        assert taken is not None, f"{self._name} is called twice in one forward"
        return taken()
