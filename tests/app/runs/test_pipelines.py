"""The configured pipeline trains, says what it does, and may change at a checkpoint.

Every placement starts from the same weights and trains the same model.
"""

import contextlib
import dataclasses
import io
import itertools
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.app.runs.tiny import tiny_run
from torchrec_picasso.app.config import (
    PLACEMENTS,
    CheckpointConfig,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    PipelineConfig,
    ShardingConfig,
    TrainConfig,
)
from torchrec_picasso.app.launch.run_ranks import run_ranks
from torchrec_picasso.app.runs.placements import make_placement
from torchrec_picasso.app.runs.train import train_on_rank
from torchrec_picasso.app.runs.trainer import Trainer
from torchrec_picasso.app.zoo.registry import make_source
from torchrec_picasso.cost import CommCurves
from torchrec_picasso.errors import PlanError

TIMEOUT_S = 120
STEPS = 8
ROUNDING = 1e-5
"""Relative; micro-batches add the same float32 gradients in another order, over some steps."""

CONFIG = tiny_run(batch_size=24, steps=STEPS)
STOCK = PipelineConfig(kind="sparse_dist")
ONE = PipelineConfig(num_micro_batches=1, lookahead=False)
FOUR = PipelineConfig(num_micro_batches=4, lookahead=True)


def _train(
    rank: int, world_size: int, pipeline: PipelineConfig, resume: bool = False, **settings: Any
) -> tuple[dict[str, Any], str]:
    """A run and what it said."""
    config = dataclasses.replace(CONFIG, pipeline=pipeline, **settings)
    with contextlib.redirect_stdout(io.StringIO()) as said:
        result = train_on_rank(rank, world_size, config, resume)
    return result, said.getvalue()


def all_pipelines(rank: int, world_size: int) -> list[tuple[dict[str, Any], str]]:
    return [_train(rank, world_size, pipeline) for pipeline in (STOCK, ONE, FOUR)]


def test_every_pipeline_trains_the_same_and_says_what_it_does() -> None:
    ranks = run_ranks(all_pipelines, 2, timeout_s=TIMEOUT_S)
    (stock, stock_said), (one, one_said), (four, four_said) = ranks[0]
    assert one["losses"] == pytest.approx(stock["losses"], rel=ROUNDING)
    assert four["losses"] == pytest.approx(stock["losses"], rel=ROUNDING)
    assert four["auc"] == pytest.approx(stock["auc"], abs=1e-3)
    module = "step 1: pipeline\n  model.sparse_arch.embedding_bag_collection: interleaved\n"
    assert stock_said.count("step 1: pipeline\n  TrainPipelineSparseDist\n") == 1
    assert one_said.count(f"{module}  1 micro-batch without lookahead\n") == 1
    assert four_said.count(f"{module}  4 micro-batches with lookahead\n") == 1
    assert [said for _, said in ranks[1]] == [""] * 3


def automatic(rank: int, world_size: int) -> tuple[dict[str, Any], str, dict[str, Any]]:
    # at least 64 samples a micro-batch, else only whole batches are tried
    settings = {"steps": 60, "data": dataclasses.replace(CONFIG.data, batch_size=160)}
    result, said = _train(rank, world_size, PipelineConfig(lookahead=True), **settings)
    return result, said, _train(rank, world_size, STOCK, **settings)[0]


def test_an_automatic_choice_is_told_once_it_is_made() -> None:
    result, said, stock = run_ranks(automatic, 2, timeout_s=TIMEOUT_S)[0]
    assert result["losses"] == pytest.approx(stock["losses"], rel=1e-3)  # Adagrad, 60 steps
    assert said.count(": pipeline\n") == 1
    assert "with lookahead; the fastest of 1 micro-batch with lookahead: " in said
    assert "step 1: pipeline" not in said


def too_short_to_choose(rank: int, world_size: int) -> str:
    return _train(rank, world_size, PipelineConfig(), steps=5)[1]


def test_a_run_that_ends_before_its_choice_says_so() -> None:
    said = run_ranks(too_short_to_choose, 2, timeout_s=TIMEOUT_S)[0]
    assert "step 5: pipeline\n" in said
    assert (
        "; trying 2 settings\n" in said
    )  # with lookahead and without; batches are too small to cut


