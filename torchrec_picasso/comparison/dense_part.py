"""The part of a model that is outside its sharded modules."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torchrec.distributed.types import ShardedModule

__all__ = ["dense_parameters", "outside_of_sharded"]


def outside_of_sharded(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yields a module and its submodules, but no submodules of sharded modules.

    Args:
        module: The module.
        name: Path of the module, which begins the yielded paths.
    """
    yield name, module
    if not isinstance(module, ShardedModule):
        for child_name, child in module.named_children():
            yield from outside_of_sharded(child, f"{name}.{child_name}" if name else child_name)


def dense_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yields the parameters of a module outside its sharded modules, by path."""
    for path, part in outside_of_sharded(module):
        if not isinstance(part, ShardedModule):
            yield from part.named_parameters(path, recurse=False)
