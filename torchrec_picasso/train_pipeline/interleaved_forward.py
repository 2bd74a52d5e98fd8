"""The replacement of a sharded module's forward while the model is attached to the pipeline."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

from torchrec.distributed.types import LazyAwaitable, LazyNoWait

from torchrec_picasso._torchrec import PipelinedForward

__all__ = ["InterleavedForward"]


class InterleavedForward(PipelinedForward):
    """Returns a sharded module's output for the current micro-batch, which the pipeline sets.

    It replaces ``forward`` of the module, as TorchRec's ``PipelinedForward`` does.
    """

    _taken: Callable[[], Any] | None = None
    _parts: Sequence[InterleavedForward] = ()
    _join: Callable[[Sequence[LazyAwaitable[Any]]], LazyAwaitable[Any]] | None = None

    def for_part(self, module: Any, name: str) -> InterleavedForward:
        """Copies this forward for a part of the module with the same input."""
        part = copy.copy(self)
        part._module, part._name = module, name
        module.forward = part
        return part

    def put_together(
        self,
        parts: Sequence[InterleavedForward],
        join: Callable[[Sequence[LazyAwaitable[Any]]], LazyAwaitable[Any]],
    ) -> None:
        """Makes later calls return the joined outputs of the parts."""
        self._parts, self._join = parts, join

    def take(self, output: Callable[[], Any]) -> None:
        """Makes the next call return the result of ``output``, which runs at that call."""
        self._taken = output

    def give(self, output: Any) -> None:
        """Makes the next call return this output."""
        is_lazy = isinstance(output, LazyAwaitable)
        self._taken = lambda: output if is_lazy else LazyNoWait(output)

    def whole_batch(self) -> Any:
        """Returns the output of TorchRec's pipelined forward."""
        return super().__call__()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the output for the current micro-batch; arguments are ignored."""
        if self._join is not None:
            return self._join([part() for part in self._parts])
        taken, self._taken = self._taken, None
        assert taken is not None, f"{self._name} is called twice in one forward"
        return taken()
