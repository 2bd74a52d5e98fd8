"""The tables of docs/reliability.md are those of the report that is kept."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FIGURE = re.compile(r"(?<![\w.])[+-]?\d+(?:,\d{3})*(?:\.\d+)?(?:e-\d\d)?(?![\w.])")
SMALLEST = 30
"""Counts below it are also told in words, such as ``3 s``."""


def numbers(of: Any) -> Iterator[float]:
    """Every number of a document, and the sums of what was loaded and refused by kind."""
    if isinstance(of, dict):
        for value in of.values():
            yield from numbers(value)
    elif isinstance(of, list):
        for value in of:
            yield from numbers(value)
    elif isinstance(of, (int, float)) and not isinstance(of, bool):
        yield of


def test_figures_are_those_of_the_kept_report() -> None:
    report = json.loads((ROOT / "benchmarks/results/reliability/report.json").read_text())
    memory = json.loads((ROOT / "benchmarks/results/reliability/memory.json").read_text())
    slopes = [memory[batches]["kib_a_step"] for batches in ("new", "repeated")]
    hostile = json.loads((ROOT / "benchmarks/results/reliability/hostile_input.json").read_text())
    by_kind = hostile["fuzz_files"]["by_kind"]
    kinds = {name.split()[0] for name in by_kind}
    tried = {
        kind: sum(n for name, n in by_kind.items() if name.split()[0] == kind) for kind in kinds
    }
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
    told = [of for of in figures if not of.isdigit() or int(of) >= SMALLEST]
    assert len(told) > 40
    assert not [figure for figure in told if figure not in kept]


def test_nothing_of_the_kept_report_failed() -> None:
    report = json.loads((ROOT / "benchmarks/results/reliability/report.json").read_text())
    questions = ("checkpoint_moves", "faults", "link_faults", "soak")
    assert not [name for name in questions if report[name]["failed"]]
    struck = report["faults"]
    assert struck["survived"] + struck["named"] == struck["faults"] == 80
    text = (ROOT / "docs" / "reliability.md").read_text()
    runs = [
        int(row.split("|")[2]) for row in text.splitlines() if re.match(r"\| [^|]+ \| \d+ \|", row)
    ]
    assert sum(runs[:12]) == struck["faults"] + report["link_faults"]["drops"]
