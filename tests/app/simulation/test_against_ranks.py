"""Bytes of a simulated step, within 3 % of those that real ranks send."""

import dataclasses
import itertools
from pathlib import Path
from statistics import fmean

import pytest
from torchrec.distributed.types import ShardingPlan

from tests.support.hosts import pretend_hosts
from torchrec_picasso.app.config import (
    DataConfig,
    ModelConfig,
    PipelineConfig,
    ShardingConfig,
    TrainConfig,
)
from torchrec_picasso.app.launch.run_ranks import run_ranks
from torchrec_picasso.app.runs.pipelines import sparse_dist
from torchrec_picasso.app.runs.trainer import Trainer
from torchrec_picasso.app.runs.wire_meter import WireMeter
from torchrec_picasso.app.simulation.simulate import Question, simulate
from torchrec_picasso.app.simulation.stock_traffic import STOCK_TYPES
from torchrec_picasso.app.zoo.registry import build_model, make_source
from torchrec_picasso.cost import CommCurves
from torchrec_picasso.frequency import FrequencyStats

HOSTS, PLACES, NUM_STEPS = 2, 2, 8
CONFIG = TrainConfig(
    data=DataConfig(
        batch_size=256, num_tables=5, cardinalities="criteo_terabyte_10m", max_rows=900
    ),
    model=ModelConfig(embedding_dim=16, dense_layers=(8,), over_layers=(8,)),
    pipeline=PipelineConfig(num_micro_batches=1, lookahead=True, refresh=None),
)


def _by_host(plan: ShardingPlan) -> None:
    for module_plan in plan.plan.values():
        for sharding in module_plan.values():
            sharding.cache_params.form = "node_rows"


def _sent_bytes(rank: int, world_size: int, config: TrainConfig) -> dict[str, float]:
    """Bytes that this rank sends in a step, by form or sharding type."""
    pretend_hosts(rank, PLACES)
    source, found = make_source(config.data, config.seed), {}
    makers = {"rows": {}, "node_rows": {"change_plan": _by_host}}
    makers |= {name: {"placement": name, "make_pipeline": sparse_dist} for name in STOCK_TYPES}
    for name, options in makers.items():
        trainer = Trainer(config, source, **options)
        with WireMeter() as meter:
            trainer.train(itertools.islice(source.batches(rank, world_size), NUM_STEPS))
        found[name] = meter.count.sent_bytes / NUM_STEPS
    return found


@pytest.mark.parametrize("hot_rows", [0, 150])
def test_bytes_are_those_of_real_ranks(hot_rows: int, tmp_path: Path) -> None:
    """Hot rows and home blocks are those of the planner, by the same statistics."""
    stats, config = None, dataclasses.replace(CONFIG, sharding=ShardingConfig(hot_rows=0))
    if hot_rows:
        source = make_source(CONFIG.data, CONFIG.seed)
        batches = itertools.islice(source.batches(0, 1), 40)
        stats = FrequencyStats.collect(batches, build_model(CONFIG, source))
        stats.to_parquet(file := tmp_path / "stats.parquet")
        sharding = ShardingConfig(hot_rows=hot_rows, stats=str(file))
        config = dataclasses.replace(CONFIG, sharding=sharding)
    question = Question(
        config=config,
        clusters=[(HOSTS, PLACES)],
        curves=CommCurves.assumed(2, gbytes_per_s=0.1),
        stats=stats,
        hot_rows=hot_rows,
        num_micro_batches=1,
    )
    (simulated,) = simulate(question)
    by_rank = run_ranks(_sent_bytes, simulated.ranks, config, timeout_s=280)
    dense = 2 * (simulated.ranks - 1) / simulated.ranks * simulated.dense_bytes
    for priced in simulated.priced:
        sent = fmean(found[priced.name] for found in by_rank)
        assert sum(priced.sent_bytes.values()) + dense == pytest.approx(sent, rel=0.03), priced.name
        assert (priced.sent_bytes.get("hot", 0) > 0) == (
            hot_rows > 0 and "rows" in priced.name[-4:]
        )
    assert len(simulated.priced) == len(by_rank[0])
