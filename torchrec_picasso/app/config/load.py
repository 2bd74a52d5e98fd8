"""Builds config dataclasses from YAML, and reports all problems of a file at once."""

from __future__ import annotations

import dataclasses
import difflib
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from torchrec_picasso.app.config.rules import field_types, shown, value_problems
from torchrec_picasso.app.config.safe_yaml import read_yaml
from torchrec_picasso.app.config.schema import TrainConfig
from torchrec_picasso.errors import ConfigError

ConfigT = TypeVar("ConfigT")


def load_config(path: str | Path) -> TrainConfig:
    """Reads a training configuration, see :func:`load_rules`."""
    return load_rules(TrainConfig, path)


def load_rules(cls: type[ConfigT], path: str | Path) -> ConfigT:
    """Reads a configuration.

    Args:
        cls: A config dataclass.
        path: YAML file with its keys; keys left out take their defaults.

    Raises:
        ConfigError: If the file is missing or no YAML, expands too far by its aliases, or has
            unknown keys, wrong types or values out of range; lists every problem as
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
    """Builds a config dataclass from nested mappings.

    Args:
        cls: A config dataclass.
        document: Content of the YAML file.
        place: Name of the source, for messages.

    Raises:
        ConfigError: See :func:`load_rules`.
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
        section, section_of_key = _sections(annotation)
        if section is not None and (value is not None or section is annotation):
            values[name] = _build(section, value, f"{prefix}{name}.", problems)
            continue
        if section_of_key is not None and isinstance(value, Mapping):
            values[name] = {
                key: _build(
                    section_of_key, item, f"{prefix}{name}.{shown(key, quoted=False)}.", problems
                )
                for key, item in value.items()
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
    except ConfigError as error:  # bounds of Refresh, or problems between fields
        problems.append(prefix + str(error).removeprefix(f"{cls.__name__}: "))
        return None


def _sections(annotation: Any) -> tuple[type | None, type | None]:
    """The config dataclass of a field, and that of each value of a mapping, if annotated so."""

    def is_section(value: Any) -> bool:
        return isinstance(value, type) and dataclasses.is_dataclass(value)

    arms = (annotation, *typing.get_args(annotation))
    args = [args for arm in arms if len(args := typing.get_args(arm)) == 2]
    return (
        next((arm for arm in arms if is_section(arm)), None),
        next((value for _, value in args if is_section(value)), None),
    )


def _number_from_text(value: Any, annotation: Any) -> Any:
    """Parses ``1e-3`` (no dot), which YAML 1.1 reads as text, for a field of type float."""
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
