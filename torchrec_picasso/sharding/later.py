"""TorchRec's awaitables, without a class for each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torchrec.distributed.types import LazyAwaitable, LazyGetItemMixin


class Later(LazyAwaitable[Any]):
    """The result of a function, which runs when somebody waits for it or first uses it."""

    def __init__(self, compute: Callable[[], Any]) -> None:
        super().__init__()
        self._compute = compute

    def _wait_impl(self) -> Any:
        return self._compute()


class LaterByKey(LazyGetItemMixin[str, Tensor], Later):
    """A KeyedTensor, of which an item may be taken before anybody waits."""