LONGEST_TRIAL = 44
"""More steps than a trial of two settings takes, the two near each other: 6 + 10 + 12 + 12."""


def go_on_with_a_choice(rank: int, world_size: int, folder: str) -> tuple[str, str]:
    kept = CheckpointConfig(folder=folder, every_steps=LONGEST_TRIAL)
    automatic = PipelineConfig()
    _train(rank, world_size, automatic, steps=LONGEST_TRIAL, checkpoint=kept)
    again = _train(rank, world_size, automatic, resume=True, steps=46, checkpoint=kept)
    larger = dataclasses.replace(CONFIG.data, batch_size=32)
    other = {"steps": 48, "checkpoint": kept, "data": larger}
    return again[1], _train(rank, world_size, automatic, resume=True, **other)[1]


def test_a_resumed_run_tries_no_settings_unless_its_batches_are_of_another_size(
    tmp_path: Path,
) -> None:
    job = (go_on_with_a_choice, 2, str(tmp_path / "run"))
    again, other = run_ranks(*job, timeout_s=TIMEOUT_S)[0]
    assert f"step {LONGEST_TRIAL + 1}: pipeline\n" in again
    assert "lookahead, as an earlier run chose\n" in again
    assert "; trying 2 settings\n" in other


STEPS_PLACED = 4


def losses_of_all_placements(rank: int, world_size: int) -> dict[str, Any]:
    config = TrainConfig(
        data=DataConfig(batch_size=32, row_scale=0.001, num_tables=6, heldout_steps=1),
        model=ModelConfig(embedding_dim=8, dense_layers=(8,), over_layers=(8,)),
        sharding=ShardingConfig(hot_rows=30),
        optimizer=OptimizerConfig(embedding_optimizer="sgd", embedding_lr=0.5),
    )
    source = make_source(config.data, config.seed)
    batches = list(itertools.islice(source.batches(rank, world_size), STEPS_PLACED))
    results = {}
    for name in PLACEMENTS:
        trainer = Trainer(config, source, placement=name)
        types = {
            sharding.sharding_type
            for module_plan in trainer.placement.plan.plan.values()
            for sharding in module_plan.values()
        }
        num_hot = sum(rows.numel() for rows in trainer.placement.hot_rows.values())
        results[name] = (trainer.mean_over_ranks(trainer.train(batches)), types, num_hot)
    return results


def test_placements_train_the_same_model() -> None:
    results = run_ranks(losses_of_all_placements, 2, timeout_s=120)[0]
    reference, _, _ = results["table_wise"]
    for name, (losses, types, num_hot) in results.items():
        # SGD is the same for rows, columns and replicas; only the order of sums differs.
        torch.testing.assert_close(losses, reference, rtol=1e-6, atol=0, msg=name)
        assert num_hot == (30 if name == "hot_cold" else 0)
        if name == "row_wise":  # four of the six tables have one row for two ranks
            assert types == {"row_wise", "table_wise"}
        elif name != "planner":
            assert types == {"row_wise" if name == "hot_cold" else name}


def test_unknown_placement() -> None:
    with pytest.raises(PlanError, match=r"placement: expected one of hot_cold, .*; got 'magic'"):
        make_placement("magic", torch.nn.Module(), None, device_type="cpu", batch_size=1)


def _warned(rank: int, world_size: int, path: str) -> list[str]:
    config = tiny_run(sharding=ShardingConfig(hot_rows=20, curves=path))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Trainer(config, make_source(config.data, config.seed), placement="hot_cold")
    return [str(each.message) for each in caught if "measured on" in str(each.message)]


def test_a_run_warns_once_of_curves_from_other_hardware(tmp_path: Path) -> None:
    curves, path = CommCurves.assumed(2, gbytes_per_s=1.0), tmp_path / "curves.json"
    dataclasses.replace(curves, measured_on={"cpu": "Z80"}).to_json(path)
    first, second = run_ranks(_warned, 2, str(path), timeout_s=TIMEOUT_S)
    assert [each.startswith(f"{path} was measured on cpu Z80, here ") for each in first] == [True]
    assert second == []
