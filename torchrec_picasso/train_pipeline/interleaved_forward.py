"""What a sharded module's forward is while the pipeline has the model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torchrec.distributed.types import LazyNoWait

from torchrec_picasso._torchrec import PipelinedForward
from torchrec_picasso.rows.batch_rows import PartRows

__all__ = ["InterleavedForward"]


class InterleavedForward(PipelinedForward):
    """Stands in for a sharded module's forward while a micro-batch runs."""

    _taken: Callable[[], Any] | None = None

    def take(self, rows: PartRows) -> None:
        """The next call gives the module's output from these rows, of the micro-batch."""
        self._taken = partial(self._module.output, rows)

    def give(self, output: Any) -> None:
        """The next call returns this output."""
        self._taken = lambda: LazyNoWait(output)

    def of_whole_batch(self) -> Any:
        """What TorchRec's pipelined forward returns."""
        return super().__call__()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Gives what the micro-batch asks for."""
        taken, self._taken = self._taken, None
        assert taken is not None, f"{self._name} is called twice in one forward"
        return taken()
