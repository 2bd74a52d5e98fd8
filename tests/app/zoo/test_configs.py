"""Every shipped configuration trains, is evaluated, writes checkpoints and is resumed from them.

A model that CONTRIBUTING shows is one file and one configuration: what it says works.
"""

import dataclasses
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.app.zoo.test_models import on_cpu
from torchrec_picasso.app.cli.main import main
from torchrec_picasso.app.config import (
    CheckpointConfig,
    DataConfig,
    FeatureConfig,
    ModelConfig,
    PipelineConfig,
    TrainConfig,
    load_config,
    parse_config,
)
from torchrec_picasso.app.launch.run_ranks import run_ranks
from torchrec_picasso.app.runs.train import train_on_rank
from torchrec_picasso.app.zoo import models
from torchrec_picasso.app.zoo.kinds import model_kinds
from torchrec_picasso.app.zoo.model_kinds import data_kind
from torchrec_picasso.app.zoo.registry import build_model, make_source
from torchrec_picasso.errors import ConfigError

FOLDER = Path(__file__).parents[3] / "configs"
CONFIGS = sorted(path for path in FOLDER.glob("*.yaml") if not path.stem.startswith("quality"))
STEPS = 4
RESUMED = ("din_taobao", "mmoe_generated", "deepfm_criteo", "hstu_stream")
"""With sequences, with several tasks, with two collections of bags, with Adam and a warm-up."""


def tiny(config: TrainConfig, folder: Path) -> TrainConfig:
    scale = {"row_scale": 0.0005} if config.data.kind == "criteo" else {}
    data = dataclasses.replace(config.data, batch_size=32, heldout_steps=2, max_history=6, **scale)
    return dataclasses.replace(
        config,
        steps=STEPS,
        log_every=2,
        data=data,
        pipeline=PipelineConfig(num_micro_batches=2, lookahead=True),
        sharding=dataclasses.replace(config.sharding, hot_rows=40),
        checkpoint=CheckpointConfig(folder=str(folder), every_steps=2),
    )


def test_there_is_one_for_every_model() -> None:
    assert {load_config(path).model.kind for path in CONFIGS} == set(model_kinds())


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_it_trains_and_is_resumed(path: Path, tmp_path: Path) -> None:
    config = load_config(path)
    run = tiny(config, tmp_path)
    first = run_ranks(train_on_rank, 2, run, False, timeout_s=120)[0]
    assert len(first["losses"]) == STEPS
    assert len(first["aucs"]) == config.data.num_tasks
    assert all(0.0 < auc < 1.0 for auc in first["aucs"])
    if path.stem not in RESUMED:
        return
    shutil.rmtree(tmp_path / f"step_{STEPS:08d}")  # as if it had been cut off before
    again = run_ranks(train_on_rank, 2, run, True, timeout_s=120)[0]
    assert again["first_step"] == STEPS - 2
    assert again["losses"] == pytest.approx(first["losses"][-2:], rel=1e-5)


CRITEO, CLICKS = DataConfig(batch_size=8), DataConfig(kind="clicks", batch_size=8)
STREAM = DataConfig(kind="stream", batch_size=8, num_candidates=3)


def made(kind: str, data: DataConfig, sizes: Any = None, **features: FeatureConfig) -> None:
    model = ModelConfig(kind=kind, sizes=sizes, embedding_dim=8)
    config = TrainConfig(model=model, data=data, features=features or None)
    build_model(config, make_source(config.data, 0))


