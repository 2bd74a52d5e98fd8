"""Every notebook runs on a kernel of its own, without noise, and on files; its outputs are stored.

What JupyterLab would show is what is tested: the kernel's messages, its children's among them.
"""

import ast
import base64
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import matplotlib as mpl
import nbformat
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from matplotlib import pyplot

from tests.notebooks.outputs import FOLDER, NOTEBOOKS, executed, kinds_of_outputs, source_hash
from tests.support.packaging import ROOT, pins, setup_settings
from torchrec_picasso import CommCurves

MOST_PICTURE_BYTES = 60_000
MACHINE = re.compile(r"/(root|home|work|tmp|usr|opt|var)/|site-packages|[Ww]arning")
"""Paths of a machine, and what a package says of itself."""

CHECKS = {
    "03_interleaving.ipynb": """
assert (difference.max() < 1e-4).all()  # float32 sums in another order
assert "AUC 0." in done.stdout
assert picture.stat().st_size > 10_000
""",
    "06_hstu.ipynb": """
assert max(busiest, key=busiest.get).startswith("row-wise") and busiest["ours"] < 1.25
assert figures["MB sent"].idxmin() == "ours" and peak.max(axis=1).idxmax() == "table_wise"
""",
}
"""Run behind the last cell, where a notebook's own numbers are to be right."""


def test_there_are_notebooks() -> None:
    assert [path.name for path in NOTEBOOKS] == [
        "00_quickstart.ipynb",
        "01_skew.ipynb",
        "02_plan.ipynb",
        "03_interleaving.ipynb",
        "06_hstu.ipynb",
    ]


def test_what_opens_and_runs_them_can_be_installed() -> None:
    extras = setup_settings()["extras_require"]
    extra = {*extras["notebook"], *extras["app"]} - {"torchrec_picasso[app]"}
    assert {"jupyterlab", "ipykernel", "nbclient", "matplotlib"} <= extra
    assert extra <= pins("requirements.txt", "requirements-notebook.txt").keys()


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_opens_them_in_jupyterlab() -> None:
    command = ["make", "--dry-run", "--directory", str(ROOT), "notebooks"]
    outside = {name: value for name, value in os.environ.items() if "MAKE" not in name}
    outside.pop("ARGS", None)  # of a `make test` that runs this
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=30, check=True, env=outside
    )
    assert any(line.split() == [".venv/bin/jupyter-lab", "notebooks"] for line in done.stdout.splitlines())


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_stored_outputs_are_of_this_code_and_of_no_machine(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert notebook.metadata.get("outputs_of") == source_hash(notebook), "make notebook-outputs"
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    for output in [output for cell in code for output in cell.outputs]:
        data = dict(output.get("data", {"text": output.get("text")}))
        picture = base64.b64decode(data.pop("image/png", ""))
        assert len(picture) < MOST_PICTURE_BYTES
        assert not MACHINE.search(json.dumps(data))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_cells_hold_no_functions_and_no_loops(path: Path) -> None:
    nodes = [node for body in code_cells(path) for node in ast.walk(ast.Module(body, []))]
    forbidden = (ast.FunctionDef, ast.ClassDef, ast.Lambda, ast.For, ast.While, ast.Try)
    assert not [ast.unparse(node) for node in nodes if isinstance(node, forbidden)]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_runs_on_its_defaults(path: Path) -> None:
    notebook = executed(path, CHECKS.get(path.name, ""))
    notebook.cells.pop()
    assert kinds_of_outputs(notebook) == kinds_of_outputs(nbformat.read(path, as_version=4))
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    noise = [output.text for output in outputs if output.get("name") == "stderr"]
    assert not noise
    shown = [output.data for output in outputs if "data" in output]
    tables = [data["text/html"] for data in shown if "text/html" in data]
    assert tables
    assert all("<td>" in table for table in tables)
    assert any("image/png" in data for data in shown)


def test_noise_of_a_child_process_would_be_seen(tmp_path: Path) -> None:
    notebook = nbformat.v4.new_notebook()
    for command in ("echo quiet", "echo noisy >&2"):
        notebook.cells.append(nbformat.v4.new_code_cell(f"import os\nos.system({command!r})"))
    # on a busy machine the output of a child process may arrive with the next cell's
    notebook.cells.append(nbformat.v4.new_code_cell("import time\ntime.sleep(2)"))
    nbformat.write(notebook, tmp_path / "noise.ipynb")
    cells = executed(tmp_path / "noise.ipynb").cells
    outputs = [output for cell in cells for output in cell.outputs]
    assert [o.name for o in outputs if o.output_type == "stream"] == ["stdout", "stderr"]


def test_skew_runs_on_a_parquet_file(tmp_path: Path) -> None:
    num_samples = 4000
    rng = np.random.default_rng(0)
    columns = {
        "user": rng.zipf(1.3, num_samples) % 500,
        "item": rng.zipf(1.5, num_samples) % 3000,
    }
    pq.write_table(pa.table(columns), tmp_path / "clicks.parquet")
    names, tables = run(
        FOLDER / "01_skew.ipynb",
        DATA=str(tmp_path / "clicks.parquet"),
        FEATURES=["user", "item"],
    )
    assert list(names["summary"].index) == ["user", "item"]
    assert list(names["summary"]["lookups"]) == [num_samples] * 2
    assert list(names["summary"]["distinct"]) == [
        len(np.unique(columns[name])) for name in ("user", "item")
    ]
    assert all(len(table) for table in tables)


def test_plan_runs_on_a_file_of_curves(tmp_path: Path) -> None:
    curves = CommCurves.assumed(8, gbytes_per_s=0.01, latency_ms=0.5)
    curves.to_json(tmp_path / "curves.json")
    names, tables = run(FOLDER / "02_plan.ipynb", CURVES=str(tmp_path / "curves.json"))
    assert names["decision"].curves == curves
    assert names["decision"].world_size == 8
    assert all(len(table) for table in tables)


def code_cells(path: Path) -> list[list[ast.stmt]]:
    cells = json.loads(path.read_text())["cells"]
    return [ast.parse("".join(c["source"])).body for c in cells if c["cell_type"] == "code"]


def run(path: Path, **parameters: Any) -> tuple[dict[str, Any], list[pd.DataFrame]]:
    """A notebook's names under other parameters, and the tables that its cells end in."""
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
