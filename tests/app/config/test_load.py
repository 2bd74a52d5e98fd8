"""Configuration files: every problem at once, each with its place; no YAML runs anything."""

from pathlib import Path

import pytest

from tests.support.refusals import refusal
from torchrec_picasso.app.config import (
    CheckpointConfig,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    PipelineConfig,
    TrainConfig,
    load_config,
    parse_config,
)
from torchrec_picasso.app.config.load import load_rules
from torchrec_picasso.app.config.quality import QualityCheck, QualityConfig
from torchrec_picasso.errors import ConfigError


def refused(document: object) -> str:
    return refusal(ConfigError, parse_config, TrainConfig, document, place="run.yaml")


def test_nested_values_arrive(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "steps: 7\n"
        "model: {embedding_dim: 8, dense_layers: [4, 4]}\n"
        "sharding: {hot_rows: {t_c1: 3}}\n"
        "optimizer: {embedding_lr: 1e-3}\n"
        "pipeline: {num_micro_batches: 4, lookahead: off}\n"
        "checkpoint: {folder: x, keep_last: null}\n"
    )
    config = load_config(file)
    assert config.steps == 7
    assert config.model.dense_layers == (4, 4)
    assert config.sharding.hot_rows == {"t_c1": 3}
    assert config.optimizer.embedding_lr == 1e-3
    assert config.data == DataConfig()
    assert config.pipeline == PipelineConfig(num_micro_batches=4, lookahead=False)
    assert config.checkpoint.keep_last is None
    assert TrainConfig().checkpoint.keep_last == 3


def test_both_settings_of_another_pipeline_are_refused_at_once() -> None:
    both = {"num_micro_batches": 2, "lookahead": True}
    message = refusal(ConfigError, PipelineConfig, kind="sparse_dist", **both)
    assert message.count("only kind interleaved has it") == 2


def test_empty_file_gives_defaults(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("")
    assert load_config(tmp_path / "run.yaml") == TrainConfig()


def test_all_problems_at_once_each_with_its_place() -> None:
    message = refused(
        {
            "stepz": 3,
            "data": {"batch_size": "x", "row_scale": 2},
            "model": {"embedding_dim": 6, "dense_layers": [8, "a"]},
        }
    )
    assert message.splitlines() == [
        "run.yaml: 5 problems",
        "  stepz: unknown key; did you mean 'steps'?",
        "  data.batch_size: expected a whole number, got 'x' (str)",
        "  data.row_scale: expected at most 1, got 2",
        "  model.embedding_dim: expected a multiple of 4, got 6",
        "  model.dense_layers: expected a list, each item a whole number, got [8, 'a'] (list)",
    ]


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ({"steps": 0}, "steps: expected at least 1, got 0"),
        ({"steps": True}, "steps: expected a whole number, got True (bool)"),
        ({"steps": None}, "steps: expected a whole number, got None (NoneType)"),
        ({"optimizer": {"dense_lr": 0}}, "optimizer.dense_lr: expected more than 0, got 0"),
        ({"optimizer": {"dense_lr": float("nan")}}, "expected a finite number, got nan"),
        ({"sharding": {"placement": "hot"}}, "sharding.placement: expected one of hot_cold, "),
        ({"sharding": {"hot_rows": {"t_c1": -1}}}, "hot_rows: expected at least 0, got -1"),
        ({"sharding": {"hot_rows": [1]}}, "mapping from text to a whole number or null, got [1]"),
        ({"data": 5}, "data: expected a mapping of settings, got 5 (int)"),
        ({"data": {"path": 5}}, "data.path: expected text or null, got 5 (int)"),
        ({"data": {"path": "x", "num_tables": 3}}, "data.num_tables: a Criteo file feeds 26"),
        ({"data": {"labels": "co_action"}}, "labels: co_action needs histories, and kind criteo"),
        ({"data": {"labels": "sines", "kind": "clicks"}}, "labels: only generated samples of kind"),
        ({"data": {"labels": "sines", "path": "x"}}, "labels: only generated samples of kind"),
        ({"data": {"heldout_fold": 1}}, "heldout_fold: only a Criteo file has several, got 1"),
        ({"data": {"kind": "fields", "path": "x"}}, "path: fields are generated, got 'x'"),
        ({"data": {"path": "x", "num_tasks": 2}}, "num_tasks: only generated samples of kind"),
        ({"pipeline": {"kind": "fused"}}, "pipeline.kind: expected one of interleaved, sparse_d"),
        ({"pipeline": {"lookahead": 1}}, "expected true or false or null, got 1 (int)"),
        ({"pipeline": None}, "pipeline: expected a mapping of settings, got None (NoneType)"),
        (
            {"pipeline": {"kind": "sparse_dist", "lookahead": False}},
            "pipeline.lookahead: only kind interleaved has it, got False with kind sparse_dist; "
            "remove lookahead or set kind to interleaved",
        ),
        ({"checkpoint": {"keep_last": 0}}, "keep_last: expected at least 1, got 0"),
        ({"qqqq": 1}, "qqqq: unknown key; known keys: steps, ranks"),
        ([1], "top level: expected a mapping of settings, got [1] (list)"),
    ],
)
def test_one_problem(document: object, expected: str) -> None:
    message = refused(document)
    assert message.startswith("run.yaml: 1 problem\n")
    assert expected in message


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, r"run\.yaml: cannot read the configuration"),
        (b"steps: 1\ndata: [1\n", r"run\.yaml:3: not valid YAML: "),
        (b"\xff\xfe\xfa", r"run\.yaml: not text in UTF-8"),
        (b"steps: 1\nsteps: 2\n", r"run\.yaml:2: not valid YAML: key 'steps' is given twice"),
    ],
)
def test_unreadable_files(tmp_path: Path, content: bytes | None, problem: str) -> None:
    if content is not None:
        (tmp_path / "run.yaml").write_bytes(content)
    with pytest.raises(ConfigError, match=problem):
        load_config(tmp_path / "run.yaml")


