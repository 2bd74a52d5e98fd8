"""The full-batch output of a non-interleaved module, split by samples for micro-batches.

Shape letters: K micro-batches, V values that gradients run back to.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torchrec.distributed.types import Awaitable
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from torchrec_picasso.batches.split import children_of, reason_of, rebuild, split_batch
from torchrec_picasso.errors import CompatError, InputError

__all__ = ["UnsplitOutput", "FullBatchOutput"]


class UnsplitOutput:
    """An output for one forward of the whole batch: with its graph, awaited at its first use.

    Args:
        output: The module's result, awaitable or not.
        name: Name of the module, for messages.
    """

    def __init__(self, output: Any, name: str) -> None:
        self._output = output
        self._name = name

    def part(self, sizes_K: Sequence[int], index: int) -> Any:
        """Returns the output; there is one micro-batch."""
        return self._output

    def backward(self) -> None:
        """Does nothing: the module's backward is part of the model's."""

    def detached(self) -> FullBatchOutput:
        """Copies the output without its graph, with its own leaves. Collective."""
        self._output = self._waited(self._output)
        return FullBatchOutput(self._output, self._name)

    def _waited(self, value: Any) -> Any:
        """Waits for all awaitables in the output, in containers too; TorchRec's allow one wait."""
        if isinstance(value, Awaitable):
            return value.wait()
        members = None if isinstance(value, KeyedTensor | JaggedTensor) else children_of(value)
        if members is None:
            return value
        found = [self._waited(member) for _, member in members]
        return rebuild(value, found, f"output of {self._name}", "use TrainPipelineSparseDist")


