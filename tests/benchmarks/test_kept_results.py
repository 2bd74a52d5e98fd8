"""Results that are kept say what they were measured on, and documents have their figures."""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import hstu
from benchmarks.simulations import __main__ as simulations
from torchrec_picasso.app.config.load import load_rules
from torchrec_picasso.app.config.quality import QualityConfig

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
QUALITY_FIGURE = re.compile(r"[+-]?\d\.\d{4}|\d\.\de-\d\d")
FIGURE = re.compile(r"(?<![\w.])[+-]?\d+(?:,\d{3})*(?:\.\d+)?(?:e-\d\d)?(?![\w.])")
SMALLEST = 30
"""Smaller whole numbers may be part of a sentence, such as ``3 s``."""
FACTS = {"date_utc", "cpu", "num_cpus", "python", "torch", "torchrec", "torchrec-picasso"}


def read(name: str) -> Any:
    return json.loads((RESULTS / name).read_text())


def test_every_result_names_its_environment() -> None:
    files = sorted(RESULTS.glob("**/*.json"))
    assert files
    for file in files:
        if file.name != "summary.json":  # it sums up files beside it
            assert json.loads(file.read_text())["environment"].keys() >= FACTS, file.name


def test_figures_of_quality_are_those_of_the_kept_runs() -> None:
    checks = read("quality.json")["checks"]
    rules = load_rules(QualityConfig, ROOT / "configs" / "quality.yaml").checks or {}
    assert list(checks) == list(rules)
    seeds, hstu = read("quality_seeds.json")["seeds"], read("quality_hstu.json")["seeds"]
    by_samples = read("quality_by_samples.json")
    found = [
        *checks.values(),
        *by_samples["checks"].values(),
        *(check for each in (*seeds.values(), *hstu.values()) for check in each.values()),
    ]
    assert all(check["holds"] for check in found)
    kept = {
        form.format(figure)
        for check in found
        for figure in check.values()
        if isinstance(figure, float)
        for form in ("{:.4f}", "{:+.4f}", "{:.1e}")
    }
    text = (ROOT / "docs" / "quality.md").read_text()
    rows = [line for line in text.splitlines() if " | " in line]
    figures = [figure for row in rows for figure in QUALITY_FIGURE.findall(row)]
    assert len(figures) > 60
    assert not [figure for figure in figures if figure not in kept]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="its matplotlib draws otherwise")
@pytest.mark.parametrize(("drawing", "name"), [(simulations, "simulated.svg"), (hstu, "hstu.svg")])
def test_pictures_are_of_the_kept_results(drawing: Any, name: str, tmp_path: Path) -> None:
    assert drawing.main(["-o", str(drawn := tmp_path / name)]) == 0
    assert drawn.read_text() == (ROOT / "docs" / name).read_text()


def numbers(document: Any) -> Iterator[float]:
    """Yields every number of a document."""
    if isinstance(document, dict):
        for value in document.values():
            yield from numbers(value)
    elif isinstance(document, list):
        for value in document:
            yield from numbers(value)
    elif isinstance(document, (int, float)) and not isinstance(document, bool):
        yield document


def test_figures_of_reliability_are_those_of_the_kept_report() -> None:
    report = read("reliability/report.json")
    memory = read("reliability/memory.json")
    slopes = [memory[batches]["kib_a_step"] for batches in ("new", "repeated")]
    hostile = read("reliability/hostile_input.json")
    by_kind = hostile["fuzz_files"]["by_kind"]
    kinds = {name.split()[0] for name in by_kind}
    tried = {k: sum(n for name, n in by_kind.items() if name.split()[0] == k) for k in kinds}
    forms = ("{:,}", "{}", "{:.1e}", "{:.4f}", "{:.3f}", "{:.2f}")
    kept = {
        form.format(number)
        for number in numbers([report, hostile, tried, slopes])
        for form in forms
        if form != "{:,}" or isinstance(number, int)
    }
    text = (ROOT / "docs" / "reliability.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    cells = [cell for row in rows for cell in row.split("|")[2:]]
    figures = [figure for cell in cells for figure in FIGURE.findall(cell)]
    shown = [each for each in figures if not each.isdigit() or int(each) >= SMALLEST]
    assert len(shown) > 20
    assert not [figure for figure in shown if figure not in kept]


def test_nothing_of_the_kept_report_failed() -> None:
    report = read("reliability/report.json")
    questions = ("checkpoint_moves", "faults", "link_faults", "soak")
    assert not [name for name in questions if report[name]["failed"]]
    struck = report["faults"]
    assert struck["survived"] + struck["named"] == struck["faults"] == 80
    text = (ROOT / "docs" / "reliability.md").read_text()
    runs = [int(num) for num in re.findall(r"^\| [^|]+ \| (\d+) \|", text, re.MULTILINE)]
    assert sum(runs[:12]) == struck["faults"] + report["link_faults"]["drops"]
