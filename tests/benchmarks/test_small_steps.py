"""Small steps: input that is missing is told at once, and kept figures become a picture."""

import json
from pathlib import Path

import pytest

from benchmarks.small_steps import Cell, draw, main

KEPT = Path(__file__).parents[2] / "benchmarks" / "results" / "small_steps.json"


def test_a_missing_file_of_any_model_is_told_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "criteo_tb_80k.parquet").touch()
    out = tmp_path / "out"
    assert main(["-o", str(out), "--data-folder", str(tmp_path), "--links", "0"]) == 2
    assert f"there is no {tmp_path / 'alimama_10k.parquet'}; leave" in capsys.readouterr().err
    assert not out.exists()


def test_kept_cells_are_drawn(tmp_path: Path) -> None:
    cells = [Cell(**cell) for cell in json.loads(KEPT.read_text())["cells"]]
    draw(cells, tmp_path / "map.png")
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")
