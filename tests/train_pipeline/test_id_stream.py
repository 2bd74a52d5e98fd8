"""Ids are made ready on a stream of their own, and nothing races with the one that computes.

There is no device here: streams are names, and :class:`RaceDetector` follows who waited for whom.
What is shown is that every use across streams is ordered and its memory kept: of several packs, of
weights, of batches that were cut and of those that stand in for data that has ended, in training
and evaluation; not that a device overlaps them.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torchrec.datasets.utils import Batch

from tests.sharding.jobs import ODD, PLAIN, Job, build
from tests.support.shared_run import run_once
from tests.train_pipeline.feature_cells import Feature, batch_of, own_rows
from tests.train_pipeline.feature_cells import build as build_cell
from tests.train_pipeline.features import Two
from tests.train_pipeline.runs import batches_of, pipeline_of, run_to_the_end
from tests.train_pipeline.stream_races import RaceDetector
from torchrec_picasso import Refresh
from torchrec_picasso.batches.feed import IdStream
from torchrec_picasso.ops import sorts
from torchrec_picasso.train_pipeline import interleaved

Case = tuple[type[IdStream], str, int, bool]
"""Who hands over, which job, K, lookahead."""

JOBS = {
    "packs": Job(placement={"*": 2, "one_row": 1}, tables=ODD, batch_sizes=(6, 3), waves={"d": 1}),
    "weighted": Job(placement={"*": 0}, tables=PLAIN[:2], weighted=True),
    "bags": Job(placement={"*": 2, "b": "bags", "c": "bags"}, tables=PLAIN, weighted=True),
    "one_without": Job(placement={"*": 2}, tables=PLAIN[:2]),
    "processors": Feature("two modules in one exchange", processors="by_feature", model=Two),
    "own_rows": Feature("each feature with rows of its own", weighted=True, change_batch=own_rows),
}
BATCHES = {
    "packs": (5, 3),
    "weighted": (5, 3),
    "bags": (5, 3),
    "one_without": (5, 0),
    "processors": (4, 3),
    "own_rows": (4, 4),
}
"""Of each rank: the second goes on with empty ones, or asks what an empty one is like."""


OFTEN = Refresh(every_steps=2, half_life_steps=2, deviations=0.0, check_steps=1)
"""Hot rows change while batches are in flight, which reads what another stream wrote."""


class _NotTakenOver(IdStream):
    def take_over(self, tensors: Iterable[Tensor]) -> None:
        pass


class _NotRecorded(IdStream):
    def hand_over(self, batches: Iterable[Any], tensors: Iterable[Tensor]) -> None:
        super().hand_over(batches, [])


class _BatchesNotRecorded(IdStream):
    def hand_over(self, batches: Iterable[Any], tensors: Iterable[Tensor]) -> None:
        super().hand_over([], tensors)


class _CopyNotWaitedFor(IdStream):
    def take_batch(self, batch: Any) -> None:
        pass


class _NotWaitedFor(IdStream):
    def hand_over(self, batches: Iterable[Any], tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            tensor.record_stream(torch.get_device_module("cuda").current_stream())


CAREFUL = [
    (IdStream, name, num_micro_batches, lookahead)
    for name in JOBS
    for num_micro_batches in ((1,) if name == "own_rows" else (1, 3))
    for lookahead in (False, True)
]
CARELESS = {
    (kind, "packs", 3, True): race
    for kind, race in (
        (_NotRecorded, "not recorded for 0"),
        (_BatchesNotRecorded, "not recorded for 0"),
        (_CopyNotWaitedFor, "does not wait for 2"),
        (_NotWaitedFor, "does not wait for 1"),
        (_NotTakenOver, "does not wait for 0"),
    )
}


@dataclass(frozen=True)
class _Watched:
    races: set[str]
    num_ops: dict[int, int]
    """Operators by stream."""
    num_steps: int
    mask_is_early: bool
    """Whether the dirty mask goes ahead of gradients."""


def _cells(feature: Feature, rank: int, steps: Iterable[int]) -> list[Batch]:
    return [batch_of(feature, rank, step, is_ours=True) for step in steps]


def _train(rank: int, world_size: int, case: Case) -> _Watched:
    """A training with an evaluation in between."""
    kind, name, num_micro_batches, lookahead = case
    job = JOBS[name]
    is_job = isinstance(job, Job)
    model = build(job, rank, world_size) if is_job else build_cell(job, "bags", is_ours=True)
    detector = RaceDetector()
    with pytest.MonkeyPatch.context() as patch:
        streams = kind(detector.beside, detector.copying)
        patch.setattr(interleaved, "IdStream", lambda *_: streams)
        pipeline = pipeline_of(
            model, num_micro_batches=num_micro_batches, lookahead=lookahead, refresh=OFTEN
        )
    with detector.in_place_of_the_device(), detector:
        with detector.stream(detector.copying):
            steps = range(BATCHES[name][rank])
            made = batches_of(job, rank, steps) if is_job else _cells(job, rank, steps)
            batches = iter(made)
        outputs = [pipeline.progress(batches) for _ in range(2)]
        model.eval()
        with torch.no_grad():
            outputs.append(pipeline.progress(batches))
        model.train()
        outputs += run_to_the_end(pipeline, batches)
    kinds = [op.kind for op in pipeline.schedule]
    is_early = "send_dirty_mask" in kinds[: kinds.index("backward")]
    return _Watched(detector.races, detector.num_ops, len(outputs), is_early)


def _run(rank: int, world_size: int) -> dict[Case, _Watched]:
    sorts._RADIX_KEYS.clear()  # what numpy sorts, the detector does not see
    return {case: _train(rank, world_size, case) for case in (*CAREFUL, *CARELESS)}


@pytest.mark.parametrize("case", CAREFUL, ids=str)
def test_no_use_across_streams_races(case: Case) -> None:
    for watched in (on_rank[case] for on_rank in run_once(_run, 2)):
        assert not watched.races
        assert min(watched.num_ops[0], watched.num_ops[1]) > 100
        assert watched.num_steps == max(BATCHES[case[1]])
        assert watched.mask_is_early is case[3]


@pytest.mark.parametrize(("case", "race"), CARELESS.items())
def test_a_careless_hand_over_is_found(case: Case, race: str) -> None:
    for watched in (on_rank[case] for on_rank in run_once(_run, 2)):
        assert any(race in found for found in watched.races)
