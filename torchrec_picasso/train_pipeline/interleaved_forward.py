"""What a sharded module's forward is while the pipeline has the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchrec_picasso._torchrec import PipelinedForward
from torchrec_picasso.rows.batch_rows import PartRows

__all__ = ["InterleavedForward"]


class InterleavedForward(PipelinedForward):
    """Stands in for a sharded module's forward while a micro-batch runs."""

    _taken: Callable[[], Any] | None = None

    def take(self, rows: PartRows) -> None:
        """The next call pools these rows."""
        self._taken = lambda: self._module.pool(rows)

    def give(self, output: Any) -> None:
        """The next call returns this output."""
        self._taken = lambda: output

    def of_whole_batch(self) -> Any:
        """What TorchRec's pipelined forward returns."""
        return super().__call__()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Gives what the micro-batch asks for."""
        taken, self._taken = self._taken, None
        assert taken is not None, f"{self._name} is called twice in one forward"
        return taken()
