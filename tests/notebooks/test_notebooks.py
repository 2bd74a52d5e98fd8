"""Every notebook runs from top to bottom, on its defaults and on files, and is stored bare."""

from __future__ import annotations

import ast
import json
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from matplotlib import pyplot

from torchrec_picasso import CommCurves
from torchrec_picasso.train_pipeline.schedule import Setting, training_schedule

FOLDER = Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def test_there_are_notebooks() -> None:
    assert [path.name for path in NOTEBOOKS] == [
        "00_quickstart.ipynb",
        "01_skew.ipynb",
        "02_plan.ipynb",
        "03_interleaving.ipynb",
    ]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_stored_without_outputs(path: Path) -> None:
    for cell in json.loads(path.read_text())["cells"]:
        assert not cell.get("outputs")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_cells_hold_no_functions_and_no_loops(path: Path) -> None:
    nodes = [node for body in code_cells(path) for node in ast.walk(ast.Module(body, []))]
    forbidden = (ast.FunctionDef, ast.ClassDef, ast.Lambda, ast.For, ast.While, ast.Try)
    assert not [ast.unparse(node) for node in nodes if isinstance(node, forbidden)]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_runs_on_its_defaults(path: Path) -> None:
    _, tables = ran(path)
    assert tables
    assert all(len(table) for table in tables)


def test_skew_runs_on_a_parquet_file(tmp_path: Path) -> None:
    num_samples, hours = 4000, 8
    rng = np.random.default_rng(0)
    columns = {
        "user": rng.zipf(1.3, num_samples) % 500,
        "item": rng.zipf(1.5, num_samples) % 3000,
        "at_s": np.linspace(0, hours * 3600 - 1, num_samples).astype(np.int64),
    }
    pq.write_table(pa.table(columns), tmp_path / "clicks.parquet")
    names, tables = run(
        FOLDER / "01_skew.ipynb",
        DATA=str(tmp_path / "clicks.parquet"),
        FEATURES=["user", "item"],
        TIME_COLUMN="at_s",
        HOT_ROWS=50,
    )
    assert list(names["summary"].index) == ["user", "item"]
    assert list(names["summary"]["lookups"]) == [num_samples] * 2
    assert list(names["summary"]["distinct"]) == [
        len(np.unique(columns[name])) for name in ("user", "item")
    ]
    assert len(names["drift"].coverage) == hours - 1
    assert all(len(table) for table in tables)


def test_plan_runs_on_a_file_of_curves(tmp_path: Path) -> None:
    curves = CommCurves.assumed(8, gbytes_per_s=0.01, latency_ms=0.5)
    curves.to_json(tmp_path / "curves.json")
    names, tables = run(FOLDER / "02_plan.ipynb", CURVES=str(tmp_path / "curves.json"))
    assert names["decision"].curves == curves
    assert names["decision"].world_size == 8
    assert all(len(table) for table in tables)


def test_interleaving_is_exact_and_shows_a_whole_step() -> None:
    names, _ = ran(FOLDER / "03_interleaving.ipynb")
    # float32 sums in another order, over some steps
    assert names["exactness"].iloc[:, 0].max() < 1e-4
    assert (names["interleaved"].iloc[:, 1] < 1e-3).all()
    assert [timeline.rank for timeline in names["timelines"]] == [0, 1]
    ops = names["spans"].query("kind == 'compute' and rank == 0")["op"]
    assert list(ops) == list(training_schedule(Setting(4, lookahead=True)).to_frame()["op"])


def code_cells(path: Path) -> list[list[ast.stmt]]:
    cells = json.loads(path.read_text())["cells"]
    return [ast.parse("".join(c["source"])).body for c in cells if c["cell_type"] == "code"]


@cache
def ran(path: Path) -> tuple[dict[str, Any], list[pd.DataFrame]]:
    """Runs a notebook on its defaults, once."""
    return run(path)


def run(path: Path, **parameters: Any) -> tuple[dict[str, Any], list[pd.DataFrame]]:
    """Runs the code cells; parameters replace those that the first one sets.

    Returns:
        The notebook's names, and the tables that its cells end in.
    """
    mpl.use("Agg")
    first, *others = code_cells(path)
    names: dict[str, Any] = {}
    exec(compile(ast.Module(first, []), path.name, "exec"), names)
    unknown = parameters.keys() - names.keys()
    assert not unknown, f"{path.name} has no parameters {sorted(unknown)}"
    names.update(parameters)
    shown: list[Any] = []
    for body in others:
        last = body.pop() if isinstance(body[-1], ast.Expr) else None
        exec(compile(ast.Module(body, []), path.name, "exec"), names)
        if last is not None:
            shown.append(eval(compile(ast.Expression(last.value), path.name, "eval"), names))
    pyplot.close("all")
    return names, [value for value in shown if isinstance(value, pd.DataFrame)]
