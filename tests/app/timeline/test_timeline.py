"""The timeline of real steps: every operation once and in order, its waits, its exchanges."""

import re
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from tests.sharding.jobs import PLAIN, Job, build, dense_optimizer, make_batch
from tests.support.placing import CPU
from tests.support.shared_run import run_once
from torchrec_picasso import InterleavedTrainPipeline
from torchrec_picasso.app.timeline.timeline import DONE, WAITED_FOR, Timeline
from torchrec_picasso.errors import PicassoError
from torchrec_picasso.exchange import all_to_all
from torchrec_picasso.exchange.waiting import OP_RANGE, STEP_RANGE, WAIT_RANGE, named_range
from torchrec_picasso.schedule.kinds import KINDS
from torchrec_picasso.schedule.schedule import Op, Setting, training_schedule
from torchrec_picasso.train_pipeline import micro_batch_policy

JOB = Job(placement={"*": 2}, tables=PLAIN, batch_sizes=(64,), num_steps=8, waves={"a": 1})
K = 2
SCHEDULE = training_schedule(Setting(K, lookahead=True), num_waves=2)
COLUMNS = ["rank", "step", "op", "batch", "index", "wave", "kind", "start_ms", "end_ms", "ends"]
ALL_REDUCES = {"reduce_hot", "backward"}
"""Dense gradients leave while the last backward runs."""


