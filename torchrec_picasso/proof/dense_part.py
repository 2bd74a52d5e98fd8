"""The part of a model that is outside its sharded modules."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from torch import nn
from torchrec.distributed.types import ShardedModule

__all__ = ["MODULE_ATTRIBUTES", "dense_modules", "dense_parameters", "outside_of_sharded"]

MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
"""Attributes that every ``nn.Module`` has."""


def outside_of_sharded(
    module: nn.Module, given: Collection[nn.Module] = ()
) -> Iterator[tuple[str, nn.Module]]:
    """Yields a module and its submodules by path, each once, but none inside sharded modules.

    Args:
        module: The module.
        given: Modules whose submodules are left out, as those of sharded modules are.
    """
    closed = {id(known) for known in given}
    seen: set[int] = set()

    def walk(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
        if id(module) in seen:
            return
        seen.add(id(module))
        yield path, module
        if not isinstance(module, ShardedModule) and id(module) not in closed:
            for name, child in module.named_children():
                yield from walk(child, f"{path}.{name}" if path else name)

    return walk(module, "")


def dense_modules(
    module: nn.Module, given: Collection[nn.Module] = ()
) -> Iterator[tuple[str, nn.Module]]:
    """Yields a module and its submodules by path, each once, without sharded and given modules."""
    left_out = {id(known) for known in given}
    for path, part in outside_of_sharded(module, given):
        if not isinstance(part, ShardedModule) and id(part) not in left_out:
            yield path, part


def dense_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yields the parameters of a module outside its sharded modules, by path."""
    for path, part in dense_modules(module):
        yield from part.named_parameters(path, recurse=False)
