"""Quality checks: areas under curves, intervals of their differences, and the gate itself."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from tests.app.cli.support import error_of
from torchrec_picasso.app.cli.main import main
from torchrec_picasso.app.config import OptimizerConfig, TrainConfig, load_config, parse_config
from torchrec_picasso.app.config.load import load_rules
from torchrec_picasso.app.config.quality import CHECK_KINDS, QualityCheck, QualityConfig
from torchrec_picasso.app.runs.evaluate import area_under_curve
from torchrec_picasso.app.runs.quality import Checker, Scores, paired_bootstrap
from torchrec_picasso.errors import ConfigError

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
    scores = (labels + np.random.default_rng(seed).normal(size=num) * noise).astype(np.float32)
    return Scores(losses=[], labels_NT=labels[:, None], scores_NT=scores[:, None])


def test_figures_of_several_tasks_are_their_means() -> None:
    one, other = _scores(1.0, 2), _scores(3.0, 3)
    flipped = 1 - other.labels_NT
    both = Scores(
        losses=[],
        labels_NT=np.concatenate([one.labels_NT, flipped], axis=1),
        scores_NT=np.concatenate([one.scores_NT, other.scores_NT], axis=1),
    )
    assert both.aucs == [one.auc, pytest.approx(1 - other.auc)]
    assert both.auc == pytest.approx((one.auc + 1 - other.auc) / 2)
    assert both.first_tasks(1).aucs == [one.auc]
    by = paired_bootstrap([one], [other])
    both_better = paired_bootstrap(
        [both], [Scores(losses=[], labels_NT=both.labels_NT, scores_NT=both.scores_NT[:, ::-1])]
    )
    assert both_better.low < both_better.difference < both_better.high
    assert by.low > 0


def test_log_loss_is_the_mean_cross_entropy() -> None:
    labels = np.array([[1, 0], [0, 0]], dtype=np.float32)
    scores = np.array([[0.5, 0.25], [0.0, 0.5]], dtype=np.float32)
    expected = (2 * np.log(2) - np.log(0.75)) / 4
    assert Scores(losses=[], labels_NT=labels, scores_NT=scores).log_loss == pytest.approx(expected)


def test_an_interval_tells_a_better_model_from_one_as_good() -> None:
    better = paired_bootstrap([_scores(1.0, 2)], [_scores(1.6, 3)])
    assert 0 < better.low < better.difference < better.high
    alike = paired_bootstrap([_scores(1.0, 2)], [_scores(1.0, 3)])
    assert alike.low < 0 < alike.high
    same = paired_bootstrap([_scores(1.0, 2)], [_scores(1.0, 2)])
    assert (same.low, same.difference, same.high) == (0, 0, 0)


def test_more_folds_tell_smaller_differences() -> None:
    ours, other = _scores(1.0, 2), _scores(1.04, 3)
    one = paired_bootstrap([ours], [other])
    # scores of another scale: samples of two folds are never put in one order
    shifted = [dataclasses.replace(each, scores_NT=each.scores_NT + 100) for each in (ours, other)]
    four = paired_bootstrap([ours, shifted[0]] * 2, [other, shifted[1]] * 2)
    assert four.difference == pytest.approx(one.difference, abs=1e-4)
    assert (four.high - four.low) / (one.high - one.low) == pytest.approx(0.5, abs=0.1)


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
        "  absent: {config: dlrm.yaml, data: no_such_file.parquet}\n"
        "  known: {kind: value, config: linear.yaml, steps: 3, metric: log_loss, value: 0.7,"
        " tolerance: 0.5}\n"
        "  not_so: {kind: value, config: linear.yaml, steps: 3, value: 0.1, tolerance: 0.01}\n",
    )
    kept = tmp_path / "results.json"
    asked = ["quality", "--config", path, "--json", str(kept), "--seed", "5", "--only"]
    assert main([*asked, "parity", "absent", "known"]) == 0
    found = json.loads(kept.read_text())
    assert found["seed"] == 5
    assert "torch" in found["environment"]
    checks = found["checks"]
    assert checks["absent"] == {"passed_over": "there is no no_such_file.parquet"}
    assert checks["known"]["kind"] == "value"
    assert 0.2 < checks["known"]["log_loss"] < 1.2
    assert checks["parity"]["holds"]
    assert checks["parity"]["loss_difference"] < 1e-4
    printed = capsys.readouterr().out
    assert "parity: holds: 6 losses within " in printed
    assert "absent: passed over, there is no no_such_file.parquet" in printed
    message = error_of([*asked, "never", "not_so"], capsys)
    assert message == "2 of the checks do not hold: never, not_so"
    checks = json.loads(kept.read_text())["checks"]
    assert (
        checks["never"]["low"] == checks["never"]["high"] == 0
    )  # one training, compared to itself
    assert not checks["not_so"]["holds"]
    message = error_of(["quality", "--config", path, "--only", "nver"], capsys)
    assert message.endswith(
        "there is no check nver; checks are parity, never, absent, known, not_so"
    )
    message = error_of(["quality", "--config", path, "--json", "no/such.json"], capsys)
    assert message.startswith("--json no/such.json: there is no folder no;")


@pytest.mark.parametrize(
    ("check", "words"),
    [
        ({}, "checks.a.config: names no configuration; give a file"),
        ({"config": "x", "kind": "above"}, "checks.a.baseline: kind above needs one"),
        ({"config": "x", "baseline": "y"}, "no other kind has it, got kind parity and y"),
        ({"config": "x", "kind": "value", "value": 0.7}, "checks.a.tolerance: kind value needs"),
        ({"config": "x", "tolerance": 0.1}, "no other kind has it, got kind parity and 0.1"),
        ({"config": "x", "metric": "f1"}, "checks.a.metric: expected one of auc, log_loss"),
        ({"config": "x", "baseline_sizes": {"a": 1}}, "baseline_sizes: kind parity has no other"),
        ({"config": "x", "baseline_optimizer": {"dense_lr": 0.1}}, "optimizer: kind parity has no"),
        ({"config": "x", "folds": [1]}, "checks.a.folds: kind parity trains on the first alone"),
        (
            {"config": "x", "kind": "above", "baseline": "y", "folds": [1, 1]},
            "checks.a.folds: expected each once, at least one, got [1, 1]",
        ),
        ({"config": "x", "optimizer": {"lr": 1}}, "checks.a.optimizer.lr: unknown key"),
        ({"config": "x", "kind": "better"}, "checks.a.kind: expected one of parity, above, value"),
        ({"confg": "x"}, "checks.a.confg: unknown key; did you mean 'config'?"),
        ({"config": "x", "steps": 0}, "checks.a.steps: expected at least 1, got 0"),
    ],
)
def test_checks_that_cannot_be_used(check: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(QualityConfig, {"checks": {"a": check}}, "quality.yaml")
    assert words in str(caught.value)
    assert QualityCheck(config="x").steps == 50


def test_the_shipped_gate_has_every_kind_and_names_files_that_are_there() -> None:
    folder = Path(__file__).parents[3] / "configs"
    checks = load_rules(QualityConfig, folder / "quality.yaml").checks or {}
    assert {check.kind for check in checks.values()} == set(CHECK_KINDS)
    for path in folder.glob("quality*.yaml"):
        for check in (load_rules(QualityConfig, path).checks or {}).values():
            for name in filter(None, (check.config, check.baseline)):
                load_config(folder / name)


def test_sides_and_folds_train_as_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write(tmp_path, "")
    trained: list[TrainConfig] = []

    def trains(self: Checker, config: TrainConfig) -> Scores:
        trained.append(config)
        return _scores(1.0 if config.model.kind == "dlrm" else 3.0, config.data.heldout_fold)

    monkeypatch.setattr(Checker, "_score", trains)
    check = QualityCheck(
        kind="above",
        config="dlrm.yaml",
        baseline="linear.yaml",
        data="samples.parquet",
        folds=(1, 3),
        steps=7,
        optimizer=OptimizerConfig(dense_lr=0.1),
        baseline_steps=5,
        baseline_optimizer=OptimizerConfig(dense_lr=0.2),
    )
    result = Checker(folder=tmp_path, seed=4).check(check)
    assert result.holds
    assert result.figures["samples"] == 6000
    found = [(c.model.kind, c.data.heldout_fold, c.steps, c.optimizer.dense_lr) for c in trained]
    linear = "logistic_regression"
    assert found == [
        *(("dlrm", 1, 7, 0.1), ("dlrm", 3, 7, 0.1)),
        *((linear, 1, 5, 0.2), (linear, 3, 5, 0.2)),
    ]
    assert {(each.seed, each.data.path) for each in trained} == {(4, "samples.parquet")}
