"""A lookup on another stream than backward's, as TrainPipelineFusedSparseDist does it.

Rows are updated at backward's end, on its stream; the next batch is looked up on a stream of its
own before anybody waited for that, and pooled on backward's. There is no device here: see
``stream_races.py``.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.sharding.jobs import ODD, PLAIN, Job, build, make_batch, storages_of
from tests.support.shared_run import run_once
from tests.train_pipeline.stream_races import RaceDetector
from torchrec_picasso.ops import sorts, streams
from torchrec_picasso.ops.streams import WriteOrder
from torchrec_picasso.rows.group import RowBuffers
from torchrec_picasso.storage.row_storage import RowStorage

JOBS = {
    "one_table": Job(placement={"*": 2}, tables=PLAIN),
    "two_tables": Job(placement={"*": 2}, tables=PLAIN, two_tables=True),
    "weighted_packs": Job(placement={"*": 2, "one_row": 1}, tables=ODD, weighted=True),
    "bags": Job(placement={"*": 2, "b": "bags"}, tables=PLAIN),
    "wire": Job(placement={"*": 2}, tables=PLAIN, wire="fp16"),
}


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


def _train(
    rank: int,
    world_size: int,
    job: Job,
    write_order: type[WriteOrder] = WriteOrder,
    stream_of: Callable[[torch.device], None] | None = None,
) -> set[str]:
    model = build(job, rank, world_size)
    detector = RaceDetector()
    ebc = model.module.ebc
    for storage in storages_of(model):
        storage._order = write_order(torch.device("cuda"))
        _watch_writes(detector, storage)
    batches = [make_batch(job, rank, step) for step in range(3)]  # ids are not the matter
    with pytest.MonkeyPatch.context() as patch, detector.in_place_of_the_device(), detector:
        if stream_of is not None:
            patch.setattr(streams, "_current_stream", stream_of)
        patch.setattr(RowBuffers, "release", lambda *_: None)  # a device's allocator does it
        for batch in batches:
            with detector.stream(detector.beside):
                context = ebc.create_context()
                features = ebc.input_dist(context, batch.sparse_features).wait().wait()
                features.record_stream(detector.computing)
                context.record_stream(detector.computing)
                output = ebc.compute_and_output_dist(context, features)
            detector.computing.wait_stream(detector.beside)
            output.wait().values().square().sum().backward()
        with detector.stream(detector.beside):
            model.state_dict()
    return detector.races


def _run(rank: int, world_size: int) -> dict[str, set[str]]:
    sorts._RADIX_KEYS.clear()  # what numpy sorts, the detector does not see
    found = {name: _train(rank, world_size, job) for name, job in JOBS.items()}
    found["order"] = _train(rank, world_size, JOBS["one_table"], write_order=_Careless)
    found["memory"] = _train(rank, world_size, JOBS["weighted_packs"], stream_of=lambda _: None)
    return found


@pytest.mark.parametrize("name", JOBS)
def test_a_lookup_beside_backward_does_not_race(name: str) -> None:
    assert [on_rank[name] for on_rank in run_once(_run, 2)] == [set(), set()]


@pytest.mark.parametrize(
    ("name", "races"),
    [
        ("order", ["index_select.default on stream 1 does not wait for 0"]),
        (
            "memory",
            [
                "all-to-all sends memory of 1 not recorded for 0",
                "aten.index_select.default uses memory of 1 not recorded for 0",  # weights
                "aten._foreach_copy_.default uses memory of 1 not recorded for 0",  # what arrived
            ],
        ),
    ],
)
def test_a_careless_lookup_is_found(name: str, races: list[str]) -> None:
    for on_rank in run_once(_run, 2):
        for race in races:
            assert any(race in found for found in on_rank[name]), on_rank[name]
