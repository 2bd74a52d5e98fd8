"""The output of a module that is not interleaved: computed once per batch, given out in parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torchrec.distributed.types import Awaitable
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from torchrec_picasso.batches.split import children_of, rebuild, split_batch
from torchrec_picasso.errors import CompatError, InputError

__all__ = ["UncutOutput", "WholeOutput"]


class UncutOutput:
    """An output for a forward of the whole batch: with its graph, waited for at its use.

    Args:
        output: What the module returned, awaitable or not.
        name: Of the module, for messages.
    """

    def __init__(self, output: Any, name: str) -> None:
        self._output = output
        self._name = name

    def part(self, sizes_K: Sequence[int], index: int) -> Any:
        """The output; there is one part."""
        return self._output

    def backward(self) -> None:
        """Nothing: the module's backward is part of the model's."""

    def detached(self) -> WholeOutput:
        """The same output cut off from its graph, with leaves of its own."""
        return WholeOutput(self._output, self._name)


class WholeOutput:
    """An output of a whole batch, cut off from its graph.

    Micro-batches run backward into leaves; the module's own backward, which exchanges and updates,
    runs once, with the sums. That needs tensors, pooled (KeyedTensor) or by sequences (dicts of
    JaggedTensors), alone or in containers. Anything else is handed to a whole batch as it is, with
    its graph.

    Args:
        output: What the module returned, awaitable or not.
        name: Of the module, for messages.
        always_leaves: Whether values are leaves even without a graph.
    """

    def __init__(self, output: Any, name: str, *, always_leaves: bool = False) -> None:
        self._name = name
        self._always_leaves = always_leaves
        self._values_and_leaves: list[tuple[Tensor, Tensor]] = []
        self._output = self._off_graph(output)
        self._parts: dict[tuple[int, ...], Sequence[Any]] = {}

    def part(self, sizes_K: Sequence[int], index: int) -> Any:
        """The output for one micro-batch.

        Raises:
            CompatError: If it cannot be cut.
        """
        sizes = tuple(sizes_K)
        if sizes not in self._parts:
            self._parts[sizes] = [self._output] if len(sizes) == 1 else self._cut(sizes)
        return self._parts[sizes][index]

    def _cut(self, sizes: tuple[int, ...]) -> Sequence[Any]:
        try:
            return split_batch(self._output, sizes)
        except (CompatError, InputError) as error:
            raise CompatError(
                f"module {self._name} returns a {type(self._output).__name__}, which cannot be cut "
                f"into micro-batches ({error}); use num_micro_batches=1"
            ) from error

    def backward(self) -> None:
        """Runs the module's backward, unless no gradient came. Collective."""
        if all(leaf.grad is None for _, leaf in self._values_and_leaves):
            return  # nor would the module's backward run in a plain loop
        torch.autograd.backward(
            [values for values, _ in self._values_and_leaves],
            [
                torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
                for _, leaf in self._values_and_leaves
            ],
        )

    def detached(self) -> WholeOutput:
        """The same output with leaves of its own, whose backward nobody waits for."""
        return WholeOutput(self._output, self._name)

    @property
    def leaves(self) -> list[Tensor]:
        """What gradients of the output arrive at."""
        return [leaf for _, leaf in self._values_and_leaves]

    def _off_graph(self, value: Any) -> Any:
        if isinstance(value, Awaitable):
            value = value.wait()
        if isinstance(value, KeyedTensor):
            return KeyedTensor(
                keys=value.keys(),
                length_per_key=value.length_per_key(),
                values=self._leaf(value.values()),
                key_dim=value.key_dim(),
            )
        if isinstance(value, JaggedTensor) and not isinstance(value, KeyedJaggedTensor):
            return JaggedTensor(
                values=self._leaf(value.values()),
                weights=value.weights_or_none(),
                lengths=value.lengths_or_none(),
                offsets=value.offsets_or_none(),
            )
        if isinstance(value, Tensor):
            return self._leaf(value)
        members = children_of(value)
        if members is None:
            return value
        found = [self._off_graph(member) for _, member in members]
        return rebuild(value, found, f"output of {self._name}", "use TrainPipelineSparseDist")

    def _leaf(self, values: Tensor) -> Tensor:
        if not values.requires_grad and not self._always_leaves:
            return values
        leaf = values.detach().requires_grad_()
        self._values_and_leaves.append((values, leaf))
        return leaf
