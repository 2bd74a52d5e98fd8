"""A model that CONTRIBUTING shows is one file and one configuration: what it says works."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import yaml

from torchrec_picasso.app.cli.main import main
from torchrec_picasso.app.config import TrainConfig, parse_config
from torchrec_picasso.app.zoo import models
from torchrec_picasso.app.zoo.registry import build_model, make_source

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
    model = build_model(config, source)
    for collection in model.embeddings.collections.values():
        collection.to_empty(device=torch.device("cpu"))
        for parameter in collection.parameters():
            torch.nn.init.uniform_(parameter, -0.1, 0.1)
    loss, (_, logits, labels) = model(next(source.batches(0, 1)))
    loss.backward()
    assert logits.shape == labels.shape == (512,)
    assert all(parameter.grad is not None for parameter in model.parameters())

    assert main(["models"]) == 0
    listed = capsys.readouterr().out
    assert "two_towers\n  reads user: one_hot, profile\n" in listed
    assert "  sizes: hidden=[64, 32]\n" in listed
    assert "dien\n  reads target" in listed
