"""The models of the zoo are proved, as their configurations train them, and rightly so."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.proof.models import assert_cut_is_whole, given_tables
from tests.proof.proved_models import NUM_OPERATORS, table
from torchrec_picasso.app.config import load_config
from torchrec_picasso.app.zoo.registry import build_model, make_source
from torchrec_picasso.proof.proof import prove

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.parametrize("name", NUM_OPERATORS)
def test_model_is_proved(name: str) -> None:
    config = load_config(CONFIGS / f"{name}.yaml")
    config = replace(config, data=replace(config.data, batch_size=24, max_history=4))
    source = make_source(config.data, config.seed)
    model, batch = build_model(config, source), next(iter(source.batches(0, 1)))
    given = given_tables(model, batch.sparse_features)
    proof = prove(model, batch, given)
    assert proof.reason is None
    assert proof.num_operators == NUM_OPERATORS[name]
    assert proof.guard.changed(batch) is None
    num_samples = batch.labels.size(0)
    assert_cut_is_whole(model, batch, given, [1, num_samples - 6, 5], "mean")


def test_the_page_has_the_table() -> None:
    assert table() in (CONFIGS.parent / "docs" / "features.md").read_text()


def test_dice_is_not_proved() -> None:
    config = load_config(CONFIGS / "din_taobao.yaml")
    sizes = {**(config.model.sizes or {}), "activation": "dice"}
    config = replace(config, model=replace(config.model, sizes=sizes))
    source = make_source(config.data, config.seed)
    model, batch = build_model(config, source), next(iter(source.batches(0, 1)))
    proof = prove(model, batch, given_tables(model, batch.sparse_features))
    assert "zoo/layers.py" in proof.reason
