"""The output of a module that is not interleaved: computed once per batch, given out in parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torchrec.distributed.types import Awaitable
from torchrec.sparse.jagged_tensor import KeyedTensor

from torchrec_picasso.errors import CompatError

__all__ = ["WholeOutput"]


class WholeOutput:
    """A pooled output of a whole batch, cut off from its graph.

    Micro-batches run backward into a leaf; the module's own backward, which exchanges and updates,
    runs once, with the sum.

    Args:
        output: What the module returned, awaitable or not.
        name: Of the module, for messages.
    """

    def __init__(self, output: Any, name: str) -> None:
        if isinstance(output, Awaitable):
            output = output.wait()
        if not isinstance(output, KeyedTensor):
            raise CompatError(
                f"module {name} returns a {type(output).__name__}, which cannot be cut into "
                "micro-batches; use num_micro_batches=1 with TrainPipelineSparseDist"
            )
        self._keys, self._dims = output.keys(), output.length_per_key()
        self._values: Tensor = output.values()
        self._leaf = self._values.detach().requires_grad_(self._values.requires_grad)

    def part(self, sizes_K: Sequence[int], index: int) -> KeyedTensor:
        """The output for one micro-batch."""
        start = sum(sizes_K[:index])
        return KeyedTensor(
            keys=self._keys,
            length_per_key=self._dims,
            values=self._leaf[start : start + sizes_K[index]],
        )

    def backward(self) -> None:
        """Runs the module's backward. Collective."""
        if self._values.requires_grad:
            grad = self._leaf.grad
            torch.autograd.backward(
                self._values, torch.zeros_like(self._values) if grad is None else grad
            )
