"""Quality checks: areas under curves, intervals of their differences, and the gate itself."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.cli.support import error_of
from torchrec_picasso.cli.main import main
from torchrec_picasso.config import parse_config
from torchrec_picasso.config.quality import QualityCheck, QualityConfig
from torchrec_picasso.errors import ConfigError
from torchrec_picasso.runs.quality import Scores, area_under_curve, paired_bootstrap

TINY = """\
ranks: 2
data: {batch_size: 64, row_scale: 0.0005, heldout_steps: 4}
model: {embedding_dim: 4, dense_layers: [8], over_layers: [8]}
"""
TINY_LINEAR = TINY.replace(
    "{embedding_dim: 4, dense_layers: [8], over_layers: [8]}", "{kind: logistic_regression}"
)


def test_the_area_is_the_share_of_pairs_in_order() -> None:
    rng = np.random.default_rng(0)
    labels = (rng.random(60) < 0.4).astype(np.float32)
    scores = rng.integers(0, 12, 60).astype(np.float32)  # many ties
    ones, zeros = scores[labels == 1], scores[labels == 0]
    pairs = (ones[:, None] > zeros) + 0.5 * (ones[:, None] == zeros)
    assert area_under_curve(labels, scores) == pytest.approx(float(pairs.mean()))
    assert area_under_curve(np.ones(4, np.float32), scores[:4]) == 0.5
    assert area_under_curve(labels, -scores) == pytest.approx(1 - float(pairs.mean()))


def _scores(noise: float, seed: int, num: int = 3000) -> Scores:
    rng = np.random.default_rng(1)
    labels = (rng.random(num) < 0.5).astype(np.float32)
    scores = labels + np.random.default_rng(seed).normal(size=num) * noise
    return Scores(losses=[], labels_N=labels, scores_N=scores.astype(np.float32))


def test_an_interval_tells_a_better_model_from_one_as_good() -> None:
    better = paired_bootstrap(_scores(1.0, 2), _scores(1.6, 3))
    assert 0 < better.low < better.difference < better.high
    alike = paired_bootstrap(_scores(1.0, 2), _scores(1.0, 3))
    assert alike.low < 0 < alike.high
    same = paired_bootstrap(_scores(1.0, 2), _scores(1.0, 2))
    assert (same.low, same.difference, same.high) == (0, 0, 0)


def _write(folder: Path, checks: str) -> str:
    (folder / "dlrm.yaml").write_text(TINY)
    (folder / "linear.yaml").write_text(TINY_LINEAR)
    (folder / "quality.yaml").write_text("checks:\n" + checks)
    return str(folder / "quality.yaml")


def test_the_gate_passes_what_holds_and_names_what_does_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = _write(
        tmp_path,
        "  parity: {config: dlrm.yaml, steps: 6, hot_rows: 50}\n"
        "  never: {kind: above, config: linear.yaml, baseline: linear.yaml, steps: 3}\n"
        "  absent: {config: dlrm.yaml, data: no_such_file.parquet}\n",
    )
    assert main(["quality", "--config", path, "--only", "parity", "absent"]) == 0
    printed = capsys.readouterr().out
    assert "parity: holds: 6 losses within " in printed
    assert "absent: passed over, there is no no_such_file.parquet" in printed
    message = error_of(["quality", "--config", path, "--only", "never"], capsys)
    assert message == "1 of the checks do not hold: never"
    message = error_of(["quality", "--config", path, "--only", "nver"], capsys)
    assert message.endswith("there is no check nver; checks are parity, never, absent")


@pytest.mark.parametrize(
    ("check", "words"),
    [
        ({}, "checks.a.config: names no configuration; give a file"),
        ({"config": "x", "kind": "above"}, "checks.a.baseline: kind above needs one"),
        ({"config": "x", "baseline": "y"}, "and kind parity none, got kind parity"),
        ({"config": "x", "kind": "better"}, "checks.a.kind: expected one of parity, above"),
        ({"confg": "x"}, "checks.a.confg: unknown key; did you mean 'config'?"),
        ({"config": "x", "steps": 0}, "checks.a.steps: expected at least 1, got 0"),
    ],
)
def test_checks_that_cannot_be_used(check: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(QualityConfig, {"checks": {"a": check}}, "quality.yaml")
    assert words in str(caught.value)
    assert QualityCheck(config="x").steps == 50
