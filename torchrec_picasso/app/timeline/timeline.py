"""When the operations of interleaved steps ran, what was on the wire, and what was waited for.

A timeline is read from a ``torch.profiler`` profile of real steps on one rank::

    with torch.profiler.profile(activities=[ProfilerActivity.CPU]) as profile:
        with contextlib.suppress(StopIteration):
            while True:
                pipeline.progress(batches)
    timeline = Timeline.from_profile(profile)
    timeline.of_steps(*timeline.steps[1:4]).save("steps.png")

Profile to the end of ``batches``: in torch 2.13 a gloo message that is started inside a profile and
waited for after it can corrupt memory.

What a profile knows on gloo: of a collective, when it was posted and when it was done; of messages
between pairs of ranks, when they were posted and when their wait returned. A message may have been
done any time before that, unless the wait itself took time. Times are the host's: where kernels run
on an accelerator, an operation ends when its kernels are launched, and exchanges of other backends
are not shown.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from torchrec_picasso.app.timeline.spans import (
    COMPUTE,
    DONE,
    EXCHANGE,
    RETURNED,
    WAIT,
    WAITED_FOR,
    Span,
)
from torchrec_picasso.errors import PicassoError
from torchrec_picasso.exchange.waiting import OP_RANGE, STEP_RANGE, WAIT_RANGE
from torchrec_picasso.schedule.schedule import OF_BATCH, Op

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["COMPUTE", "DONE", "EXCHANGE", "WAIT", "WAITED_FOR", "Span", "Timeline"]

_OP = re.compile(rf"{OP_RANGE} (\w+)(?: (\d+))?(?: wave (\d+))?( of .*)?")
_CALL_PREFIX, _WORK_PREFIX = "c10d::", "gloo:"
_MESSAGES = frozenset({"gloo:send", "gloo:recv"})


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Some steps of one rank.

    Args:
        rank: Which rank.
        spans: By their start.
    """

    rank: int
    spans: tuple[Span, ...]

    @staticmethod
    def from_profile(profile: Any, rank: int | None = None) -> Timeline:
        """Reads the steps of an :class:`InterleavedTrainPipeline`.

        Args:
            profile: A stopped ``torch.profiler.profile`` with CPU activities. Exchanges that were
                posted before it started, or were not waited for when it stopped, are left out:
                profile a step more on either side of those looked at.
            rank: Number of the rank; ``None`` = that of the default process group, or 0.

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

    def of_steps(self, *steps: int) -> Timeline:
        """The operations of some steps, and exchanges that were under way meanwhile.

        Args:
            *steps: Their numbers.

        Raises:
            PicassoError: If none of them is here.
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
        """A pandas DataFrame, one line per span, by start.

        Returns:
            Columns ``rank, step, op, batch, index, wave, kind, start_ms, end_ms, ends``.
        """
        import pandas as pd

        op = ["op", "batch", "index", "wave"]
        names = ["rank", "step", *op, "kind", "start_ms", "end_ms", "ends"]
        lines = [
            (self.rank, s.step, *astuple(s.op), s.kind, s.start_ms, s.end_ms, s.ends)
            for s in self.spans
        ]
        return pd.DataFrame(lines, columns=names).astype({"index": "Int64", "wave": "Int64"})

    def plot(self, axes: Any) -> None:
        """Draws into matplotlib axes: operations of both batches, then a lane per exchange."""
        from torchrec_picasso.app.timeline.picture import plot_timeline

        plot_timeline(self, axes)

    def save(self, path: str | Path) -> None:
        """Draws a picture of its own; its name says the format."""
        from torchrec_picasso.app.timeline.picture import draw_timeline

        draw_timeline({f"rank {self.rank}": self}, path)


def _from_zero(spans: Sequence[Span]) -> tuple[Span, ...]:
    """The spans by start, counted from the start of the first operation."""
    zero_ms = min(span.start_ms for span in spans if span.kind == COMPUTE)
    return tuple(
        replace(span, start_ms=span.start_ms - zero_ms, end_ms=span.end_ms - zero_ms)
        for span in sorted(spans, key=lambda span: span.start_ms)
    )


# -- reading a profile -------------------------------------------------------------------------


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
        kind, index, wave, of_batch = match.groups()
        found.append(
            Span(
                step=int(steps[place].name.removeprefix(STEP_RANGE)),
                op=Op(kind, OF_BATCH.index(of_batch or ""), _number(index), _number(wave)),
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
    """The operation that ran at a time."""
    place = bisect_right(ops, start_ms, key=lambda op: op.start_ms) - 1
    return ops[place] if place >= 0 and start_ms <= ops[place].end_ms else None


def _waits(events: Sequence[_Event], ops: Sequence[Span]) -> Iterable[Span]:
    for event in events:
        op = _around(event.start_ms, ops) if event.name == WAIT_RANGE else None
        if op is not None:
            yield replace(op, kind=WAIT, start_ms=event.start_ms, end_ms=event.end_ms)


def _exchanges(events: Sequence[_Event], ops: Sequence[Span]) -> Iterable[Span]:
    """What operations posted: collectives one by one, the messages of an operation as one."""
    messages: dict[tuple[int, Op], Span] = {}
    for start_ms, event in _posted(events):
        op = _around(start_ms, ops)
        if op is None or event.end_ms > ops[-1].end_ms:  # ended by the end of the profile
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
    """Each of gloo's works with the time when it was posted.

    A work starts within its call if it is a message; a collective's starts when one of gloo's
    threads takes it up, in the order of the calls. A message that nobody waited for while the
    profiler ran ends with its call, which says nothing, and is left out.
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
    """Whether a call may have started a work: ``c10d::allreduce_`` starts ``gloo:all_reduce``."""
    letters = [
        event.name.partition(":")[2].replace(":", "").replace("_", "") for event in (call, work)
    ]
    return letters[0].startswith(letters[1]) and call.start_ms <= work.start_ms
