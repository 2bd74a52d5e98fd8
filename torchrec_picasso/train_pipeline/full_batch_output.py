"""The full-batch output of a plain module, cut by samples for micro-batches."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torchrec.distributed.types import Awaitable
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedTensor

from torchrec_picasso.batches.members import children_of, made_like, rebuild
from torchrec_picasso.batches.split import split_output


class UnsplitOutput:
    """An output for one forward of the whole batch: with its graph, awaited at its first use."""

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
        self._output = _mapped(self._output, lambda values: values, self._name)
        return FullBatchOutput(self._output, self._name)


class FullBatchOutput:
    """An output of a whole batch, detached from its graph.

    Every micro-batch gets a copy of its samples, into which a model may write, and runs backward
    into its own leaves. The module's backward, which exchanges and updates, runs once, with the
    gradients of all leaves. This needs pooled tensors (KeyedTensor) or sequences (dicts of
    JaggedTensors), alone or in containers. A whole batch gets anything else unchanged, with its
    graph. With ``always_leaves``, values without a graph have leaves too.
    """

    def __init__(self, output: Any, name: str, *, always_leaves: bool = False) -> None:
        self._name = name
        self._always_leaves = always_leaves
        self._values: list[Tensor] = []
        """Tensors of the output that gradients run back to."""
        self._has_leaf: list[bool] = []
        """For every tensor of the output, whether it is one of ``_values``."""
        self.value = _mapped(output, self._off_graph, name)
        """The output of the whole batch, without its graph."""
        self._parts_K: Sequence[tuple[Any, list[Tensor]]] = ()
        """The output of each micro-batch, and its leaf for each value; set by :meth:`part`."""

    def part(self, sizes_K: Sequence[int], index: int) -> Any:
        """Returns the output for one of micro-batches, which have these sizes in every call.
        CompatError if it cannot be cut."""
        if not self._parts_K:
            parts_K = split_output(self.value, sizes_K, f"module {self._name} returns")
            self._parts_K = list(map(self._with_leaves, parts_K))
        part, _ = self._parts_K[index]
        return part

    def backward(self) -> None:
        """Runs the module's backward; not without any gradient. Collective."""
        # without a gradient a plain loop would not run the module's backward either
        if any(leaf.grad is not None for _, leaves_V in self._parts_K for leaf in leaves_V):
            torch.autograd.backward(self._values, self.joined_gradients())

    def detached(self) -> FullBatchOutput:
        """Copies the output with its own leaves; no module's backward runs from them."""
        other = copy.copy(self)
        other._parts_K = ()
        return other

    def joined_gradients(self) -> list[Tensor]:
        """Joins the leaves' gradients to one per value of the output, with its shape."""
        leaves_VK = zip(*(leaves_V for _, leaves_V in self._parts_K))
        return list(map(_joined_gradient, leaves_VK))

    def _with_leaves(self, part: Any) -> tuple[Any, list[Tensor]]:
        """Returns a micro-batch's output whose gradients run back to leaves, and these leaves."""
        has_leaf, leaves_V = iter(self._has_leaf), []

        def on_leaf(tensor: Tensor) -> Tensor:
            if not next(has_leaf):
                return tensor
            leaves_V.append(tensor.detach().requires_grad_())
            # the model gets a clone: it may write into its input, but not into a leaf
            return leaves_V[-1].clone()

        with torch.enable_grad():
            return _mapped(part, on_leaf, self._name), leaves_V

    def _off_graph(self, values: Tensor) -> Tensor:
        """Detaches one tensor, and records whether gradients run back to it."""
        is_float = values.is_floating_point()
        self._has_leaf.append(values.requires_grad or (self._always_leaves and is_float))
        if self._has_leaf[-1]:
            self._values.append(values)
        return values.detach()


def without_graph(output: Any, name: str) -> Any:
    """Returns the output of module ``name`` without its graph. Collective if it is awaited."""
    return _mapped(output, Tensor.detach, name)


def _mapped(value: Any, change: Callable[[Tensor], Tensor], name: str) -> Any:
    """Applies a function to every tensor in the output of module ``name``, in a fixed order.
    Awaitables are awaited, in containers too; TorchRec's allow one wait."""
    if isinstance(value, Awaitable):
        value = value.wait()
    if isinstance(value, (KeyedTensor, JaggedTensor)):
        return made_like(value, values=change(value.values()))
    if isinstance(value, Tensor):
        return change(value)
    members = children_of(value)
    if members is None:
        return value
    found = [_mapped(member, change, name) for _, member in members]
    return rebuild(value, found, f"output of {name}", "use TrainPipelineSparseDist")


def _joined_gradient(leaves_K: Sequence[Tensor]) -> Tensor:
    """Joins the gradients of one value's leaves along the samples; 0-d values are summed."""
    grads_K = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves_K]
    if len(grads_K) == 1:
        return grads_K[0]
    return torch.cat(grads_K) if leaves_K[0].dim() else torch.stack(grads_K).sum()
