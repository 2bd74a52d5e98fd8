"""Finds what the package uses of TorchRec's and PyTorch's insides, by walking its source.

Three kinds of use. A class of ours that inherits from theirs uses attributes of ``self`` that their
classes define, and overrides their methods; other code uses names with a leading underscore of
objects that are theirs. What their classes define is read from their source: class bodies, and
what their methods assign to ``self``.
"""

import ast
import importlib
import inspect
import pkgutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import torchrec_picasso

PACKAGE = "torchrec_picasso"
ROOT = Path(torchrec_picasso.__file__).parent
THEIRS = ("torchrec.", "torch.", "fbgemm_gpu.")
_MAGIC = ("__init__", "__call__")


@dataclass(frozen=True, order=True)
class Use:
    """One name of theirs and where we use it; ``owner`` is empty where it is not known."""

    owner: str
    name: str
    place: str

    def __str__(self) -> str:
        return f"{self.place}: {self.owner}.{self.name}"


@cache
def our_modules() -> list[ModuleType]:
    names = [info.name for info in pkgutil.walk_packages([str(ROOT)], f"{PACKAGE}.")]
    return [importlib.import_module(name) for name in names if not name.endswith("__main__")]


@cache
def our_classes() -> list[type]:
    """Every class of the package that inherits from one of theirs."""
    return [
        value
        for module in our_modules()
        for value in vars(module).values()
        if inspect.isclass(value) and value.__module__ == module.__name__ and _bases(value)
    ]


def _bases(ours: type) -> list[type]:
    """TorchRec's classes that one of ours inherits from, nearest first."""
    return [base for base in ours.__mro__ if base.__module__.startswith(THEIRS)]


@cache
def _tree(path: str) -> ast.Module:
    return ast.parse(Path(path).read_text())


@cache
def _classes_of(path: str) -> dict[str, ast.ClassDef]:
    """The classes at the top of a file; ``inspect`` would parse it for each of them."""
    return {node.name: node for node in _tree(path).body if isinstance(node, ast.ClassDef)}


def _class_tree(cls: type) -> ast.ClassDef | None:
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    # not made in C++, nor inside a function
    return _classes_of(file).get(cls.__name__) if file and file.endswith(".py") else None


def _assigned_targets(tree: ast.AST) -> Iterator[ast.AST]:
    """Everything that is assigned to; an annotation without a value declares, and assigns not."""
    for node in ast.walk(tree):
        targets: list[ast.AST] = []
        if isinstance(node, ast.Assign):
            targets = list(node.targets)
        elif isinstance(node, ast.AugAssign) or (isinstance(node, ast.AnnAssign) and node.value):
            targets = [node.target]
        for target in targets:
            yield from ast.walk(target)


