"""Timeline of interleaved steps: operations, exchanges and waits, with their times.

A timeline is read from a ``torch.profiler`` profile of steps on one rank::

    with torch.profiler.profile(activities=[ProfilerActivity.CPU]) as profile:
        ...  # call pipeline.progress(batches) until StopIteration
    timeline = Timeline.from_profile(profile)
    timeline.for_steps(*timeline.steps[1:4]).save("steps.png")

Profile to the end of ``batches``: in torch 2.13 a gloo message that is started inside a profile and
waited for after it can corrupt memory.

On gloo, a profile has the posting and the end of a collective, but only the posting and the return
of the wait for messages between pairs of ranks; a message may have ended any time before. Times are
host times: on an accelerator, an operation ends when its kernels are launched. Exchanges of other
backends are not shown.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from torchrec_picasso.errors import PicassoError
from torchrec_picasso.exchange.waiting import OP_RANGE, STEP_RANGE, WAIT_RANGE
from torchrec_picasso.schedule.schedule import OF_BATCH, Op

if TYPE_CHECKING:
    import pandas as pd

_OP = re.compile(rf"{OP_RANGE} (\w+)(?: (\d+))?(?: wave (\d+))?( of .*)?")
_CALL_PREFIX, _WORK_PREFIX = "c10d::", "gloo:"
_MESSAGES = frozenset({"gloo:send", "gloo:recv"})

COMPUTE, EXCHANGE, WAIT = "compute", "exchange", "wait"
"""Kinds of spans: an operation with its waits; an exchange that it posted; a wait."""

RETURNED, DONE, WAITED_FOR = "returned", "done", "waited_for"
"""End of a span: the call returned; the exchange was done; its wait returned, so the exchange was
done then or earlier."""


@dataclass(frozen=True, kw_only=True)
class Span:
    """An interval of a timeline.

    Args:
        step: Number of the step, counted from the pipeline's first.
        op: The operation; for an exchange the one that posted it.
        kind: :data:`COMPUTE`, :data:`EXCHANGE` or :data:`WAIT`.
        start_ms: Start, relative to the first operation of the timeline.
        end_ms: End, on the same scale.
        ends: :data:`RETURNED`, :data:`DONE` or :data:`WAITED_FOR`.
    """

    step: int
    op: Op
    kind: str
    start_ms: float
    end_ms: float
    ends: str


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Spans of steps of one rank, sorted by start."""

    rank: int
    spans: tuple[Span, ...]

    @staticmethod
    def from_profile(profile: Any, rank: int | None = None) -> Timeline:
        """Reads the steps of an :class:`InterleavedTrainPipeline`.

        Args:
            profile: A stopped ``torch.profiler.profile`` with CPU activities. Exchanges that cross
                its start or end are left out: profile one more step on either side.
            rank: The rank; ``None`` = that of the default process group, or 0.

        Raises:
            PicassoError: If no step was profiled.
        """
        events = sorted(_read(profile), key=lambda event: event.start_ms)
        ops = _ops(events)
        if not ops:
            raise PicassoError(
                "the profile holds no step of an InterleavedTrainPipeline; call progress() inside "
                "torch.profiler.profile(activities=[ProfilerActivity.CPU])"
            )
        if rank is None:
            rank = dist.get_rank() if dist.is_initialized() else 0
        return Timeline(
            rank=rank,
            spans=_from_zero([*ops, *_waits(events, ops), *_exchanges(events, ops)]),
        )

    @property
    def steps(self) -> list[int]:
        """Numbers of the steps, ascending."""
        return sorted({span.step for span in self.spans})

    def for_steps(self, *steps: int) -> Timeline:
        """The operations of given steps, and all exchanges that overlap them.

        Raises:
            PicassoError: If the timeline has none of these steps.
        """
        chosen = [span for span in self.spans if span.step in steps and span.kind != EXCHANGE]
        if not chosen:
            raise PicassoError(f"the timeline has steps {self.steps}, and none of {list(steps)}")
        start_ms = min(span.start_ms for span in chosen)
        end_ms = max(span.end_ms for span in chosen)
        chosen += [
            span
            for span in self.spans
            if span.kind == EXCHANGE and span.start_ms < end_ms and span.end_ms > start_ms
        ]
        return replace(self, spans=_from_zero(chosen))

    def to_frame(self) -> pd.DataFrame:
        """One row per span; columns ``rank, step, op, batch, index, wave, kind, start_ms, ...``."""
        import pandas as pd

        names = ["rank", "step", "op", "batch", "index", "wave"]
        names += ["kind", "start_ms", "end_ms", "ends"]
        lines = [
            (self.rank, s.step, *astuple(s.op), s.kind, s.start_ms, s.end_ms, s.ends)
            for s in self.spans
        ]
        return pd.DataFrame(lines, columns=names).astype({"index": "Int64", "wave": "Int64"})

    def save(self, path: str | Path) -> None:
        """Draws the timeline; the suffix of ``path`` determines the format."""
        from torchrec_picasso.app.timeline.picture import draw_timeline

        draw_timeline({f"rank {self.rank}": self}, path)


