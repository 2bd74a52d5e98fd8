"""By host, a row crosses hosts once per host that asks; on real ids at most 3/4 of the bytes cross.

The expected numbers are numpy's, from the ids alone. A rank then sends to the others of its host
and to those of its place on other hosts, and to nobody else, but for the flags of a step.
"""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from torchrec import KeyedJaggedTensor
from torchrec.datasets.utils import Batch

from tests.conftest import CRITEO_FILE, real_data
from tests.sharding.jobs import Job, Table, build
from tests.support.shared_run import run_once
from tests.support.wire import Message, MessageRecorder, elements
from tests.train_pipeline.runs import pipeline_of
from torchrec_picasso.cost.hot_cold import ByHost, HotColdTotals, level_bytes
from torchrec_picasso.cost.table_work import TableLoad, TableWork
from torchrec_picasso.exchange.agreement import Flags
from torchrec_picasso.frequency.spectrum import CountSpectrum

FEATURES = tuple(f"c{number + 1}" for number in range(26))
DIM, NUM_STEPS = 16, 4
BATCH_SIZE_OF = {(2, 2): 2048, (2, 4): 1024}
"""Samples of a rank, by number of hosts and of ranks on each."""
MOST_OF = {(2, 2): 0.87, (2, 4): 0.75}
"""Share of the bytes that cross without hosts."""


@cache
def _ids() -> np.ndarray:
    """A number from 0 for each id of a feature, features by samples."""
    path = real_data(CRITEO_FILE)
    assert path is not None
    data = pq.read_table(Path(path), columns=list(FEATURES)).to_pandas()
    return np.stack([np.unique(data[name].fillna(-1), return_inverse=True)[1] for name in FEATURES])


def _batch(rank: int, world_size: int, size: int, step: int) -> Batch:
    start = (step * world_size + rank) * size
    values = torch.from_numpy(_ids()[:, start : start + size].reshape(-1).copy())
    lengths = torch.ones(len(FEATURES) * size, dtype=torch.int32)
    features = KeyedJaggedTensor(keys=list(FEATURES), values=values, lengths=lengths)
    return Batch(torch.zeros(size, 1), features, torch.zeros(size))


def _job(by_host: bool, num_places: int) -> Job:
    rows = _ids().max(1) + 1
    return Job(
        placement={"*": 0},
        tables=tuple(Table(f"t_{f}", DIM, int(n), (f,)) for f, n in zip(FEATURES, rows)),
        by_host=("*",) if by_host else (),
        num_places=num_places,
    )


def _record(rank: int, world_size: int, hosts: tuple[int, int]) -> dict[bool, list[Message]]:
    """Messages of step 1, which trains batch 1, fetches rows of batch 2 and asks for those of 3."""
    found = {}
    for by_host in (False, True):
        model = build(_job(by_host, hosts[1]), rank, world_size)
        pipeline = pipeline_of(model, num_micro_batches=1, lookahead=False)
        size = BATCH_SIZE_OF[hosts]
        batches = iter([_batch(rank, world_size, size, step) for step in range(NUM_STEPS)])
        pipeline.progress(batches)
        with MessageRecorder() as recorder:
            pipeline.progress(batches)
        found[by_host] = recorder.messages
    return found


def _crossing(messages: Sequence[Message], rank: int, num_places: int) -> list[Message]:
    return [m for m in messages if m.to >= 0 and m.to // num_places != rank // num_places]


def _expected_rows(hosts: tuple[int, int], step: int) -> tuple[int, int]:
    """Rows that cross hosts in a step, once per rank that asks and once per host."""
    num_hosts, num_places = hosts
    size, world_size = BATCH_SIZE_OF[hosts], num_hosts * num_places
    per_rank = per_host = 0
    for ids in _ids():
        num_rows = int(ids.max()) + 1
        block = -(-num_rows // world_size)
        for host in range(num_hosts):
            rows_L = [
                np.unique(ids[(step * world_size + rank) * size :][:size])
                for rank in range(host * num_places, (host + 1) * num_places)
            ]
            rows = np.concatenate(rows_L)
            rows = rows[rows // block // num_places != host]
            per_rank, per_host = per_rank + len(rows), per_host + len(np.unique(rows))
    return per_rank, per_host


@pytest.mark.data
@pytest.mark.parametrize("hosts", BATCH_SIZE_OF)
def test_a_row_crosses_once_per_host(hosts: tuple[int, int]) -> None:
    num_hosts, num_places = hosts
    by_rank = run_once(_record, num_hosts * num_places, hosts)
    sent: dict[bool, dict[Any, int]] = {}
    for by_host in (False, True):
        crossing = [
            message
            for rank, found in enumerate(by_rank)
            for message in _crossing(found[by_host], rank, num_places)
        ]
        sent[by_host] = {
            dtype: elements(crossing, dtype) for dtype in (torch.float32, torch.int32, torch.int64)
        }
    per_rank, per_host = zip(*(_expected_rows(hosts, step) for step in (1, 2, 3)))
    for by_host, num_rows in ((False, per_rank), (True, per_host)):
        assert sent[by_host][torch.float32] == DIM * sum(num_rows[:2])
        assert sent[by_host][torch.int32] == per_rank[2]  # row numbers cross as they came
    flat, mine = (
        sum(num * dtype.itemsize for dtype, num in sent[by_host].items())
        for by_host in (False, True)
    )
    assert mine / flat <= MOST_OF[hosts], mine / flat


@pytest.mark.data
@pytest.mark.parametrize("hosts", BATCH_SIZE_OF)
def test_the_cost_model_expects_the_rows_that_cross(hosts: tuple[int, int]) -> None:
    """Within 3 %: the rows of four steps, from the counts of all samples."""
    (num_hosts, num_places), size = hosts, BATCH_SIZE_OF[hosts]
    world_size, num_steps = num_hosts * num_places, 4
    totals = HotColdTotals()
    for ids in _ids():
        counts = torch.from_numpy(np.bincount(ids))
        load = TableLoad(
            name="",
            num_embeddings=len(counts),
            dim=DIM,
            lookups=size,
            bags=size,
            spectrum=CountSpectrum.from_counts(counts, len(counts)),
        )
        work = TableWork(load, world_size, num_places)
        totals = totals.plus(HotColdTotals.from_table(work, 0, "node_rows"))
    by_host = ByHost(totals=totals, num_packs=1, ranks_per_host=num_places)
    per_rank, per_host = np.sum([_expected_rows(hosts, step) for step in range(num_steps)], axis=0)
    across = level_bytes(by_host, world_size)["across"]
    steps_of_all = num_steps * world_size
    assert across["rows"] * steps_of_all == pytest.approx(4 * DIM * per_host, rel=0.03)
    assert across["ids"] * steps_of_all == pytest.approx(4 * per_rank, rel=0.03)


@pytest.mark.data
@pytest.mark.parametrize("hosts", BATCH_SIZE_OF)
def test_a_rank_has_few_peers(hosts: tuple[int, int]) -> None:
    num_hosts, num_places = hosts
    for rank, found in enumerate(run_once(_record, num_hosts * num_places, hosts)):
        host, place = divmod(rank, num_places)
        peers = {host * num_places + other for other in range(num_places)}
        peers |= {other * num_places + place for other in range(num_hosts)}
        others = [m for m in found[True] if m.to >= 0 and m.to not in peers]
        assert {(m.dtype, m.num_elements) for m in others} == {("int64", len(Flags()))}
        assert len(peers - {rank}) == num_places - 1 + num_hosts - 1
