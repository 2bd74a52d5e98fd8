"""Small steps: input that is missing is told at once, and kept figures become a picture."""

import json
from pathlib import Path

import pytest

from benchmarks.fields.variants import AGAIN, VARIANTS
from benchmarks.small_steps import Cell, draw, main, read_cell

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


def _variant(samples_per_s: float, gains: list[float], is_stock: bool = False) -> dict[str, object]:
    return {
        "samples_per_s": samples_per_s,
        "ratio_by_round": gains,
        "is_stock": is_stock,
        "step_ms": [0.0, 1e3 / samples_per_s, 9e3],
        "cpu_s_per_step": 2 / samples_per_s,
        "tables": {"hot_cold": 3},
        "num_micro_batches": 1,
        "lookahead": True,
    }


def test_a_stock_variant_once_more_is_not_compared_with(tmp_path: Path) -> None:
    assert VARIANTS["table_wise"].is_stock
    assert not VARIANTS[AGAIN].is_stock
    variants = {
        "table_wise": _variant(100.0, [1.0, 1.0, 1.0], is_stock=True),
        "planner": _variant(50.0, [0.5, 0.5, 0.5], is_stock=True),
        AGAIN: _variant(200.0, [1.0, 2.0, 3.0]),
        "ours": _variant(150.0, [1.1, 1.5, 1.6]),
        "all_rows": _variant(120.0, [1.2, 1.2, 1.2]),
    }
    document = {
        "variants": variants,
        "errors": {"step": dict.fromkeys(variants, 0.1)},
        "question": {"hosts": 2},
        "tables": [None] * 3,
    }
    path = tmp_path / "fields_64_16_0.json"
    path.write_text(json.dumps(document))
    cell = read_cell(path)
    assert (cell.gain, cell.again_gain, cell.all_rows_gain) == (1.5, 2.0, 1.2)
    assert (cell.stock_ms, cell.stock_cpu_ms) == (10.0, 10.0)
    del variants[AGAIN]
    path.write_text(json.dumps(document))
    assert read_cell(path).again_gain is None