def _trace(rank: int, world_size: int) -> Timeline:
    # messages, whose end no event tells
    all_to_all._SMALL_BYTES, all_to_all._SMALL_S = 0, 0.0
    model = build(JOB, rank, world_size)
    pipeline = InterleavedTrainPipeline(
        model,
        dense_optimizer(model),
        CPU,
        num_micro_batches=K,
        lookahead=True,
        loss_reduction="sum",
    )
    batches = iter([make_batch(JOB, rank, step) for step in range(JOB.num_steps)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            micro_batch_policy, "is_due", lambda step: False
        )  # no waits beside the schedule's
        pipeline.progress(batches)
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            for _ in range(JOB.num_steps - 1):  # to the end of data, see Timeline
                pipeline.progress(batches)
    return Timeline.from_profile(profiled).for_steps(1, 2, 3, 4)


@pytest.mark.parametrize("rank", [0, 1])
def test_every_operation_of_the_schedule_runs_once_and_in_order(rank: int) -> None:
    timeline = run_once(_trace, 2)[rank]
    assert timeline.rank == rank
    assert timeline.steps == [1, 2, 3, 4]
    expected = list(SCHEDULE)
    for step in timeline.steps:
        ops = [s for s in timeline.spans if s.kind == "compute" and s.step == step]
        assert [span.op for span in ops] == expected
        assert all(span.start_ms < span.end_ms for span in ops)
        assert all(first.end_ms <= second.start_ms for first, second in pairwise(ops))


def test_every_exchange_is_there_and_says_how_its_end_is_known() -> None:
    timeline = run_once(_trace, 2)[0]
    spans = [s for s in timeline.spans if s.kind == "exchange" and s.step in (2, 3)]
    assert all(span.start_ms < span.end_ms for span in spans)
    found = [(span.step, span.op) for span in spans]
    by_ddp = (Op("forward", 0, 0), Op("backward", 0, 0))  # which agrees on buckets, and sums them
    own = [op for op in found if op[1] not in by_ddp]
    assert len(own) == len(set(own))
    posting = [op for op in SCHEDULE if KINDS[op.kind].sends and op != Op("backward", 0, 1)]
    sometimes = ("fetch_clean", "fetch_dirty", "read_hot")
    always = {op for op in posting if op.kind not in sometimes} | {Op("backward", 0, 0)}
    # there may be no clean rows, or no dirty ones in a chunk; replicas are rarely filled
    for step in (2, 3):
        ops = {op for in_step, op in found if in_step == step}
        assert always <= ops <= {*posting, *by_ddp}
        assert any(op.kind.startswith("fetch") for op in ops)
    for span in spans:
        if span.op not in by_ddp:
            assert span.ends == (DONE if span.op.kind in ALL_REDUCES else WAITED_FOR)


def test_waits_lie_within_operations_and_end_the_exchanges() -> None:
    timeline = run_once(_trace, 2)[0]
    ops = {(s.step, s.op): s for s in timeline.spans if s.kind == "compute"}
    waits = [span for span in timeline.spans if span.kind == "wait"]
    assert {"send_row_numbers", "build_layout", "update"} <= {wait.op.kind for wait in waits}
    for wait in waits:
        around = ops[wait.step, wait.op]
        assert around.start_ms <= wait.start_ms < wait.end_ms <= around.end_ms
    last_ms = max(wait.end_ms for wait in waits)  # others are waited for in the steps after
    ended = [s for s in timeline.spans if s.ends == WAITED_FOR and s.end_ms <= last_ms]
    assert len(ended) > 10
    for span in ended:
        assert any(wait.start_ms <= span.end_ms <= wait.end_ms for wait in waits)


def test_the_frame_has_a_line_per_span() -> None:
    timeline = run_once(_trace, 2)[1].for_steps(2, 3)
    frame = timeline.to_frame()
    assert list(frame.columns) == COLUMNS
    assert len(frame) == len(timeline.spans)
    ops = frame[frame["kind"] == "compute"]
    assert set(ops["step"]) == {2, 3}
    assert ops["start_ms"].iloc[0] == 0
    assert set(frame["rank"]) == {1}
    # dirty rows that step 1 fetched were still under way
    assert {1, 2, 3} == set(frame.loc[frame["kind"] == "exchange", "step"])


def test_what_is_not_there_is_refused() -> None:
    with pytest.raises(PicassoError, match=re.escape("has steps [1, 2, 3, 4], and none of [9]")):
        run_once(_trace, 2)[0].for_steps(9)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        torch.ones(1).add(1)
    with pytest.raises(PicassoError, match="holds no step of an InterleavedTrainPipeline"):
        Timeline.from_profile(profiled)


def test_without_a_profiler_a_range_is_nothing() -> None:
    nothing = named_range("a")
    assert named_range(OP_RANGE, Op("update")) is nothing
    assert named_range(STEP_RANGE, 3) is nothing
    with profile(activities=[ProfilerActivity.CPU]):
        assert named_range(OP_RANGE, Op("update")) is not nothing


def test_what_was_still_in_flight_is_left_out() -> None:
    """A message ends after its call if it was waited for, and everything before the last step."""
    timeline = Timeline.from_profile(
        _profile(
            ("picasso step 7", 0, 100),
            ("picasso op send_row_numbers of the next batch", 10, 20),
            ("c10d::recv_", 11, 12),
            ("gloo:recv", 11.5, 12),  # nobody waited: ends with its call
            ("c10d::send", 13, 14),
            ("gloo:send", 13.5, 60),
            ("picasso op forward 1", 50, 70),
            (WAIT_RANGE, 55, 60),
            ("c10d::allreduce_", 61, 62),
            ("gloo:all_reduce", 71, 90),  # ended by the end of the profile
            ("c10d::allreduce_", 200, 201),  # outside steps
            ("gloo:all_reduce", 202, 203),
        ),
        rank=3,
    )
    assert timeline.rank == 3
    assert [(s.kind, s.step, str(s.op), s.start_ms, s.end_ms) for s in timeline.spans] == [
        ("compute", 7, "send_row_numbers of the next batch", 0, 10),
        ("exchange", 7, "send_row_numbers of the next batch", 3, 50),
        ("compute", 7, "forward 1", 40, 60),
        ("wait", 7, "forward 1", 45, 50),
    ]


def _profile(*events_ms: tuple[str, float, float]) -> Any:
    def event(name: str, start_ms: float, end_ms: float) -> Any:
        return SimpleNamespace(
            name=name, time_range=SimpleNamespace(start=start_ms * 1e3, end=end_ms * 1e3)
        )

    return SimpleNamespace(events=lambda: [event(*each) for each in events_ms])
