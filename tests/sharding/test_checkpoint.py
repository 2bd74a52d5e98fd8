"""Checkpoints are plain TorchRec's: the same keys, types and shapes, loadable both ways.

That training goes on under another placement, on other ranks, as if it had never stopped, is a test
of ``tests/benchmarks/test_reliability.py``.

Tables of few rows, which ranks can hardly share: 1 to 9 rows on 1 to 4 ranks. A checkpoint tells
the blocks of a table apart by where they start, so an empty block in front of a full one would
shadow it. The planner makes the plans; every link of a chain of world sizes loads what the one
before saved, under another hot set, trains and saves. What is loaded must be what was saved, bit by
bit, and what is trained then what stock TorchRec trains that loads the same."""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torchrec
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec import KeyedJaggedTensor
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import Topology
from torchrec.distributed.sharding_plan import table_wise

from tests.sharding.jobs import (
    Job,
    Result,
    assert_same_results,
    build,
    checkpoint_of,
    dense_optimizer,
    result_of,
    run_jobs,
    train,
    whole,
)
from tests.support.hosts import pretend_hosts
from tests.support.placing import distribute, place
from tests.support.tables import bags_of, stats_of, tables_of
from torchrec_picasso import HotColdEmbeddingBagCollectionSharder, hot_cold_planner
from torchrec_picasso.app.launch.run_ranks import run_ranks
from torchrec_picasso.frequency import FrequencyStats

STOCK = Job(placement={"*": "row_wise"}, optimizer="adagrad")
OURS = Job(placement={"*": 4}, optimizer="adagrad")
OTHER_HOT = Job(placement={"a": 30, "b": 1, "c": 0}, optimizer="adagrad")
PLACED = {
    "stock": STOCK,
    "ours": OURS,
    "other_hot": OTHER_HOT,
    "two_tables": dataclasses.replace(OURS, two_tables=True),
    "table_wise": dataclasses.replace(STOCK, placement={"*": "table_wise"}),
    "bags": dataclasses.replace(OURS, placement={"*": "bags"}),
}


def _describe(value: Any) -> Any:
    if isinstance(value, ShardedTensor):
        shards = [
            (tuple(s.shard_offsets), tuple(s.shard_sizes)) for s in value.metadata().shards_metadata
        ]
        return type(value).__name__, tuple(value.size()), value.dtype, shards
    if isinstance(value, dict):
        return {key: _describe(inner) for key, inner in value.items()}
    if isinstance(value, Tensor):
        return type(value).__name__, tuple(value.shape), value.dtype
    return type(value).__name__


def _describe_states(rank: int, world_size: int, jobs: dict[str, Job]) -> dict[str, Any]:
    described = {}
    for name, job in jobs.items():
        model = build(job, rank, world_size)
        described[name] = (
            _describe(dict(model.state_dict())),
            _describe(model.fused_optimizer.state_dict()),
            [n for n, _ in model.named_parameters()],
            [n for n, _ in model.named_buffers()],
        )
    return described


@pytest.mark.parametrize("world_size", [2, 3])
def test_keys_types_and_shapes_are_those_of_the_stock_placement(world_size: int) -> None:
    for rank in run_ranks(_describe_states, world_size, PLACED, timeout_s=100):
        for name in ("ours", "other_hot", "two_tables"):
            assert rank[name] == rank["stock"]
        assert rank["bags"] == rank["table_wise"]


def _one_rank_reads_state(rank: int, world_size: int, job: Job) -> list[float]:
    """A state dict taken on one rank only must not make the ranks disagree."""
    model = build(job, rank, world_size)
    losses = train(model, job, rank, range(3))
    if rank == 0:
        model.state_dict()
        model.fused_optimizer.state_dict()
    return losses + train(model, job, rank, range(3, 6), dense_optimizer(model))


def test_reading_state_on_one_rank_neither_hangs_nor_changes_training() -> None:
    job = dataclasses.replace(OURS, num_steps=6)
    cut = run_ranks(_one_rank_reads_state, 2, job, timeout_s=60)
    uncut = run_ranks(run_jobs, 2, {"ours": job}, timeout_s=60)
    for rank in range(2):
        assert cut[rank] == uncut[rank]["ours"].losses


KINDS = ("none", "some", "all")
ROWS = {f"{kind}_{rows}": rows for rows in range(1, 10) for kind in KINDS}
BATCH = 3
STEPS = range(1, 3)
"""Trained after a load."""


