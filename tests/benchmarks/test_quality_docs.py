"""The tables of docs/quality.md are those of the run that is kept."""

from __future__ import annotations

import json
import re
from pathlib import Path

from torchrec_picasso.config.load import load_rules
from torchrec_picasso.config.quality import QualityConfig

ROOT = Path(__file__).parents[2]
NOT_YET = ["dhen_parity"]
"""Checks that the kept run found not to hold; docs/quality.md says so."""
FIGURE = re.compile(r"[+-]?\d\.\d{4}|\d\.\de-\d\d")


def test_figures_are_those_of_the_kept_run() -> None:
    checks = json.loads((ROOT / "benchmarks/results/quality.json").read_text())["checks"]
    told = load_rules(QualityConfig, ROOT / "configs" / "quality.yaml").checks or {}
    assert list(checks) == list(told)
    assert [name for name, check in checks.items() if not check["holds"]] == NOT_YET
    kept = {
        form.format(figure)
        for check in checks.values()
        for figure in check.values()
        if isinstance(figure, float)
        for form in ("{:.4f}", "{:+.4f}", "{:.1e}")
    }
    text = (ROOT / "docs" / "quality.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    figures = [figure for row in rows for figure in FIGURE.findall(row)]
    assert len(figures) > 60
    assert not [figure for figure in figures if figure not in kept]
