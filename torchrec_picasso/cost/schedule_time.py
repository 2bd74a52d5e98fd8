"""Simulates a step of a schedule on one core and one wire, and returns its duration.

The operations, their order, and what each of them needs are those of the pipeline
(:mod:`torchrec_picasso.schedule`); the caller gives the durations. A rank computes one operation
after another. Messages use the wire one at a time, in the order in which they are sent; a message
on the wire may take a share of the core, as sockets do on a CPU. Several steps are simulated, so
that work and messages that overlap with the next step are included.

A step begins with flags, and operations that do not lead wait for those of all ranks. Flags have
connections of their own: they overtake what is on the wire, and what is sent later waits for both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

from torchrec_picasso.errors import PlanError
from torchrec_picasso.schedule.kinds import KINDS, Op
from torchrec_picasso.schedule.schedule import Schedule, Setting, training_schedule

_STEPS = 4
"""Number of simulated steps; the duration is the mean of the last two."""

_Slot = tuple[str, int, int | None]
"""Identifies a message within a batch: kind, index and wave of the operation that sends it."""


@dataclass(frozen=True)
class Message:
    """One message: its time on the wire, and the share of the core that it takes meanwhile."""

    ms: float
    core_share: float = 0.0
    latency_ms: float = 0.0
    """The part of ``ms`` that does not depend on the number of bytes."""


@dataclass(frozen=True)
class OpTime:
    """Durations of one operation: ``first``, computation, ``last``, then ``message``."""

    compute_ms: float = 0.0
    message: Message | None = None
    """Message that the operation sends at its end, without waiting for it."""
    first: Message | None = None
    """Message before the computation that the operation waits for: nothing hides it."""
    last: Message | None = None
    """The same after the computation."""

    def part(self, share: float) -> OpTime:
        """Returns the part of one wave; these operations have neither ``first`` nor ``last``."""
        message = self.message
        if message is not None:
            latency_ms = message.latency_ms
            message = replace(message, ms=latency_ms + share * (message.ms - latency_ms))
        return OpTime(share * self.compute_ms, message)


@dataclass(frozen=True, kw_only=True)
class StepPrice:
    """A predicted step, including the dense part."""

    num_micro_batches: int = 1
    step_ms: float
    wire_ms: float  # sum of all messages, a lower bound of the duration
    compute_ms: float  # all that nothing hides, but for work on sent bytes: a lower bound


def simulate_step(
    setting: Setting,
    times: Mapping[tuple[str, int | None], OpTime],
    shares_of_waves: tuple[float, ...] = (1.0,),
    flags: Message = Message(0.0),
    *,
    forwards_first: bool = True,
) -> StepPrice:
    """Simulates steps of the training schedule.

    ``times`` has durations by kind and index, over all waves; missing operations take no time.
    ``shares_of_waves`` has the share of the work and of the bytes in each wave of packs.
    ``flags`` are those that ranks agree on before each step. ``forwards_first`` is that of
    :func:`.training_schedule`. Raises PlanError if an operation that does not send has a message.
    """
    for (kind, _), time in times.items():
        if time.message is not None and not KINDS[kind].sends:
            raise PlanError(f"{kind} was given a message, but it does not send")
    machine, num_waves = _Machine(), len(shares_of_waves)
    schedule = training_schedule(setting, num_waves=num_waves, forwards_first=forwards_first)
    timed = []
    for op, slots in zip(schedule, _awaited(schedule)):
        time = times.get((op.kind, op.index), OpTime())
        timed.append((op, time if op.wave is None else time.part(shares_of_waves[op.wave]), slots))
    arrival_ms: dict[tuple[_Slot, int], float] = {}  # of each message of each batch
    ends_ms = []
    for step in range(_STEPS):
        agreed_ms = machine.now_ms + flags.ms
        machine.send(flags)
        for op, time, slots in timed:
            if not KINDS[op.kind].leads:
                machine.wait_until(agreed_ms)
            # batch number of the operation: messages of all in-flight batches are distinguished
            batch = step + op.batch
            for slot in slots:
                machine.wait_until(arrival_ms.get((slot, batch), 0.0))  # 0: it was not sent
            if time.first is not None:
                machine.wait_until(machine.send(time.first))
            machine.compute(time.compute_ms)
            if time.last is not None:
                machine.wait_until(machine.send(time.last))
            if time.message is not None:
                slot = (op.kind, op.index or 0, op.wave)
                arrival_ms[slot, batch] = machine.send(time.message)
        ends_ms.append(machine.now_ms)
    return StepPrice(
        num_micro_batches=setting.num_micro_batches,
        step_ms=(ends_ms[-1] - ends_ms[-3]) / 2,
        wire_ms=flags.ms + sum(_wire_ms(time) for _, time, _ in timed),
        compute_ms=sum(time.compute_ms for _, time, _ in timed),
    )


def _wire_ms(time: OpTime) -> float:
    """Sums the messages of an operation."""
    messages = time.first, time.last, time.message
    return sum(message.ms for message in messages if message is not None)


class _Machine:
    """One core and one wire. Times are milliseconds since the start."""

    def __init__(self) -> None:
        self.now_ms = 0.0
        self._wire_free_ms = 0.0
        self._on_wire: list[tuple[float, float]] = []  # arrival and share of the core, in order
        self._first = 0  # first message that may still be on the wire

    def send(self, message: Message) -> float:
        """Queues a message on the wire; returns its arrival."""
        self._wire_free_ms = max(self.now_ms, self._wire_free_ms) + message.ms
        self._on_wire.append((self._wire_free_ms, message.core_share))
        return self._wire_free_ms

    def wait_until(self, time_ms: float) -> None:
        """Advances the time, if it is earlier."""
        self.now_ms = max(self.now_ms, time_ms)

    def compute(self, work_ms: float) -> None:
        """Computes, more slowly while messages take a share of the core."""
        while work_ms > 0 and self._first < len(self._on_wire):
            end_ms, core_share = self._on_wire[self._first]
            # work that is done before this message arrives
            done_ms = max(0.0, end_ms - self.now_ms) * (1 - core_share)
            if done_ms > work_ms:
                self.now_ms += work_ms / (1 - core_share)
                return
            work_ms -= done_ms
            self.now_ms = max(self.now_ms, end_ms)
            self._first += 1
        self.now_ms += max(0.0, work_ms)


@cache
def _awaited(schedule: Schedule) -> list[tuple[_Slot, ...]]:
    """Lists the messages that each operation waits for: those of the operations that it needs, of
    its own batch, sent in this step or an earlier one."""
    sends = [op for op in schedule if KINDS[op.kind].sends]

    def is_awaited(op: Op, sent: Op) -> bool:
        sent = replace(sent, batch=op.batch)
        return any(need.kind == sent.kind and need.pick(op, sent) for need in KINDS[op.kind].needs)

    return [
        tuple((sent.kind, sent.index or 0, sent.wave) for sent in sends if is_awaited(op, sent))
        for op in schedule
    ]
