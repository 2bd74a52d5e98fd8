"""Reads YAML from untrusted files: no code runs, and aliases do not expand without bound.

Aliases let a hundred lines stand for a billion values, and let a value contain itself. Both are
found in the node graph, where an alias is the node that it names.
"""

from __future__ import annotations

from typing import Any

import yaml

from torchrec_picasso.app.config.rules import shown
from torchrec_picasso.errors import ConfigError

_MERGE = "tag:yaml.org,2002:merge"  # of the key <<
_MOST_VALUES = 100_000
"""Limit with aliases expanded; a configuration has some dozens."""


def read_yaml(text: str, place: str) -> Any:
    """Reads one document as plain values; ``None`` for an empty text.

    Args:
        text: The document.
        place: Name of its source, for messages.

    Raises:
        ConfigError: If it is no YAML, repeats a key, contains itself or has too many values.
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
        # raised by PyYAML's constructors for a value that does not fit its tag
        raise ConfigError(
            f"{place}: not valid YAML: a value is not of its type "
            f"({shown(str(error), quoted=False)}); write it without a tag"
        ) from error


def _count_values(node: yaml.Node, counts: dict[int, int]) -> int:
    """Number of values of a node with aliases expanded.

    Args:
        node: The node.
        counts: Counts of nodes by ``id``; -1 for the ancestors of this one.
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
    """A SafeLoader that refuses repeated keys; YAML keeps the last one silently."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if key_node.tag == _MERGE:  # keys of a merged mapping may be repeated here
                continue
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key!r} is given twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)