@dataclass(frozen=True)
class Link:
    """One run of the chain; ``turn`` moves every table on to the next kind of hot set."""

    world_size: int
    turn: int
    counted: bool = True
    by_host: bool = False
    """Whether rows travel between hosts of two ranks each."""

    @property
    def hot_rows(self) -> dict[str, int]:
        """No row, every second row or all rows of each table."""
        kinds = {name: (KINDS.index(name.split("_")[0]) + self.turn) % 3 for name in ROWS}
        return {name: rows * kinds[name] // 2 for name, rows in ROWS.items()}


CHAIN = (
    Link(2, turn=0),
    Link(4, turn=0, by_host=True),
    Link(8, turn=1, by_host=True),
    Link(3, turn=1),
    Link(4, turn=2, counted=False),
    Link(1, turn=2),
    Link(2, turn=1),
)


class TinyModel(nn.Module):
    """Tables of two dims and two optimizers, whose states are per row and per element."""

    def __init__(self) -> None:
        super().__init__()
        tables = [replace(each, dim=4) if each.rows % 2 else each for each in tables_of(ROWS, 8)]
        self.ebc = bags_of(tables)
        for name, rows in ROWS.items():
            kind = torchrec.optim.RowWiseAdagrad if rows % 3 else torch.optim.Adagrad
            parameters = self.ebc.embedding_bags[name].parameters()
            apply_optimizer_in_backward(kind, parameters, {"lr": 0.1})


def _stats() -> FrequencyStats:
    """Low rows are the frequent ones, so that hot rows and load lie at the front."""
    return stats_of(ROWS, lambda rows: torch.arange(rows, 0, -1) ** 3 + 1, 10, BATCH)


def _batch(rank: int, step: int) -> KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    ids = [torch.randint(rows, (BATCH,), generator=generator) for rows in ROWS.values()]
    return KeyedJaggedTensor(
        keys=[f"f_{name}" for name in ROWS],
        values=torch.cat(ids),
        lengths=torch.ones(BATCH * len(ROWS), dtype=torch.int32),
    )


def _load(model: Any, source: str) -> Result:
    state = checkpoint_of(model)
    dcp.load(state, checkpoint_id=source)
    model.load_state_dict(state["model"])
    model.fused_optimizer.load_state_dict(state["optim"])
    return result_of(model, [])


def _train(model: Any, rank: int, steps: Iterable[int]) -> Result:
    losses = []
    for step in steps:
        loss = model.module.ebc(_batch(rank, step)).wait().values().square().sum()
        loss.backward()
        losses.append(loss.item())
    return result_of(model, losses)


def _stock() -> Any:
    """The model with whole tables, as TorchRec shards it."""
    model, sharder = TinyModel(), EmbeddingBagCollectionSharder()
    ways = {name: table_wise(rank=i % dist.get_world_size()) for i, name in enumerate(ROWS)}
    return distribute(model, {"ebc": place(model.ebc, sharder, ways)}, [sharder])


def _load_train_save(
    rank: int, world_size: int, link: Link, source: str | None, target: str
) -> tuple[list[list[int]], Result, list[Result]]:
    """Returns the block sizes of all tables, what was saved, and of every link but the first what
    was loaded and what stock trains from there."""
    model, sharder = TinyModel(), HotColdEmbeddingBagCollectionSharder()
    pg = dist.group.WORLD
    plan = hot_cold_planner(
        Topology(world_size=world_size, compute_device="cpu"),
        _stats() if link.counted else None,
        hot_rows=link.hot_rows,
        batch_size=BATCH,
        debug=False,
    ).collective_plan(model, [sharder], pg)
    if link.by_host:
        pretend_hosts(rank, 2)
        for placed in plan.plan["ebc"].values():
            placed.cache_params.form = "node_rows"
    sharded = distribute(model, plan.plan, [sharder])
    _train(sharded, rank, [0])  # so that replicas are filled, and must notice what is loaded
    checked = []
    if source is not None:
        stock = _stock()
        checked.append(_load(sharded, source))
        _load(stock, source)
        checked.append(_train(stock, rank, STEPS))
    saved = _train(sharded, rank, STEPS)
    dcp.save(checkpoint_of(sharded), checkpoint_id=target)
    blocks = [
        [shard.shard_sizes[0] for shard in plan.plan["ebc"][name].sharding_spec.shards]
        for name in ROWS
    ]
    return blocks, saved, checked


def test_tiny_tables_are_saved_and_loaded_on_any_number_of_ranks(tmp_path: Path) -> None:
    source, saved = None, list[Result]()
    for position, link in enumerate(CHAIN):
        before, target = saved, str(tmp_path / str(position))
        answers = run_ranks(_load_train_save, link.world_size, link, source, target, timeout_s=120)
        for blocks, rows in zip(answers[0][0], ROWS.values(), strict=True):
            filled = min(rows, link.world_size)
            assert sum(blocks) == rows
            assert [size > 0 for size in blocks] == [r < filled for r in range(link.world_size)]
        saved = [answer[1] for answer in answers]
        if source is not None:
            loaded, stock = zip(*(answer[2] for answer in answers))
            for kind in ("weights", "states"):
                mine, its = whole(loaded, kind), whole(before, kind)
                assert len(mine) >= len(ROWS)
                torch.testing.assert_close(mine, its, rtol=0, atol=0)
            assert_same_results(saved, stock)
        source = target
