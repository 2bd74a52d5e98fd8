"""The part of a model's forward between the batch and a table: traced, and what it must not do.

The *input slice* of a sharded module is what the traced forward computes from the batch to the
module's input: history and candidates concatenated, features crossed and hashed, a
KeyedJaggedTensor built of tensors. It may run ahead of the model if it gives the same there: it has
no random numbers, parameters, messages between ranks or writes into what was there before it, and
reads no state that the forward changes.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node
from torch.fx.node import map_arg
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torchrec.distributed.types import ShardedModule

from torchrec_picasso._torchrec import PipelinedPostproc, Tracer, get_leaf_module_names
from torchrec_picasso.batches.members import copy_batch
from torchrec_picasso.errors import CompatError
from torchrec_picasso.proof.comparison import COMMUNICATES
from torchrec_picasso.proof.content import Kept, random_states
from torchrec_picasso.proof.follow import memory_of
from torchrec_picasso.proof.watch import current_line
from torchrec_picasso.train_pipeline.batch_watch import WRITES, BatchWatch

_WRITING = {
    "setitem",
    "delitem",
    # iadd of add, and so on
    *(n for n in dir(operator) if n[0] == "i" and f"__{n[1:]}__" in dir(operator)),
}
"""Operators of Python that write into their first argument."""


@dataclass(frozen=True, eq=False)
class InputSlice:
    """The nodes of a traced forward that make a module's input, in order, and the module's call."""

    nodes: Sequence[Node]
    call: Node

    @property
    def input(self) -> Node:
        """The node whose value is the module's input."""
        return self.call.all_input_nodes[0]

    @property
    def has_modules(self) -> bool:
        """Whether it calls modules, which may compute something else in evaluation."""
        return any(node.op == "call_module" for node in self.nodes)

    def is_like(self, other: InputSlice) -> bool:
        """Whether two traces compute the same, and none has written what the other reads."""
        (form, outside), (other_form, others) = self._form(), other._form()
        return form == other_form and all(map(_is_unwritten, outside, others))

    def _form(self) -> tuple[list[Any], list[Node]]:
        """Describes the nodes, equally in every trace, and lists those that read the model."""
        places = {node: f"%{place}" for place, node in enumerate(self.nodes)}
        form = []
        for node in self.nodes:
            # two traces may name one tensor differently
            name = None if node.op == "get_attr" else node.target
            form.append((node.op, name, map_arg((node.args, dict(node.kwargs)), places.get)))
        return form, [node for node in self.nodes if node.op == "get_attr"]

    def why_not_ahead(self, batch: Any, model: nn.Module) -> str | None:
        """Runs the slice on a copy of a batch; names the line that must not run ahead, and what it
        does."""
        inside = [
            m for n in self.nodes if n.op == "call_module" for m in _module(n, model).modules()
        ]
        kept = [Kept("", place) for m in inside for place in (vars(m), m._buffers)]
        values: dict[Node, Any] = {}
        if any(module._forward_hooks or module._forward_pre_hooks for module in inside):
            return f"{self.call.meta['line']} follows a module with a hook on its forward"
        try:
            copied = copy_batch(batch)
        except CompatError as error:
            return f"{self.call.meta['line']} takes a batch that cannot be copied: {error}"
        batch_watch = BatchWatch(copied)
        batch_watch.keep_copies()
        for node in self.nodes:
            before = random_states()
            try:
                with _SliceWatch() as watch:
                    values[node] = run_node(node, copied, values, model)
            except Exception as error:  # any error of the model's code, or the watch's
                watch.reason = watch.reason or f"raises {type(error).__name__} ({error})"
            if random_states() != before:
                watch.reason = "draws random numbers"
            if any(each.has_changed() for each in kept):
                watch.reason = "changes an attribute"
            if batch_watch.is_written() or batch_watch.is_replaced():  # past PyTorch's operators
                watch.reason = watch.reason or WRITES
            if watch.reason is not None:
                return f"{node.meta['line']} {watch.reason}"
        return None


def _is_unwritten(one: Node, other: Node) -> bool:
    """Whether a tensor that two traces read is the same, or was made equal in both."""
    value, another = one.meta["value"], other.meta["value"]
    if value is another:
        return bool(one.meta["version"] == other.meta["version"])
    return value.dtype == another.dtype and torch.equal(value, another)


def run_node(node: Node, batch: Any, values: Mapping[Node, Any], model: nn.Module) -> Any:
    """Computes the value of a node from those of the nodes before it."""
    args, kwargs = map_arg((node.args, dict(node.kwargs)), values.__getitem__)
    if node.op == "placeholder":
        return batch
    if node.op == "get_attr":
        return node.meta["value"]
    if node.op == "call_module":
        module = _module(node, model)
        # TorchRec's own postproc makes its arguments of the batch
        return module(batch) if isinstance(module, PipelinedPostproc) else module(*args, **kwargs)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    assert callable(node.target)
    return node.target(*args, **kwargs)


def outside_of(node: Node, model: nn.Module) -> list[Tensor]:
    """Lists the tensors of the model that a node reads."""
    if node.op == "call_module":
        module = _module(node, model)
        held = [value for inside in module.modules() for value in vars(inside).values()]
        return [*module.buffers(), *(value for value in held if isinstance(value, Tensor))]
    return [node.meta["value"]] if node.op == "get_attr" else []


