"""YAML to config dataclass; a file with five mistakes is refused once, with five places."""

from __future__ import annotations

import difflib
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from torchrec_picasso.app.config.safe_yaml import read_yaml
from torchrec_picasso.app.config.schema import TrainConfig
from torchrec_picasso.errors import ConfigError
from torchrec_picasso.options.rules import Rules, field_types, shown, value_problems

__all__ = ["load_config", "load_rules", "parse_config"]

ConfigT = TypeVar("ConfigT", bound=Rules)


def load_config(path: str | Path) -> TrainConfig:
    """Reads a training configuration.

    Args:
        path: YAML file with the keys of :class:`~torchrec_picasso.app.config.TrainConfig`; a key
            left out takes its default.

    Returns:
        The checked configuration.

    Raises:
        ConfigError: As :func:`load_rules` does.
    """
    return load_rules(TrainConfig, path)


def load_rules(cls: type[ConfigT], path: str | Path) -> ConfigT:
    """Reads any configuration.

    Args:
        cls: A config dataclass.
        path: YAML file with its keys; a key left out takes its default.

    Returns:
        The checked configuration.

    Raises:
        ConfigError: If the file is missing, is not YAML, swells by its aliases, or holds unknown
            keys, wrong types or values out of range; the message lists every problem as
            ``file: key.path: problem``.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot read the configuration ({error.strerror}); give a YAML file, such as "
            "those in configs/ of the source repository"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not text in UTF-8; give a YAML file") from error
    document = read_yaml(text, place=str(path))
    return parse_config(cls, {} if document is None else document, place=str(path))


def parse_config(cls: type[ConfigT], document: Any, place: str) -> ConfigT:
    """Turns nested mappings into a config dataclass, reporting all problems at once.

    Args:
        cls: A config dataclass, such as :class:`~torchrec_picasso.app.config.TrainConfig`.
        document: What the YAML file held.
        place: Name of the source, put before each problem.

    Returns:
        An object of ``cls``.

    Raises:
        ConfigError: If anything in ``document`` is unknown or cannot be used.
    """
    problems: list[str] = []
    config = _build(cls, document, "", problems)
    if problems or config is None:
        head = f"{place}: 1 problem" if len(problems) == 1 else f"{place}: {len(problems)} problems"
        raise ConfigError("\n  ".join([head, *problems]))
    return config


def _build(cls: type[ConfigT], document: Any, prefix: str, problems: list[str]) -> ConfigT | None:
    if not isinstance(document, Mapping):
        problems.append(
            f"{prefix.rstrip('.') or 'top level'}: expected a mapping of settings, got "
            f"{shown(document)} ({type(document).__name__})"
        )
        return None
    num_before = len(problems)
    fields = {field.name: (field, annotation) for field, annotation in field_types(cls)}
    problems.extend(
        f"{prefix}{shown(key, quoted=False)}: {_unknown(key, fields)}"
        for key in document
        if key not in fields
    )
    values: dict[str, Any] = {}
    for name, (field, annotation) in fields.items():
        if name not in document:
            continue
        value = document[name]
        of_one = _rules_of_one(annotation)
        if of_one is not None and (value is not None or of_one is annotation):
            values[name] = _build(of_one, value, f"{prefix}{name}.", problems)
            continue
        of_each = _rules_of_each(annotation)
        if of_each is not None and isinstance(value, Mapping):
            values[name] = {
                key: _build(of_each, each, f"{prefix}{name}.{shown(key, quoted=False)}.", problems)
                for key, each in value.items()
            }
            continue
        value = _number_from_text(value, annotation)
        found = list(value_problems(value, annotation, field.metadata))
        problems.extend(f"{prefix}{name}: {problem}" for problem in found)
        values[name] = _lists_as_tuples(value)
    if len(problems) > num_before:
        return None
    try:
        return cls(**values)
    except ConfigError as error:  # only problems between fields are left
        problems.append(prefix + str(error).removeprefix(f"{cls.__name__}: "))
        return None


def _rules_of_one(annotation: Any) -> type[Rules] | None:
    """The config dataclass that the value itself is, if the annotation says so."""
    for arm in (annotation, *typing.get_args(annotation)):
        if isinstance(arm, type) and issubclass(arm, Rules):
            return arm
    return None


def _rules_of_each(annotation: Any) -> type[Rules] | None:
    """The config dataclass that each value of a mapping is, if the annotation says so."""
    for arm in (annotation, *typing.get_args(annotation)):
        args = typing.get_args(arm)
        if len(args) == 2 and isinstance(args[1], type) and issubclass(args[1], Rules):
            found: type[Rules] = args[1]
            return found
    return None


def _number_from_text(value: Any, annotation: Any) -> Any:
    """YAML 1.1 reads ``1e-3`` (no dot) as text; a field of type float takes it as the number."""
    if annotation is float and isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def _lists_as_tuples(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _lists_as_tuples(item) for key, item in value.items()}
    return tuple(value) if isinstance(value, list) else value


def _unknown(key: Any, fields: Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(shown(key, quoted=False), fields, n=1, cutoff=0.6)
    hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(fields)}"
    return f"unknown key; {hint}"
