"""A lookup on another stream than backward's, as TrainPipelineFusedSparseDist does it.

Rows are updated at backward's end, on its stream; the next batch is looked up on a stream of its
own before anybody waited for that. There is no device here: see ``stream_races.py``.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from tests.sharding.jobs import PLAIN, Job, build, make_batch, storages_of
from tests.train_pipeline.stream_races import RaceDetector
from torchrec_picasso.launch.run_ranks import run_ranks
from torchrec_picasso.storage.row_storage import RowStorage
from torchrec_picasso.storage.write_order import WriteOrder

JOB = Job(placement={"*": 2}, tables=PLAIN)


class _Careless(WriteOrder):
    def before_reading(self) -> None:
        pass


def _watch_writes(detector: RaceDetector, storage: RowStorage) -> None:
    """FBGEMM's update does not tell which tensors it writes."""
    update = storage.tables.update

    def updated(*args: Tensor) -> None:
        update(*args)
        for rows in storage.tables.per_row():
            detector.note_write(rows.homes)

    storage.tables.update = updated
    for rows in storage.tables.per_row():
        detector.watch(rows.homes)


def _train(rank: int, world_size: int, job: Job, order: type[WriteOrder]) -> set[str]:
    model = build(job, rank, world_size)
    detector = RaceDetector()
    (lookup,) = model.module.ebc._lookups
    for storage in storages_of(lookup):
        storage._order = order(torch.device("cuda"))
        _watch_writes(detector, storage)
    batches = [make_batch(job, rank, step) for step in range(3)]  # ids are not the matter
    with detector.in_place_of_the_device(), detector:
        for batch in batches:
            with detector.stream(detector.beside):
                pooled = model.module.ebc(batch.sparse_features)
                values = pooled.values()
            values.record_stream(detector.computing)
            detector.computing.wait_stream(detector.beside)
            values.square().sum().backward()
        with detector.stream(detector.beside):
            model.state_dict()
    return {race for race in detector.races if "does not wait for 0" in race}


@pytest.mark.parametrize("two_tables", [False, True], ids=["one_table", "two_tables"])
def test_rows_are_read_after_their_update(two_tables: bool) -> None:
    job = dataclasses.replace(JOB, two_tables=two_tables)
    assert run_ranks(_train, 2, job, WriteOrder, timeout_s=60) == [set(), set()]


def test_a_lookup_that_does_not_wait_is_found() -> None:
    for races in run_ranks(_train, 2, JOB, _Careless, timeout_s=60):
        assert any("index_select" in race for race in races)