def _module(node: Node, model: nn.Module) -> nn.Module:
    # TorchRec's postprocs hide their place from get_submodule()
    return dict(model.named_modules())[str(node.target)]


class _Tracer(Tracer):
    """TorchRec's tracer; notes the line of the model for each node, and what is set there."""

    def create_node(self, *args: Any, **kwargs: Any) -> Node:
        """Makes a node of the graph."""
        node: Node = super().create_node(*args, **kwargs)
        modes = *map(id, _get_current_function_mode_stack()), *settings_of_floats()
        node.meta |= {"line": current_line(), "random": _random_state(), "modes": modes}
        return node


def _random_state() -> tuple[Any, ...]:
    return *random_states().values(), torch.get_rng_state().numpy().tobytes()


def traced(model: nn.Module) -> Graph:
    """Traces the forward of a model's modules with tables, as TorchRec does."""
    graph: Graph = _Tracer(get_leaf_module_names(model)).trace(model)
    for node in graph.nodes:
        if node.op == "get_attr":
            value = operator.attrgetter(str(node.target))(model)
            node.meta |= {"value": value, "version": getattr(value, "_version", None)}
    return graph


def slice_of(graph: Graph, name: str, model: nn.Module) -> InputSlice | str | None:
    """Finds a module's slice; a reason, if it cannot run ahead; ``None`` = it is not called."""
    calls = [node for node in graph.nodes if node.op == "call_module" and node.target == name]
    if not calls:
        return None
    call = calls[0]
    if len(calls) > 1 or len(call.all_input_nodes) != 1 or len(call.args) + len(call.kwargs) != 1:
        return f"{calls[-1].meta['line']} calls it again, or with more than one argument"
    if call.meta["random"] != next(iter(graph.nodes)).meta["random"]:
        return f"{call.meta['line']} comes after random numbers"
    needed = _back_from(call) - {call}
    batch = next(node for node in graph.nodes if node.op == "placeholder")
    for node in graph.nodes:
        if node is call:
            break
        reason = None
        # a module's output is new memory, so a write into it changes nothing before the module
        if _writes(node) and needed & _back_from(node, stop="call_module"):
            reason = "writes in place"
        elif node not in needed:
            continue
        elif node.meta["modes"] != batch.meta["modes"]:
            reason = "is in a mode of its own, such as autocast"
        # TorchRec's tracer gives a placeholder that is part of an argument a ph_key
        elif node.op == "placeholder" and (node is not batch or hasattr(node, "ph_key")):
            reason = "reads an argument beside the batch"
        elif node.op == "get_attr" and not isinstance(node.meta["value"], Tensor):
            reason = f"reads {node.target}"
        elif node.op == "call_module" and isinstance(_module(node, model), ShardedModule):
            reason = f"uses what {node.target} gives"
        if reason is not None:
            return f"{node.meta['line']} {reason}"
    return InputSlice([node for node in graph.nodes if node in needed], call)


def settings_of_floats() -> tuple[Any, ...]:
    """Settings by which floating numbers differ."""
    names = ("cpu", "cuda")
    casts = [(torch.is_autocast_enabled(name), torch.get_autocast_dtype(name)) for name in names]
    return torch.get_default_dtype(), *casts


def _back_from(node: Node, stop: str = "") -> set[Node]:
    """Lists a node and what it is computed from, up to nodes of the kind ``stop``."""
    todo, seen = [node], {node}
    while todo:
        new = [each for each in todo.pop().all_input_nodes if each not in seen and each.op != stop]
        seen.update(new)
        todo += new
    return seen


def _writes(node: Node) -> bool:
    """Whether a node writes into one of its arguments, by its name."""
    if node.op not in ("call_method", "call_function"):
        return False
    name = str(getattr(node.target, "__name__", node.target))
    if getattr(node.target, "__module__", "") == "_operator":
        return name in _WRITING
    return (name.endswith("_") and not name.endswith("__")) or "out" in node.kwargs


class _SliceWatch(TorchDispatchMode):
    """Notes the first operator that a slice must not have, and raises CompatError in place of
    running it: it may write into the batch, which is yet to be trained."""

    def __init__(self) -> None:
        super().__init__()
        self.reason: str | None = None
        self._own: dict[int, Tensor] = {}
        """By memory, a tensor on it that the slice made, which it may write; keeps it in use."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        named = {argument.name: argument for argument in func._schema.arguments}
        values = {**dict(zip(named, args)), **kwargs}
        written = [v for n, v in values.items() if (a := named[n].alias_info) and a.is_write]
        reason = None
        if torch.Tag.nondeterministic_seeded in func.tags:
            reason = "draws random numbers"
        elif func.namespace in COMMUNICATES:
            reason = "communicates between ranks"
        elif any(isinstance(tensor, nn.Parameter) or tensor.requires_grad for tensor in given):
            reason = "reads a parameter"
        elif any(isinstance(w, Tensor) and memory_of(w) not in self._own for w in written):
            reason = "writes in place"
        self.reason = self.reason or reason
        if self.reason is not None:  # the model may have caught the first error
            raise CompatError(self.reason)
        result = func(*args, **kwargs)
        known = set(map(memory_of, given))
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self._own |= {
            memory_of(tensor): tensor for tensor in made if memory_of(tensor) not in known
        }
        return result
