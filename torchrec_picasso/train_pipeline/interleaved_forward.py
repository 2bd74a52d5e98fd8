"""What a sharded module's forward is while the pipeline has the model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor
from torchrec.distributed.types import LazyAwaitable, LazyNoWait
from torchrec.sparse.jagged_tensor import KeyedTensor

from torchrec_picasso._torchrec import PipelinedForward
from torchrec_picasso.rows.batch_rows import PartRows

__all__ = ["InterleavedForward"]


class InterleavedForward(PipelinedForward):
    """Stands in for a sharded module's forward while a micro-batch runs."""

    _taken: Callable[[], Any] | None = None

    def take(self, rows: PartRows, on_gradient: Callable[[], Any]) -> None:
        """The next call pools these rows.

        Args:
            rows: Of the micro-batch.
            on_gradient: Called when the backward comes by, as it does unless the model runs the
                module without gradients or lets none through.
        """
        self._taken = partial(self._pool, rows, on_gradient)

    def _pool(self, rows: PartRows, on_gradient: Callable[[], Any]) -> Any:
        pooled = self._module.pool(rows)
        assert isinstance(pooled, LazyAwaitable)
        pooled.callbacks.append(partial(_watch, on_gradient))
        return pooled

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


def _watch(on_gradient: Callable[[], Any], pooled: KeyedTensor) -> KeyedTensor:
    values_BD = pooled.values()
    if values_BD.requires_grad:

        def note(_: Tensor) -> None:
            on_gradient()

        values_BD.register_hook(note)
    return pooled
