"""Rows that the batch before does not update are fetched before its update, and only those."""

from __future__ import annotations

import torch
from torchrec import KeyedJaggedTensor
from torchrec.datasets.utils import Batch

from tests.sharding.jobs import Job, Table, build
from tests.train_pipeline.runs import pipeline_of
from torchrec_picasso.app.launch.run_ranks import run_ranks
from torchrec_picasso.ops.row_order import CLEAN

JOB = Job(placement={"*": 0}, tables=(Table("a", 8, 1000, ("f0",)),))
IDS = (  # by step, by rank; homes are 0..499 and 500..999
    ((1, 2, 600), (3, 601)),
    ((1, 4, 5, 601, 700), (2, 3, 800)),
    ((4, 800, 6, 7), (900, 8)),
    ((9, 901), (4, 800)),
)


def _batch(ids: tuple[int, ...]) -> Batch:
    return Batch(
        dense_features=torch.zeros(len(ids), 1),
        sparse_features=KeyedJaggedTensor(
            keys=["f0"], values=torch.tensor(ids), lengths=torch.ones(len(ids), dtype=torch.int32)
        ),
        labels=torch.ones(len(ids)),
    )


def _clean_rows(rank: int, world_size: int, lookahead: bool) -> list[list[int]]:
    """By step after the first, the clean rows of each home that this rank's batch has."""
    model = build(JOB, rank, world_size)
    pipeline = pipeline_of(model, num_micro_batches=2, lookahead=lookahead)
    batches = iter([_batch(ids[rank]) for ids in IDS])
    found = []
    for _ in IDS[1:]:
        pipeline.progress(batches)
        (rows,) = pipeline._in_flight.first.rows
        order = rows.layout.packs[0].outgoing_by_fetch
        found.append(order.counts_EW[CLEAN])
    return found


def _both(rank: int, world_size: int) -> list[list[list[int]]]:
    return [_clean_rows(rank, world_size, lookahead) for lookahead in (True, False)]


def test_clean_rows_are_those_that_no_rank_used_in_the_step_before() -> None:
    for rank, (found, without) in enumerate(run_ranks(_both, 2, timeout_s=100)):
        for before, now, counts in zip(IDS, IDS[1:], found):
            clean = set(now[rank]) - set(before[0]) - set(before[1])
            assert counts == [sum(row < 500 for row in clean), sum(row >= 500 for row in clean)]
        assert without == [[0, 0]] * 3, "without lookahead no row is clean"
