"""Runs the notebooks, or those named, and stores their outputs: ``make notebook-outputs``."""

import base64
import hashlib
import io
import os
import sys
import tempfile
from pathlib import Path
from unittest import mock

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode
from PIL import Image
from traitlets.config import Config

from tests.support.packaging import ROOT

FOLDER = ROOT / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
CELL_TIMEOUT_S = 200
_SETTINGS = ("JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "IPYTHONDIR")
_COLORS = 64


def executed(path: Path, *more_cells: str) -> NotebookNode:
    """Runs a notebook, and more cells behind it, on a new kernel; a cell's exception is raised.

    The kernel sees no settings and no kernels of the user. It must not know that a test is running:
    it would leave out what children print.
    """
    notebook = nbformat.read(path, as_version=4)
    notebook.cells += [nbformat.v4.new_code_cell(cell) for cell in more_cells]
    with tempfile.TemporaryDirectory(prefix="nb_") as folder, mock.patch.dict(os.environ):
        os.environ.update(dict.fromkeys(_SETTINGS, folder))
        environment = {name: v for name, v in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
        environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        client = NotebookClient(
            notebook,
            # no port: a socket's file, whose name must be short
            config=Config({"KernelManager": {"transport": "ipc", "ip": f"{folder}/s"}}),
            timeout=CELL_TIMEOUT_S,
            record_timing=False,
            resources={"metadata": {"path": str(FOLDER)}},
        )
        return client.execute(env=environment)


def source_hash(notebook: NotebookNode) -> str:
    """Stands for the code that outputs are of."""
    code = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    return hashlib.sha256("\0".join(code).encode()).hexdigest()


def kinds_of_outputs(notebook: NotebookNode) -> list[list[object]]:
    """Returns what each cell shows: streams by name, the rest by formats; equal neighbours once."""
    found = []
    for cell in notebook.cells:
        kinds = [o.get("name") or sorted(o.data) for o in cell.get("outputs", [])]
        found.append([kind for kind, last in zip(kinds, [None, *kinds]) if kind != last])
    return found


def _few_colors(png: str) -> str:
    """The same picture, base64, at a fraction of its size: drawings have few colours."""
    small = io.BytesIO()
    with Image.open(io.BytesIO(base64.b64decode(png))) as picture:
        picture.convert("RGB").quantize(_COLORS, Image.Quantize.MAXCOVERAGE).save(small, "png", optimize=True)
    return base64.b64encode(small.getvalue()).decode()


def main() -> None:
    for path in map(Path, sys.argv[1:] or NOTEBOOKS):
        notebook = executed(path)
        notebook.metadata = nbformat.read(path, as_version=4).metadata  # not this machine's
        notebook.metadata.outputs_of = source_hash(notebook)
        for cell in notebook.cells:
            for output in cell.get("outputs", []):
                if "image/png" in output.get("data", {}):
                    output.data["image/png"] = _few_colors(output.data["image/png"])
        nbformat.write(notebook, path)
        print(f"{path.name}: {path.stat().st_size >> 10} KiB")


if __name__ == "__main__":
    main()