def _is_self(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id == "super"
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


@cache
def defined_names(cls: type) -> frozenset[str]:
    """Returns what a class itself defines: in its body, and on ``self`` in its methods."""
    names = set(vars(cls))
    tree = _class_tree(cls)
    if tree is not None:
        names |= {
            node.attr
            for node in _assigned_targets(tree)
            if isinstance(node, ast.Attribute) and _is_self(node.value)
        }
        # a dataclass of theirs may only annotate; a class that does so promises the attribute
        names |= {
            node.target.id
            for node in tree.body
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        }
    return frozenset(names)


def _file(ours: type) -> Path:
    return Path(str(sys.modules[ours.__module__].__file__)).relative_to(ROOT.parent)


@cache
def inherited_uses() -> list[Use]:
    """Names of theirs that our classes use on themselves.

    All with a leading underscore, those we assign to included; public ones where no class of ours
    defines them. The owner is their nearest class. A name that nobody defines has no owner.
    """
    uses = []
    for ours in our_classes():
        # a class beside which others of ours inherit from theirs uses what those define, too
        heirs = [ours, *(each for each in our_classes() if issubclass(each, ours))]
        own = {
            base for heir in heirs for base in heir.__mro__ if base.__module__.startswith(PACKAGE)
        }
        our_names = {name for base in own for name in _defined_with_value(base)}
        owners = {
            n: _bases(h)[0] for h in reversed(heirs) for b in _bases(h) for n in defined_names(b)
        }
        tree = _class_tree(ours)
        assert tree is not None, ours
        for node in ast.walk(tree):
            if not (isinstance(node, ast.Attribute) and _is_self(node.value)):
                continue
            name, is_private = node.attr, node.attr.startswith("_")
            if name.startswith("__") or not (is_private or name not in our_names):
                continue
            if name in owners or name not in our_names:
                owner = owners[name].__name__ if name in owners else ""
                uses.append(Use(owner, name, f"{_file(ours)}:{node.lineno}"))
    return uses


def _defined_with_value(cls: type) -> set[str]:
    """Without names that are annotated only: those declare an attribute of theirs, or a field."""
    tree = _class_tree(cls)
    assert tree is not None, cls
    on_self = {n.attr for n in _assigned_targets(tree) if isinstance(n, ast.Attribute)}
    return on_self | set(vars(cls)) | set(vars(cls).get("__dataclass_fields__", ()))


@cache
def overrides() -> list[tuple[Use, FunctionType, FunctionType | None]]:
    """Methods that our classes replace or call on themselves: TorchRec's, and ours if any."""
    found = []
    for ours in our_classes():
        own = [base for base in ours.__mro__ if base.__module__.startswith(PACKAGE)]
        names = {name for base in own for name in vars(base)}
        names |= {u.name for u in inherited_uses() if _is_in(u, ours)}
        for name in sorted(n for n in names if n in _MAGIC or not n.startswith("__")):
            owner = next((base for base in _bases(ours) if name in vars(base)), None)
            if owner is None or not owner.__module__.startswith("torchrec."):
                continue
            function = _function(vars(owner)[name])
            if isinstance(function, FunctionType):
                mine = _function(next((vars(one)[name] for one in own if name in vars(one)), None))
                found.append((Use(owner.__name__, name, str(_file(ours))), function, mine))
    return found


def _is_in(use: Use, ours: type) -> bool:
    return use.place.split(":")[0] == str(_file(ours))


def _function(value: Any) -> Any:
    """The function behind a class method, a static method or a decorator."""
    inner = getattr(value, "__func__", value)
    return inspect.unwrap(inner) if callable(inner) else None


def parameters_of(function: FunctionType) -> str:
    """The names of a function's parameters, in order, without ``self`` and ``cls``."""
    names = []
    for parameter in inspect.signature(function).parameters.values():
        stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}
        if parameter.name not in ("self", "cls"):
            names.append(stars.get(parameter.kind, "") + parameter.name)
    return ", ".join(names)


def foreign_uses(known: frozenset[str]) -> list[Use]:
    """Names with a leading underscore of objects other than ``self``; in ``getattr``, too.

    Those that code of ours defines, or puts on any object, are left out unless they are known to be
    theirs.
    """
    return [use for use in _private_uses() if use.name in known or use.name not in _our_names()]


def _our_trees() -> dict[str, ast.Module]:
    return {str(module.__file__): _tree(str(module.__file__)) for module in our_modules()}


@cache
def _private_uses() -> list[Use]:
    return [
        Use("", name, f"{Path(path).relative_to(ROOT.parent)}:{node.lineno}")
        for path, tree in _our_trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.expr) and (name := _private_name(node)) is not None
    ]


@cache
def _our_names() -> set[str]:
    """Functions, classes, variables, and what is put on objects."""
    names = set()
    for tree in _our_trees().values():
        kinds = (ast.FunctionDef, ast.ClassDef)
        names |= {node.name for node in ast.walk(tree) if isinstance(node, kinds)}
        for target in _assigned_targets(tree):
            if isinstance(target, ast.Name):
                names.add(target.id)
            elif isinstance(target, ast.Attribute):
                names.add(target.attr)
    return names


def _private_name(node: ast.AST) -> str | None:
    """The private name that an expression asks of an object other than ``self``."""
    name = None
    if isinstance(node, ast.Attribute) and not _is_self(node.value):
        name = node.attr
    elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in (
        *("getattr", "hasattr", "setattr"),
    ):
        asked = node.args[1]
        name = asked.value if isinstance(asked, ast.Constant) else None
    is_private = isinstance(name, str) and name.startswith("_") and not name.startswith("__")
    return name if is_private else None
