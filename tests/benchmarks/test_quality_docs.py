"""The tables of docs/quality.md are those of the run that is kept."""

from __future__ import annotations

import json
import re
from pathlib import Path

from torchrec_picasso.app.config.load import load_rules
from torchrec_picasso.app.config.quality import QualityConfig

ROOT = Path(__file__).parents[2]
FIGURE = re.compile(r"[+-]?\d\.\d{4}|\d\.\de-\d\d")


def test_figures_are_those_of_the_kept_run() -> None:
    checks = json.loads((ROOT / "benchmarks/results/quality.json").read_text())["checks"]
    told = load_rules(QualityConfig, ROOT / "configs" / "quality.yaml").checks or {}
    assert list(checks) == list(told)
    seeds = json.loads((ROOT / "benchmarks/results/quality_seeds.json").read_text())["seeds"]
    by_samples = json.loads((ROOT / "benchmarks/results/quality_by_samples.json").read_text())
    found = [
        *checks.values(),
        *by_samples["checks"].values(),
        *(check for of in seeds.values() for check in of.values()),
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
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    figures = [figure for row in rows for figure in FIGURE.findall(row)]
    assert len(figures) > 60
    assert not [figure for figure in figures if figure not in kept]
