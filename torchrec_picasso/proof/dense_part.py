"""The part of a model that is outside its sharded modules."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torchrec.distributed.types import ShardedModule

__all__ = ["MODULE_ATTRIBUTES", "dense_modules", "dense_parameters", "outside_of_sharded"]

MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
"""Attributes that every ``nn.Module`` has."""


def outside_of_sharded(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yields a module and its submodules by path, but no submodules of sharded modules.

    Args:
        module: The module.
        path: Path of the module, which begins the yielded paths.
    """
    yield path, module
    if not isinstance(module, ShardedModule):
        for name, child in module.named_children():
            yield from outside_of_sharded(child, f"{path}.{name}" if path else name)


def dense_modules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields a module and its submodules by path, without sharded modules and their submodules."""
    for path, part in outside_of_sharded(module):
        if not isinstance(part, ShardedModule):
            yield path, part


def dense_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yields the parameters of a module outside its sharded modules, by path."""
    for path, part in dense_modules(module):
        yield from part.named_parameters(path, recurse=False)
