"""Checkpoints of tables of few rows, which ranks can hardly share: 1 to 9 rows on 1 to 4 ranks.

A checkpoint tells the blocks of a table apart by where they start, so an empty block in front of a
full one would shadow it. The planner makes the plans; every link of a chain of world sizes loads
what the one before saved, under another hot set, trains a step and saves. What is loaded must be
what was saved, bit by bit.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torchrec
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.planner import Topology

from tests.sharding.jobs import Result, checkpoint_of, result_of, whole
from tests.support.placing import CPU, distribute
from tests.support.tables import configs_of, stats_of, tables_of
from torchrec_picasso import HotColdEmbeddingBagCollectionSharder, hot_cold_planner
from torchrec_picasso.app.launch.run_ranks import run_ranks
from torchrec_picasso.frequency import FrequencyStats

KINDS = ("none", "some", "all")
ROWS = {f"{kind}_{rows}": rows for rows in range(1, 10) for kind in KINDS}
BATCH = 3


@dataclass(frozen=True)
class Link:
    """One run of the chain; ``turn`` moves every table on to the next kind of hot set."""

    world_size: int
    turn: int
    counted: bool = True

    @property
    def hot_rows(self) -> dict[str, int]:
        """No row, every second row or all rows of each table."""
        kinds = {name: (KINDS.index(name.split("_")[0]) + self.turn) % 3 for name in ROWS}
        return {name: rows * kinds[name] // 2 for name, rows in ROWS.items()}


CHAIN = (
    Link(2, turn=0),
    Link(4, turn=0),
    Link(3, turn=1),
    Link(4, turn=2, counted=False),
    Link(1, turn=2),
    Link(2, turn=1),
)


class Model(nn.Module):
    """Tables of two dims and two optimizers, whose states are per row and per element."""

    def __init__(self) -> None:
        super().__init__()
        self.ebc = EmbeddingBagCollection(
            device=CPU,
            tables=configs_of(
                EmbeddingBagConfig,
                [replace(of, dim=4) if of.rows % 2 else of for of in tables_of(ROWS, 8)],
            ),
        )
        for name, rows in ROWS.items():
            kind = torchrec.optim.RowWiseAdagrad if rows % 3 else torch.optim.Adagrad
            parameters = self.ebc.embedding_bags[name].parameters()
            apply_optimizer_in_backward(kind, parameters, {"lr": 0.1})


def _stats() -> FrequencyStats:
    """Low rows are the frequent ones, so that hot rows and load lie at the front."""
    return stats_of(ROWS, lambda rows: torch.arange(rows, 0, -1) ** 3 + 1, 10, BATCH)


def _batch(rank: int) -> KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(rank)
    ids = [torch.randint(rows, (BATCH,), generator=generator) for rows in ROWS.values()]
    return KeyedJaggedTensor(
        keys=[f"f_{name}" for name in ROWS],
        values=torch.cat(ids),
        lengths=torch.ones(BATCH * len(ROWS), dtype=torch.int32),
    )


def _step(model: Any, rank: int) -> None:
    model.module.ebc(_batch(rank)).wait().values().square().sum().backward()


def _load_train_save(
    rank: int, world_size: int, link: Link, source: str | None, target: str
) -> tuple[list[list[int]], Result | None, Result]:
    """Returns the block sizes of all tables, what was loaded and what was saved."""
    model, sharder = Model(), HotColdEmbeddingBagCollectionSharder()
    pg = dist.group.WORLD
    plan = hot_cold_planner(
        Topology(world_size=world_size, compute_device="cpu"),
        _stats() if link.counted else None,
        hot_rows=link.hot_rows,
        batch_size=BATCH,
        debug=False,
    ).collective_plan(model, [sharder], pg)
    sharded = distribute(model, plan.plan, [sharder])
    _step(sharded, rank)  # so that replicas are filled, and must notice what is loaded
    loaded = None
    if source is not None:
        state = checkpoint_of(sharded)
        dcp.load(state, checkpoint_id=source)
        sharded.load_state_dict(state["model"])
        sharded.fused_optimizer.load_state_dict(state["optim"])
        loaded = result_of(sharded, [])
    _step(sharded, rank)
    dcp.save(checkpoint_of(sharded), checkpoint_id=target)
    blocks = [
        [shard.shard_sizes[0] for shard in plan.plan["ebc"][name].sharding_spec.shards]
        for name in ROWS
    ]
    return blocks, loaded, result_of(sharded, [])


def test_tiny_tables_are_saved_and_loaded_on_any_number_of_ranks(tmp_path: Path) -> None:
    source, saved = None, None
    for position, link in enumerate(CHAIN):
        target = str(tmp_path / str(position))
        answers = run_ranks(_load_train_save, link.world_size, link, source, target, timeout_s=120)
        for blocks, rows in zip(answers[0][0], ROWS.values(), strict=True):
            filled = min(rows, link.world_size)
            assert sum(blocks) == rows
            assert [size > 0 for size in blocks] == [
                rank < filled for rank in range(link.world_size)
            ]
        if saved is not None:
            loaded = [answer[1] for answer in answers]
            for kind in ("weights", "states"):
                mine, before = whole(loaded, kind), whole(saved, kind)
                assert mine.keys() == before.keys()
                assert len(mine) >= len(ROWS)
                for name, value in mine.items():
                    assert torch.equal(value, before[name]), name
        source, saved = target, [answer[2] for answer in answers]