@pytest.mark.parametrize(
    ("kind", "data", "sizes", "features", "words"),
    [
        ("dim", CRITEO, None, {}, "there is no 'dim'; models are can, deepfm, "),
        ("din", CRITEO, None, {}, "a din reads 'target', which this data has not"),
        ("dlrm", CLICKS, None, {}, "a dlrm reads Criteo's columns"),
        ("dlrm", DataConfig(num_tasks=2), None, {}, "Criteo's columns and learns one label"),
        ("din", CLICKS, {"hiden": 3}, {}, "sizes.hiden: a din has no such size; it has attention_"),
        ("din", CLICKS, {"hidden": "x"}, {}, "model.sizes: a din cannot have"),
        ("can", CLICKS, {"sizes": (8, 4, 4)}, {}, "group 'network' has dims"),
        ("din", CLICKS, None, {"targets": {}}, "a din has no such group; it reads target, history"),
        (
            "wukong",
            CRITEO,
            None,
            {"fields": {"columns": ("c1", "c99")}},
            "has no column c99; it ha",
        ),
        (
            "mmoe",
            CRITEO,
            {"num_tasks": 2},
            {},
            "of 2 tasks cannot learn from samples with 1 labels",
        ),
        ("hstu", CLICKS, None, {}, "reads 'cross', which this data has not; it has fields, target"),
        ("pooled_history", STREAM, None, {}, "whose candidates are 3; set data.kind to clicks"),
        ("hstu", STREAM, {"num_tasks": 2}, {}, "2 tasks cannot learn from samples with 1 labels"),
        ("din", CLICKS, None, {"target": {"dim": 32}}, "reads the tables of 'target'"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    kind: str, data: DataConfig, sizes: Any, features: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        made(kind, data, sizes, **{name: FeatureConfig(**each) for name, each in features.items()})
    assert words in str(caught.value)


@pytest.mark.parametrize("kind", ["deepfm", "wukong", "mmoe"])
def test_models_of_fields_read_clicks_too(kind: str) -> None:
    assert data_kind(kind) == "criteo"
    made(kind, CLICKS)


def test_negatives_are_as_many_as_the_clicks_of_the_history() -> None:
    features = next(make_source(CLICKS, seed=3).batches(1, 2)).sparse_features
    history = features["item_history"].lengths()
    assert features["item_negatives"].lengths().equal(history)
    assert features["category_negatives"].lengths().equal(history)
    assert int(history.max()) <= CLICKS.max_history
    # the columns of a negative are those of one sample
    items, categories = (features[f"{name}_negatives"].values() for name in ("item", "category"))
    assert items.remainder(40).equal(categories)


def test_tasks_are_as_alike_as_asked() -> None:
    import numpy as np

    def agreement(alike: float) -> float:
        data = DataConfig(batch_size=4000, row_scale=0.001, num_tasks=2, task_correlation=alike)
        labels = next(make_source(data, 0).batches(0, 1)).labels.numpy()
        assert labels.shape == (4000, 2)
        return float(np.corrcoef(labels.T)[0, 1])

    assert agreement(-1.0) < agreement(0.0) < agreement(0.9)
    one = DataConfig(batch_size=50, row_scale=0.001)
    two = dataclasses.replace(one, num_tasks=2)
    first = next(make_source(one, 0).batches(0, 1))
    assert first.labels.equal(next(make_source(two, 0).batches(0, 1)).labels[:, 0])


CONTRIBUTING = Path(__file__).parents[3] / "CONTRIBUTING.md"
IMPORTS = """\
from collections.abc import Mapping, Sequence
from typing import ClassVar
import torch
from torch import Tensor, nn
from torchrec_picasso.app.zoo.feature_groups import FeatureGroups, Found, Reads
from torchrec_picasso.app.zoo.layers import tower

"""


def test_the_eleventh_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    section = CONTRIBUTING.read_text().split("**A new model**")[1].split("**A new letter")[0]
    (code,) = re.findall(r"```python\n(.*?)```", section, re.S)
    (config_text,) = re.findall(r"```yaml\n(.*?)```", section, re.S)
    (tmp_path / "two_towers.py").write_text(IMPORTS + code)
    monkeypatch.setattr(models, "__path__", [*models.__path__, str(tmp_path)])

    config = parse_config(TrainConfig, yaml.safe_load(config_text), "CONTRIBUTING.md")
    source = make_source(config.data, 0)
    model = on_cpu(build_model(config, source))
    loss, (_, logits, labels) = model(next(source.batches(0, 1)))
    loss.backward()
    assert logits.shape == labels.shape == (512,)
    assert all(parameter.grad is not None for parameter in model.parameters())

    assert main(["models"]) == 0
    listed = capsys.readouterr().out
    assert "two_towers\n  reads user: one_hot, profile\n" in listed
    assert "  sizes: hidden=[64, 32]\n" in listed
    assert "dien\n  reads target" in listed