def test_keys_of_another_mapping_are_merged_and_may_be_given_anew(tmp_path: Path) -> None:
    path = tmp_path / "quality.yaml"
    path.write_text(
        "checks:\n  a: &a {config: x.yaml, kind: above, baseline: y.yaml, steps: 7}\n"
        "  b: {<<: *a, steps: 9}\n"
    )
    checks = load_rules(QualityConfig, path).checks or {}
    assert [(one.baseline, one.steps) for one in checks.values()] == [("y.yaml", 7), ("y.yaml", 9)]


def test_a_mapping_that_may_be_left_out() -> None:
    check = {"config": "x", "kind": "above", "baseline": "y"}

    def read(optimizer: object) -> QualityCheck:
        document = {"checks": {"a": {**check, "baseline_optimizer": optimizer}}}
        checks = parse_config(QualityConfig, document, "q").checks or {}
        return checks["a"]

    assert read(None).baseline_optimizer is None
    assert read({"dense_lr": 0.5}).baseline_optimizer == OptimizerConfig(dense_lr=0.5)
    with pytest.raises(ConfigError, match=r"checks\.a\.baseline_optimizer\.lr: unknown key"):
        read({"lr": 0.5})
    with pytest.raises(ConfigError, match="baseline_optimizer: expected a mapping of settings"):
        read(3)


def test_python_values_are_checked_by_the_same_rules() -> None:
    with pytest.raises(ConfigError, match="ModelConfig: embedding_dim: expected a multiple of 4"):
        ModelConfig(embedding_dim=6)
    with pytest.raises(ConfigError, match="DataConfig: num_tables: a Criteo file feeds 26"):
        DataConfig(path="x", num_tables=3)


def test_every_field_is_explained() -> None:
    import dataclasses

    seen = 0
    for part in (TrainConfig, DataConfig, ModelConfig, PipelineConfig, CheckpointConfig):
        for field in dataclasses.fields(part):
            if field.default is not dataclasses.MISSING:
                assert field.metadata["help"].endswith("."), field.name
                seen += 1
    assert seen >= 15


LAUGHS = "l0: &l0 [x]\n" + "".join(
    f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 9)}]\n" for n in range(1, 10)
)
MERGED = "m0: &m0 {a: 1}\n" + "".join(
    f"m{n}: &m{n} {{<<: [{', '.join([f'*m{n - 1}'] * 9)}]}}\n" for n in range(1, 10)
)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (LAUGHS, r":6: not valid YAML: more than 100,000 values with aliases written out"),
        (MERGED, r":6: not valid YAML: more than 100,000 values with aliases written out"),
        ("data: &a [*a]\n", r":1: not valid YAML: a value holds itself by an alias"),
        ("data: &a {<<: *a}\n", r":1: not valid YAML: a value holds itself by an alias"),
        ("steps: " + "[" * 20_000, r": not valid YAML: nested too deeply"),
        ("steps: !!int x\n", r": not valid YAML: a value is not of its type \(invalid literal"),
        ("steps: !!int ''\n", r": not valid YAML: a value is not of its type \(string index"),
        ("steps: !!bool maybe\n", r": not valid YAML: a value is not of its type"),
        ("steps: 2020-99-99\n", r": not valid YAML: a value is not of its type \(month must"),
        (f"steps: {'9' * 5000}\n", r": not valid YAML: a value is not of its type \(Exceeds"),
        ("? [a]\n: 3\n", r": not valid YAML: a value is not of its type \(unhashable"),
        (f"seed: 1{'0' * 400}\n", r"seed: expected a number of 64 bits at most, got one of 1329"),
        (f"{'k' * 1000}: 1\n", r"k{200}\.\.\.: unknown key; known keys: "),
        (f"data: {{kind: {'x' * 5000}}}\n", r"data\.kind: expected one of .*; got 'x{200}\.\.\.'"),
        (f"steps: [{'1, ' * 5000}]\n", r"steps: expected a whole number, got \[[1, ]{199}\.\.\. "),
    ],
)
def test_hostile_documents_are_refused_shortly(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(ConfigError, match=rf"run\.yaml(: 1 problem\n  )?{problem}") as caught:
        load_config(tmp_path / "run.yaml")
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    "value", ["!!python/object/apply:os.system ['touch {}']", "!!python/name:os.system", "!own 3"]
)
def test_tags_run_nothing(tmp_path: Path, value: str) -> None:
    marker = tmp_path / "a_command_ran"
    (tmp_path / "run.yaml").write_text(f"steps: {value.format(marker)}\n")
    with pytest.raises(ConfigError, match=r"run\.yaml:1: not valid YAML: could not determine a co"):
        load_config(tmp_path / "run.yaml")
    assert not marker.exists()
