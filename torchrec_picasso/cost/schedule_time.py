"""How long a step of a schedule lasts: its operations, walked on one core and one wire.

The operations and their order are those that the pipeline runs (:mod:`torchrec_picasso.schedule`);
this file knows what each of them waits for, and nothing of what they cost. A rank computes one
thing after another. Messages leave in the order in which they are sent, one at a time; while one is
on the wire, it may take a share of the core, as sockets do on a CPU. Steps are walked until they
repeat, so what one step leaves to the next is in the price.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from torchrec_picasso.errors import PlanError
from torchrec_picasso.schedule.kinds import KINDS, Op
from torchrec_picasso.schedule.schedule import Setting, training_schedule

__all__ = ["Message", "OpTime", "StepLength", "step_length"]

_STEPS = 4
"""Steps that are walked; the last two are alike but for a queue that still fills."""

_Slot = tuple[str, int, int | None]
"""An operation's message: kind, index and wave."""

_WAITS: Mapping[str, tuple[str, ...]] = {
    "send_ids": ("request",),
    "receive_ids": ("send_ids",),
    "lay_out": ("send_marks",),
    "forward": ("fetch_clean", "fetch_dirty", "read_hot"),
    "update": ("send_gradients", "reduce_hot"),
}
"""Messages of the same batch that an operation of a kind waits for. Of those with an index, forward
waits for its own and earlier ones, update for all; of those with a wave, update for its own."""


@dataclass(frozen=True)
class Message:
    """What goes over the wire in one piece.

    Args:
        ms: Time on the wire.
        core_share: Part of the core that it takes meanwhile, 0 to 1.
    """

    ms: float
    core_share: float = 0.0


@dataclass(frozen=True)
class OpTime:
    """One operation: it computes, then sends.

    Args:
        compute_ms: Work of the core.
        message: What it sends afterwards, if anything.
        exposed: Messages before that work, each waited for at once, with the work that follows it:
            exchanges that no operation of the schedule hides.
        last: A message after that work, waited for before the operation ends.
    """

    compute_ms: float = 0.0
    message: Message | None = None
    exposed: tuple[tuple[Message, float], ...] = ()
    last: Message | None = None

    def part(self, share: float) -> OpTime:
        """A wave's part of it, in proportion; what is exposed has no waves."""
        message = self.message
        if message is not None:
            message = Message(share * message.ms, message.core_share)
        return OpTime(share * self.compute_ms, message)


@dataclass(frozen=True, kw_only=True)
class StepLength:
    """How long a step lasts, and the two bounds that no order of operations gets below.

    Args:
        ms: From one step's end to the next's.
        wire_ms: All messages of a step, one after another.
        compute_ms: All its work on the core, without that of the messages.
    """

    ms: float
    wire_ms: float
    compute_ms: float


def step_length(
    setting: Setting,
    times: Mapping[tuple[str, int | None], OpTime],
    shares_of_waves: tuple[float, ...] = (1.0,),
) -> StepLength:
    """Walks steps of the training schedule.

    Args:
        setting: How batches are interleaved.
        times: What operations take, by kind and index, of all waves; those left out take nothing.
        shares_of_waves: Part of the work, and of the bytes, that each wave of packs has.

    Raises:
        PlanError: If an operation that does not send has a message.
    """
    for (kind, _), time in times.items():
        if time.message is not None and not KINDS[kind].sends:
            raise PlanError(f"{kind} was given a message, but it sends nothing")
    walk, num_waves = _Walk(), len(shares_of_waves)
    schedule = training_schedule(setting, num_waves=num_waves)
    timed = []
    for op, slots in zip(schedule, _waits_of(setting, num_waves)):
        time = times.get((op.kind, op.index), _NOTHING)
        timed.append((op, time if op.wave is None else time.part(shares_of_waves[op.wave]), slots))
    ends = []
    for step in range(_STEPS):
        for op, time, slots in timed:
            batch = step + op.batch
            for slot in slots:
                walk.wait(slot, batch)
            for message, work_ms in time.exposed:
                walk.send((op.kind, -1, op.wave), batch, message)
                walk.wait((op.kind, -1, op.wave), batch)
                walk.compute(work_ms)
            walk.compute(time.compute_ms)
            if time.last is not None:
                walk.send((op.kind, -2, op.wave), batch, time.last)
                walk.wait((op.kind, -2, op.wave), batch)
            if time.message is not None:
                walk.send((op.kind, op.index or 0, op.wave), batch, time.message)
        ends.append(walk.now_ms)
    return StepLength(
        ms=(ends[-1] - ends[-3]) / 2,
        wire_ms=sum(_wire_ms(time) for _, time, _ in timed),
        compute_ms=sum(t.compute_ms + sum(ms for _, ms in t.exposed) for _, t, _ in timed),
    )


_NOTHING = OpTime()


def _wire_ms(time: OpTime) -> float:
    messages = [*(message for message, _ in time.exposed), time.last, time.message]
    return sum(message.ms for message in messages if message is not None)


class _Walk:
    """One core and one wire. Times are milliseconds from the start."""

    def __init__(self) -> None:
        self.now_ms = 0.0
        self._wire_free_ms = 0.0
        self._done_ms: dict[tuple[_Slot, int], float] = {}
        self._on_wire: list[tuple[float, float]] = []
        """End and share of the core of the messages on the wire, in order."""
        self._first = 0

    def send(self, slot: _Slot, batch: int, message: Message) -> None:
        """Puts a message behind those on the wire."""
        start_ms = max(self.now_ms, self._wire_free_ms)
        if start_ms > self._wire_free_ms:
            self._first = len(self._on_wire)
        self._wire_free_ms = start_ms + message.ms
        self._done_ms[slot, batch] = self._wire_free_ms
        self._on_wire.append((self._wire_free_ms, message.core_share))

    def wait(self, slot: _Slot, batch: int) -> None:
        """Goes on when a message has come; at once if there was none."""
        self.now_ms = max(self.now_ms, self._done_ms.get((slot, batch), 0.0))

    def compute(self, work_ms: float) -> None:
        """Works, slower while messages take their share of the core."""
        while work_ms > 0 and self._first < len(self._on_wire):
            end_ms, core_share = self._on_wire[self._first]
            done_ms = max(0.0, end_ms - self.now_ms) * (1 - core_share)
            if done_ms > work_ms:
                self.now_ms += work_ms / (1 - core_share)
                return
            work_ms -= done_ms
            self.now_ms = max(self.now_ms, end_ms)
            self._first += 1
        self.now_ms += max(0.0, work_ms)


@cache
def _waits_of(setting: Setting, num_waves: int) -> list[tuple[_Slot, ...]]:
    """The messages that each operation of a training step waits for."""
    ops = training_schedule(setting, num_waves=num_waves).ops
    return [_messages_before(op, ops) for op in ops]


def _messages_before(op: Op, ops: Sequence[Op]) -> tuple[_Slot, ...]:
    found = []
    for kind in _WAITS.get(op.kind, ()):
        for other in ops:
            is_early = op.index is None or other.index is None or other.index <= op.index
            is_own = None in (op.wave, other.wave) or op.wave == other.wave
            if other.kind == kind and is_early and is_own:
                found.append((kind, other.index or 0, other.wave))
    return tuple(found)
