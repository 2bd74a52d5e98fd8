"""Imports point only downward: the rows of docs/architecture.md, read from the source itself.

A module may import rows above its own, and its own package; never another package of its row, nor
a row below. The library's ``__init__`` may re-export; a name from it counts as its module's.
"""

import ast
from collections.abc import Sequence
from pathlib import Path

import pytest

import torchrec_picasso

PACKAGE = "torchrec_picasso"
ROOT = Path(torchrec_picasso.__file__).parent

ROWS = (
    ("errors", "version"),
    ("compat",),
    ("ops", "_torchrec"),
    ("placement", "frequency", "exchange", "schedule"),
    ("batches",),
    ("cost", "storage"),
    ("rows", "proof"),
    ("sharding", "planner"),
    ("train_pipeline",),
    ("app/launch", "app/config"),
    ("app/checkpoints", "app/timeline", "app/zoo"),
    ("app/runs", "app/simulation"),
    ("app/cli",),
    ("__main__",),
)
ROW_OF_PACKAGE = {package: row for row, packages in enumerate(ROWS) for package in packages}

MOST_FILES, MOST_PACKAGES, MOST_LINES_OF_THE_PIPELINE = 150, 12, 300
"""Of the library, without the application."""

FEWEST_FILES = 50
"""The walk must see at least these; a walk that sees nothing finds nothing."""

NOT_IN_CONFIG = ("torch", "torchrec", "fbgemm_gpu")
"""A configuration can be read and checked before PyTorch is loaded."""


def _files() -> list[Path]:
    beside = {ROOT / "__init__.py", ROOT / "app" / "__init__.py"}
    return sorted(path for path in ROOT.rglob("*.py") if path not in beside)


def _package(path: Path) -> str:
    return _package_of_parts(path.relative_to(ROOT).with_suffix("").parts)


def _package_of_parts(parts: Sequence[str]) -> str:
    """A package of the library, or of the application."""
    return "/".join(parts[: 2 if parts[0] == "app" else 1])


def _imports(path: Path) -> set[tuple[str, str]]:
    """Every ``(module, name)`` that a file imports, wherever in the file; name "" for all of it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {(alias.name, "") for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; write the whole module name"
            found |= {(node.module or "", alias.name) for alias in node.names}
    return found


def _imported_package(module: str, name: str) -> str | None:
    """The package of ours that an import reaches; None for other packages."""
    package, _, rest = module.partition(".")
    if package != PACKAGE:
        return None
    if not rest and not name:  # "import torchrec_picasso", which imports nothing by itself
        return None
    if not rest and name not in ROW_OF_PACKAGE:  # "from torchrec_picasso import HotColdParams"
        home = getattr(torchrec_picasso, name, None)
        return _imported_package(getattr(home, "__module__", f"{PACKAGE}.{name}"), "")
    return _package_of_parts(rest.split(".") if rest else [name])


def _violation(own: str, other: str) -> str | None:
    if other not in ROW_OF_PACKAGE:
        return f"unknown package {other!r}; give it a row in tests/test_layers.py"
    if other == own or ROW_OF_PACKAGE[other] < ROW_OF_PACKAGE[own]:
        return None
    same = ROW_OF_PACKAGE[other] == ROW_OF_PACKAGE[own]
    return f"imports {other}, {'a package of its own row' if same else 'a row below'}"


def test_every_package_has_a_row() -> None:
    files = _files()
    assert len(files) >= FEWEST_FILES
    assert {_package(path) for path in files} <= ROW_OF_PACKAGE.keys()


def test_imports_point_downward() -> None:
    violations = [
        f"{path.relative_to(ROOT)}: {violation}"
        for path in _files()
        for module, name in sorted(_imports(path))
        if (other := _imported_package(module, name)) is not None
        if (violation := _violation(_package(path), other)) is not None
    ]
    assert not violations, "\n".join(violations)


def test_the_library_is_small_enough_to_be_known_by_heart() -> None:
    files = [path for path in _files() if not _package(path).startswith("app/")]
    assert len(files) <= MOST_FILES
    folders = {path.parent for path in files} - {ROOT}
    assert len(folders) <= MOST_PACKAGES
    tree = ast.parse((ROOT / "train_pipeline" / "interleaved.py").read_text())
    (lines,) = (
        (node.end_lineno or 0) - node.lineno + 1
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name == "InterleavedTrainPipeline"
    )
    assert lines <= MOST_LINES_OF_THE_PIPELINE


def test_config_needs_no_torch() -> None:
    files = [path for path in _files() if _package(path) == "app/config"]
    assert len(files) >= 3
    for path in files:
        packages = {module.split(".")[0] for module, _ in _imports(path)}
        assert packages.isdisjoint(NOT_IN_CONFIG), path


@pytest.mark.parametrize(
    ("own", "other", "violation"),
    [
        ("storage", "exchange", None),
        ("ops", "ops", None),
        ("ops", "storage", "a row below"),
        ("sharding", "planner", "a package of its own row"),
        ("ops", "cellar", "unknown package 'cellar'"),
    ],
)
def test_the_rule_itself(own: str, other: str, violation: str | None) -> None:
    found = _violation(own, other)
    assert found is None if violation is None else violation in str(found)
