"""Ids are made ready on a stream of their own, and nothing races with the one that computes.

There is no device here: streams are names, and :class:`RaceDetector` follows who waited for whom.
What is shown is that every use across streams is ordered and its memory kept, on all the ways that
a batch can take; not that a device overlaps them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.sharding.jobs import PLAIN, Job, build
from tests.train_pipeline.runs import batches_of, pipeline_of, run_to_the_end
from tests.train_pipeline.stream_races import RaceDetector
from torchrec_picasso.ops import order
from torchrec_picasso.train_pipeline.id_stream import IdStream
from torchrec_picasso.workloads.launch import RankError, run_ranks

Case = tuple[type[IdStream], str, int, bool]
"""Who hands over, which job, K, lookahead."""

JOBS = {
    "hot and cold": Job(placement={"*": 2}, batch_sizes=(6, 3)),
    "weighted": Job(placement={"*": 0}, tables=PLAIN[:2], weighted=True),
}
BATCHES = (5, 3)  # of each rank: the second goes on with empty ones


class _NotRecorded(IdStream):
    def hand_over(self, batches: Iterable[Any], tensors: Iterable[Tensor]) -> None:
        super().hand_over(batches, [])


class _NotWaitedFor(IdStream):
    def hand_over(self, batches: Iterable[Any], tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            tensor.record_stream(torch.get_device_module("cuda").current_stream())


CAREFUL = [
    (IdStream, name, num_micro_batches, lookahead)
    for name in JOBS
    for num_micro_batches in (1, 3)
    for lookahead in (False, True)
]
CARELESS = [(kind, "hot and cold", 3, True) for kind in (_NotRecorded, _NotWaitedFor)]


@dataclass(frozen=True)
class _Watched:
    races: set[str]
    num_ops: dict[int, int]
    """Operators by stream."""
    num_steps: int


def _train(rank: int, world_size: int, case: Case) -> _Watched:
    """A training with an evaluation in between."""
    kind, name, num_micro_batches, lookahead = case
    model = build(JOBS[name], rank, world_size)
    pipeline = pipeline_of(model, num_micro_batches=num_micro_batches, lookahead=lookahead)
    detector = RaceDetector()
    pipeline._id_stream = kind(detector.beside, detector.copying)
    batches = iter(batches_of(JOBS[name], rank, range(BATCHES[rank])))
    with detector.in_place_of_the_device(), detector:
        outputs = [pipeline.progress(batches) for _ in range(2)]
        model.eval()
        with torch.no_grad():
            outputs.append(pipeline.progress(batches))
        model.train()
        outputs += run_to_the_end(pipeline, batches)
    return _Watched(detector.races, detector.num_ops, len(outputs))


def _run(rank: int, world_size: int) -> dict[Case, _Watched]:
    order._RADIX_KEYS.clear()  # what numpy sorts, the detector does not see
    return {case: _train(rank, world_size, case) for case in CAREFUL + CARELESS}


@cache
def _once() -> list[dict[Case, _Watched]] | RankError:
    try:
        return run_ranks(_run, 2, timeout_s=200)
    except RankError as error:  # remembered: the tests that share the run must not repeat it
        return error


def _of_ranks(case: Case) -> list[_Watched]:
    by_rank = _once()
    if isinstance(by_rank, RankError):
        raise by_rank
    return [of_rank[case] for of_rank in by_rank]


@pytest.mark.parametrize("case", CAREFUL, ids=str)
def test_no_use_across_streams_races(case: Case) -> None:
    for watched in _of_ranks(case):
        assert not watched.races
        assert min(watched.num_ops[0], watched.num_ops[1]) > 100
        assert watched.num_steps == max(BATCHES)


@pytest.mark.parametrize(("case", "race"), zip(CARELESS, ("not recorded", "does not wait")))
def test_a_careless_hand_over_is_found(case: Case, race: str) -> None:
    for watched in _of_ranks(case):
        assert any(race in found for found in watched.races)
