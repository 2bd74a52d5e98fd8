"""Every placement starts from the same weights and trains the same model."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from torchrec_picasso.app.config import (
    PLACEMENTS,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ShardingConfig,
    TrainConfig,
)
from torchrec_picasso.app.launch.run_ranks import run_ranks
from torchrec_picasso.app.runs.placements import make_placement
from torchrec_picasso.app.runs.trainer import Trainer
from torchrec_picasso.app.zoo.registry import make_source
from torchrec_picasso.errors import PlanError

STEPS = 4


def losses_of_all_placements(rank: int, world_size: int) -> dict[str, Any]:
    config = TrainConfig(
        data=DataConfig(batch_size=32, row_scale=0.001, num_tables=6, heldout_steps=1),
        model=ModelConfig(embedding_dim=8, dense_layers=(8,), over_layers=(8,)),
        sharding=ShardingConfig(hot_rows=30),
        optimizer=OptimizerConfig(embedding_optimizer="sgd", embedding_lr=0.5),
    )
    source = make_source(config.data, config.seed)
    batches = list(itertools.islice(source.batches(rank, world_size), STEPS))
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
