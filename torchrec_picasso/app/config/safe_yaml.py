"""YAML to plain values, whoever wrote it: no code in it runs, and it does not swell.

Aliases let a file of a hundred lines stand for a billion values, and let a value hold itself. Both
are found among the nodes, where an alias is still the node that it names.
"""

from __future__ import annotations

from typing import Any

import yaml

from torchrec_picasso.errors import ConfigError
from torchrec_picasso.rules import shown

__all__ = ["read_yaml"]

_MERGE = "tag:yaml.org,2002:merge"  # of the key <<
_MOST_VALUES = 100_000
"""A configuration has some dozens."""


def read_yaml(text: str, place: str) -> Any:
    """Reads one document.

    Args:
        text: The document.
        place: Name of its source, put before the problem.

    Returns:
        Values of YAML's own types; ``None`` of an empty text.

    Raises:
        ConfigError: If it is not YAML, gives a key twice, holds itself or too many values.
    """
    try:
        loader = _UniqueKeyLoader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None
            _count_values(node, {})
            return loader.construct_document(node)
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{place}:{mark.line + 1}" if mark is not None else place
        reason = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ConfigError(f"{where}: not valid YAML: {shown(reason, quoted=False)}") from error
    except RecursionError as error:
        raise ConfigError(f"{place}: not valid YAML: nested too deeply") from error
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        # what PyYAML's constructors raise of a value that is not of the type its tag says
        raise ConfigError(
            f"{place}: not valid YAML: a value is not of its type "
            f"({shown(str(error), quoted=False)}); write it without a tag"
        ) from error


def _count_values(node: yaml.Node, counts: dict[int, int]) -> int:
    """Values that a node stands for, aliases written out.

    Args:
        node: With its aliases.
        counts: Of the nodes seen before, by ``id``; -1 of those that hold this one.
    """
    known = counts.get(id(node))
    if known == -1:
        raise yaml.constructor.ConstructorError(
            None, None, "a value holds itself by an alias", node.start_mark
        )
    if known is not None:
        return known
    counts[id(node)] = -1
    parts: list[yaml.Node] = []
    if isinstance(node, yaml.MappingNode):
        parts = [part for pair in node.value for part in pair]
    elif isinstance(node, yaml.SequenceNode):
        parts = node.value
    total = 1 + sum(_count_values(part, counts) for part in parts)
    if total > _MOST_VALUES:
        raise yaml.constructor.ConstructorError(
            None,
            None,
            f"more than {_MOST_VALUES:,} values with aliases written out; expected some dozens",
            node.start_mark,
        )
    counts[id(node)] = total
    return total


class _UniqueKeyLoader(yaml.SafeLoader):
    """A SafeLoader that refuses a key given twice, of which YAML would keep only the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if key_node.tag == _MERGE:  # keys of another mapping, which those here come before
                continue
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key!r} is given twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)