class FullBatchOutput:
    """An output of a whole batch, detached from its graph.

    Every micro-batch gets a copy of its samples, into which a model may write, and runs backward
    into its own leaves. The module's backward, which exchanges and updates, runs once, with the
    gradients of all leaves. This needs pooled tensors (KeyedTensor) or sequences (dicts of
    JaggedTensors), alone or in containers. A whole batch gets anything else unchanged, with its
    graph.

    Args:
        output: The module's result, awaitable or not.
        name: Name of the module, for messages.
        always_leaves: Whether values are leaves even without a graph.
    """

    def __init__(self, output: Any, name: str, *, always_leaves: bool = False) -> None:
        self._name = name
        self._always_leaves = always_leaves
        self._values: list[Tensor] = []
        """Tensors of the output that gradients run back to."""
        self._has_leaf: list[bool] = []
        """For every tensor of the output, whether it is one of ``_values``."""
        self._output = self._map(output, self._off_graph)
        self._cuts: dict[tuple[int, ...], _Cut] = {}

    @property
    def value(self) -> Any:
        """The output of the whole batch, without its graph."""
        return self._output

    def part(self, sizes_K: Sequence[int], index: int) -> Any:
        """Returns the output for one micro-batch.

        Args:
            sizes_K: Samples of each micro-batch.
            index: Index of the micro-batch.

        Raises:
            CompatError: If the output cannot be split.
        """
        sizes = tuple(sizes_K)
        if sizes not in self._cuts:
            parts_K = [self._output] if len(sizes) == 1 else self._split(sizes)
            self._cuts[sizes] = self._with_leaves(parts_K)
        return self._cuts[sizes].parts_K[index]

    def backward(self) -> None:
        """Runs the module's backward; not without any gradient. Collective."""
        grads = [leaf.grad for leaf in self.leaves]
        if all(grad is None for grad in grads):
            return  # a plain loop would not run the module's backward either
        torch.autograd.backward(self._values, self.join_gradients(grads))

    def detached(self) -> FullBatchOutput:
        """Copies the output with its own leaves; no module's backward runs from them."""
        other = copy.copy(self)
        other._cuts = {}
        return other

    @property
    def leaves(self) -> list[Tensor]:
        """The leaves of all micro-batches so far, where their gradients arrive."""
        return [leaf for cut in self._cuts.values() for leaves in cut.leaves_VK for leaf in leaves]

    def join_gradients(self, grads: Sequence[Tensor | None]) -> list[Tensor]:
        """Joins gradients of leaves to gradients of the whole output's values.

        Args:
            grads: Gradient of each of :attr:`leaves`, in their order; ``None`` = zeros.

        Returns:
            One gradient per value, with its shape.
        """
        found = iter(grads)
        # by cut (sizes of micro-batches), then by value; several cuts of one batch add up
        by_cut_V = [
            [_join_gradients([next(found) for _ in leaves], leaves) for leaves in cut.leaves_VK]
            for cut in self._cuts.values()
        ]
        return [torch.stack(g).sum(0) if len(g) > 1 else g[0] for g in zip(*by_cut_V)]

    def _split(self, sizes: tuple[int, ...]) -> Sequence[Any]:
        """Splits the output by samples."""
        try:
            return split_batch(self._output, sizes)
        except (CompatError, InputError) as error:
            raise CompatError(
                f"module {self._name} returns a {type(self._output).__name__}, which cannot be cut "
                f"into micro-batches ({reason_of(error)}); use num_micro_batches=1"
            ) from error

    def _with_leaves(self, parts_K: Sequence[Any]) -> _Cut:
        """Makes leaves for each micro-batch; the model gets copies of the leaves."""
        leaves_KV: list[list[Tensor]] = []

        def leaf_of(tensor: Tensor, has_leaf: Iterator[bool], leaves_V: list[Tensor]) -> Tensor:
            if not next(has_leaf):
                return tensor
            leaves_V.append(tensor.detach().requires_grad_())
            # the model gets a clone: it may write into its input, but not into a leaf
            return leaves_V[-1].clone()

        parts = []
        for part in parts_K:
            leaves_KV.append([])
            take = partial(leaf_of, has_leaf=iter(self._has_leaf), leaves_V=leaves_KV[-1])
            with torch.enable_grad():
                parts.append(self._map(part, take))
        return _Cut(parts, list(zip(*leaves_KV)))

    def _off_graph(self, values: Tensor) -> Tensor:
        """Detaches one tensor, and records whether gradients run back to it."""
        is_float = values.is_floating_point()
        self._has_leaf.append(values.requires_grad or (self._always_leaves and is_float))
        if self._has_leaf[-1]:
            self._values.append(values)
        return values.detach()

    def _map(self, value: Any, change: Callable[[Tensor], Tensor]) -> Any:
        """Applies a function to every tensor of the output, always in the same order."""
        if isinstance(value, Awaitable):
            value = value.wait()
        if isinstance(value, KeyedTensor):
            return KeyedTensor(
                keys=value.keys(),
                length_per_key=value.length_per_key(),
                values=change(value.values()),
                key_dim=value.key_dim(),
            )
        if isinstance(value, JaggedTensor) and not isinstance(value, KeyedJaggedTensor):
            return JaggedTensor(
                values=change(value.values()),
                weights=value.weights_or_none(),
                lengths=value.lengths_or_none(),
                offsets=value.offsets_or_none(),
            )
        if isinstance(value, Tensor):
            return change(value)
        members = children_of(value)
        if members is None:
            return value
        found = [self._map(member, change) for _, member in members]
        return rebuild(value, found, f"output of {self._name}", "use TrainPipelineSparseDist")


@dataclass(frozen=True)
class _Cut:
    """An output split for some sizes of micro-batches.

    Args:
        parts_K: Output of each micro-batch.
        leaves_VK: For each value of the output, the leaf of each micro-batch.
    """

    parts_K: Sequence[Any]
    leaves_VK: Sequence[Sequence[Tensor]]


def _join_gradients(grads_K: Sequence[Tensor | None], leaves_K: Sequence[Tensor]) -> Tensor:
    """Joins the gradients of one value's leaves along the samples; 0-d values are summed."""
    known_K = [
        torch.zeros_like(leaf) if grad is None else grad for grad, leaf in zip(grads_K, leaves_K)
    ]
    if len(known_K) == 1:
        return known_K[0]
    return torch.cat(known_K) if leaves_K[0].dim() else torch.stack(known_K).sum()
