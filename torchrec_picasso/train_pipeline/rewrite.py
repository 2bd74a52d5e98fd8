"""Additions of this package to TorchRec's rewrite of a model.

TorchRec's pipelines find the input of each table with torch.fx, which runs the forward of every
module that contains tables on proxies. Then they replace the forwards of

- sharded modules: here by :class:`InterleavedForward`;
- with ``pipeline_postproc=True``, modules without parameters that transform features between the
  batch and a table ("postprocs"). They run once, when ids are exchanged, and later return the same
  result to the model; a micro-batch gets its part of that result.

On the CPU this package also replaces the forward of ``KTRegroupAsDict``, which regroups pooled
columns for their consumers: FBGEMM's operator behind it takes tens of times as long as a copy, with
130 fields more than all the rest of a step. :func:`regroup` concatenates the columns by name.

A proxy cannot be a number, a condition or an iterable. Such a use ends in a Python error that names
neither the tracer nor the model, so :func:`explained_tracing` adds the line and a remedy.
"""

from __future__ import annotations

import copy
import inspect
import logging
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.fx
import torchrec
from torch import Tensor, nn
from torchrec.distributed.types import LazyAwaitable
from torchrec.modules.regroup import KTRegroupAsDict
from torchrec.sparse.jagged_tensor import KeyedTensor

from torchrec_picasso._torchrec import PipelinedForward, Tracer, rewrite_model
from torchrec_picasso.errors import CompatError
from torchrec_picasso.sharding.output_dist import awaitable_of
from torchrec_picasso.train_pipeline.full_batch_output import without_graph


class InterleavedForward(PipelinedForward):
    """Returns a sharded module's output for the current micro-batch, which the pipeline sets. It
    replaces ``forward`` of the module, as TorchRec's ``PipelinedForward`` does."""

    _next: Callable[[], Any] | None = None
    _joined: Callable[[], LazyAwaitable[Any]] | None = None
    check: Callable[[Sequence[Any], Mapping[str, Any]], None] | None = None
    """Is called with the arguments of each call of the module."""

    def take_apart(
        self,
        modules: Mapping[str, Any],
        join: Callable[[Sequence[LazyAwaitable[Any]]], LazyAwaitable[Any]],
    ) -> None:
        """Makes this the forward of modules that the module was split into, by name. Calls of the
        module itself return their joined outputs."""
        parts = []
        for name, module in modules.items():
            module.forward = part = copy.copy(self)
            part._module, part._name, part.check = module, name, None
            parts.append(part)
        self._joined = lambda: join([part() for part in parts])

    def set_compute(self, compute: Callable[[], Any]) -> None:
        """Makes the next call return the result of ``compute``, which runs at that call."""
        self._next = compute

    def set_output(self, output: Any) -> None:
        """Makes the next call return this output, without its graph where gradients are off."""
        has_graph = torch.is_grad_enabled()

        def compute() -> Any:
            is_cut = has_graph and not torch.is_grad_enabled()
            return awaitable_of(without_graph(output, self._name) if is_cut else output)

        self._next = compute

    def whole_batch(self) -> Any:
        """Returns the output of TorchRec's pipelined forward."""
        return super().__call__()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the output for the current micro-batch; arguments are checked at most.

        Raises CompatError if the pipeline has set no output.
        """
        if self.check is not None:
            self.check(args, kwargs)
        if self._joined is not None:
            return self._joined()
        compute, self._next = self._next, None
        if compute is None:
            raise CompatError(
                f"{self._name} is called twice in one forward, or outside a step of the pipeline "
                "that runs it; call its detach() before the model is used without it, or by "
                "another pipeline"
            )
        return compute()


@contextmanager
def held_warnings() -> Iterator[list[logging.LogRecord]]:
    """Holds back what TorchRec logs of modules that it does not pipeline."""
    held: list[logging.LogRecord] = []

    def hold(record: logging.LogRecord) -> bool:
        if record.levelno == logging.WARNING:
            held.append(record)
        return record.levelno != logging.WARNING

    loggers = [logging.getLogger(each.__module__) for each in (rewrite_model, Tracer)]
    try:
        for logger in loggers:
            logger.addFilter(hold)
        yield held
    finally:
        for logger in loggers:
            logger.removeFilter(hold)


_TRACER = torch.fx.Tracer.trace.__code__
_LIBRARIES = tuple(str(Path(inspect.getfile(package)).parent) for package in (torch, torchrec))
_STDLIB = sysconfig.get_path("stdlib")


@contextmanager
def explained_tracing() -> Iterator[None]:
    """Raises CompatError in place of any error of the model's forward while it is traced."""
    try:
        yield
    except Exception as error:  # any error of Python, torch.fx or the model
        codes = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
        if _TRACER not in codes:
            raise
        traced = traceback.extract_tb(error.__traceback__)[codes.index(_TRACER) :]
        # the innermost line outside the libraries is the one that the user can change
        users = [frame for frame in traced if not _is_library(frame.filename)]
        lines = [f" at {frame.filename}:{frame.lineno}, `{frame.line}`" for frame in users]
        where = lines[-1] if lines else ""
        raise CompatError(
            "the model cannot be traced by torch.fx, which tells the pipeline what its tables look "
            f"up: the tracer stopped{where} ({type(error).__name__}: {str(error).strip()}). Only "
            "modules with tables inside are traced. Either move that line into a function of its "
            "own at the top level of a file and mark it there with torch.fx.wrap, or move the "
            "dense part into an nn.Module of its own that holds no tables"
        ) from error


def _is_library(filename: str) -> bool:
    if filename.startswith(_STDLIB) and "site-packages" not in filename:
        return True
    return filename.startswith((*_LIBRARIES, "<"))  # "<" marks generated code


def replace_regroups(model: nn.Module, device: torch.device) -> list[KTRegroupAsDict]:
    """Makes :func:`regroup` the forward of a CPU model's regrouping modules; returns these."""
    if device.type != "cpu":
        return []
    replaced = [module for module in model.modules() if type(module) is KTRegroupAsDict]
    for module in replaced:
        module.forward = partial(regroup, module)
    return replaced


def restore_regroups(replaced: list[KTRegroupAsDict]) -> None:
    """Restores the own forward of the modules, once: it empties their list."""
    while replaced:
        vars(replaced.pop()).pop("forward", None)


def regroup(module: KTRegroupAsDict, keyed_tensors: Sequence[KeyedTensor]) -> dict[str, Tensor]:
    """Concatenates columns ``(B, sum of D)`` by key: ``(B, columns of the group)`` each. Inputs
    that the module may refuse are passed to the module itself."""
    columns: dict[str, Tensor] = {}
    num_columns = 0
    for keyed in keyed_tensors:
        if keyed.key_dim() != 1:
            return KTRegroupAsDict.forward(module, keyed_tensors)
        found = keyed.to_dict()
        columns |= found
        num_columns += len(found)
    groups = module._groups
    # a name twice, an empty group or an unknown column: the module decides
    if len(columns) != num_columns or not all(
        group and columns.keys() >= set(group) for group in groups
    ):
        return KTRegroupAsDict.forward(module, keyed_tensors)
    values = [torch.cat([columns[name] for name in group], dim=1) for group in groups]
    return dict(zip(module._keys, module.embedding_cast(values)))