def _from_zero(spans: Sequence[Span]) -> tuple[Span, ...]:
    """Sorts spans, and makes times relative to the first operation."""
    zero_ms = min(span.start_ms for span in spans if span.kind == COMPUTE)
    return tuple(
        replace(span, start_ms=span.start_ms - zero_ms, end_ms=span.end_ms - zero_ms)
        for span in sorted(spans, key=lambda span: span.start_ms)
    )


@dataclass(frozen=True)
class _Event:
    name: str
    start_ms: float
    end_ms: float


def _read(profile: Any) -> Iterable[_Event]:
    prefixes = (STEP_RANGE, OP_RANGE, WAIT_RANGE, _CALL_PREFIX, _WORK_PREFIX)
    for event in profile.events():
        if event.name.startswith(prefixes):
            yield _Event(event.name, event.time_range.start / 1e3, event.time_range.end / 1e3)


def _ops(events: Sequence[_Event]) -> list[Span]:
    """Operations in the order they ran; none overlaps another."""
    steps = [event for event in events if event.name.startswith(STEP_RANGE)]
    starts = [step.start_ms for step in steps]
    found = []
    for event in events:
        match = _OP.fullmatch(event.name)
        place = bisect_right(starts, event.start_ms) - 1
        if match is None or place < 0:
            continue
        kind, index, wave, batch = match.groups()
        found.append(
            Span(
                step=int(steps[place].name.removeprefix(STEP_RANGE)),
                op=Op(kind, OF_BATCH.index(batch or ""), _number(index), _number(wave)),
                kind=COMPUTE,
                start_ms=event.start_ms,
                end_ms=event.end_ms,
                ends=RETURNED,
            )
        )
    return found


def _number(text: str | None) -> int | None:
    return None if text is None else int(text)


def _around(start_ms: float, ops: Sequence[Span]) -> Span | None:
    """The operation that ran at a given time."""
    place = bisect_right(ops, start_ms, key=lambda op: op.start_ms) - 1
    return ops[place] if place >= 0 and start_ms <= ops[place].end_ms else None


def _waits(events: Sequence[_Event], ops: Sequence[Span]) -> Iterable[Span]:
    for event in events:
        op = _around(event.start_ms, ops) if event.name == WAIT_RANGE else None
        if op is not None:
            yield replace(op, kind=WAIT, start_ms=event.start_ms, end_ms=event.end_ms)


def _exchanges(events: Sequence[_Event], ops: Sequence[Span]) -> Iterable[Span]:
    """Exchanges that operations posted; all messages of an operation are one exchange."""
    messages: dict[tuple[int, Op], Span] = {}
    for start_ms, event in _posted(events):
        op = _around(start_ms, ops)
        if op is None or event.end_ms > ops[-1].end_ms:  # cut by the end of the profile
            continue
        if event.name not in _MESSAGES:
            yield replace(op, kind=EXCHANGE, start_ms=start_ms, end_ms=event.end_ms, ends=DONE)
            continue
        key = (op.step, op.op)
        span = messages.get(key)
        if span is None:
            span = replace(
                op, kind=EXCHANGE, start_ms=start_ms, end_ms=event.end_ms, ends=WAITED_FOR
            )
        messages[key] = replace(span, end_ms=max(span.end_ms, event.end_ms))
    yield from messages.values()


def _posted(events: Sequence[_Event]) -> Iterable[tuple[float, _Event]]:
    """gloo's work items, each with the time when it was posted.

    A message starts within its call; a collective starts when a gloo thread takes it up, in the
    order of the calls. A message that was not waited for inside the profile ends with its call, and
    is left out.
    """
    calls: list[_Event] = []
    for event in events:
        if event.name.startswith(_CALL_PREFIX):
            calls.append(event)
        elif event.name.startswith(_WORK_PREFIX):
            call = next((call for call in calls if _starts(call, event)), None)
            if call is not None:
                calls.remove(call)
                if event.end_ms > call.end_ms or event.name not in _MESSAGES:
                    yield call.start_ms, event


def _starts(call: _Event, work: _Event) -> bool:
    """Whether a call may have posted a work: ``c10d::allreduce_`` posts ``gloo:all_reduce``."""
    letters = [
        event.name.partition(":")[2].replace(":", "").replace("_", "") for event in (call, work)
    ]
    return letters[0].startswith(letters[1]) and call.start_ms <= work.start_ms
