"""Every notebook runs from top to bottom on its defaults, and is stored without outputs."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pandas as pd
import pytest

FOLDER = Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def test_there_are_notebooks() -> None:
    assert len(NOTEBOOKS) >= 1


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_stored_without_outputs(path: Path) -> None:
    for cell in json.loads(path.read_text())["cells"]:
        assert not cell.get("outputs")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_runs(path: Path) -> None:
    mpl.use("Agg")
    namespace: dict[str, Any] = {}
    shown: list[Any] = []
    for cell in json.loads(path.read_text())["cells"]:
        if cell["cell_type"] != "code":
            continue
        body = ast.parse("".join(cell["source"])).body
        last = body.pop() if isinstance(body[-1], ast.Expr) else None
        exec(compile(ast.Module(body, []), path.name, "exec"), namespace)
        if last is not None:
            shown.append(eval(compile(ast.Expression(last.value), path.name, "eval"), namespace))
    tables = [value for value in shown if isinstance(value, pd.DataFrame)]
    assert tables
    assert all(len(table) for table in tables)
