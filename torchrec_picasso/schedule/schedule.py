"""The schedule of a step as data: the order of operations on the in-flight batches.

A step trains one batch, fetches the rows of the next batch, and sends the row numbers of the batch
after that. Its schedule is an ordered list of operations, equal on all ranks, so all ranks start
collectives in the same order. A schedule can be printed, checked and drawn; the pipeline only
executes it.

At the boundary between two steps no computation hides the exchanges of the first chunk: its
gradients come last and its rows are needed first. There, and only there, waves of packs are
staggered: one wave is updated and fetched again while the gradients of the next wave are on the
wire.

Two micro-batches that share no rows (all packs are pooled by their home ranks) run depth first: the
first one runs forward and backward while the rows of the second arrive, and its gradients are sent
while the second one computes, so the wire is never idle. Otherwise all run forward, then all
backward in reverse order. The gradients of chunk 0 then travel last, and no computation hides them;
more than two micro-batches therefore begin with a small one (:func:`.micro_batch_sizes`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from torchrec_picasso.errors import PlanError
from torchrec_picasso.schedule.kinds import AFTER, KINDS, NEXT, OF_BATCH, THIS, Op

if TYPE_CHECKING:
    import pandas as pd

NUM_BATCHES = len(OF_BATCH)
"""Number of batches that a step works on."""


@dataclass(frozen=True)
class Setting:
    """How a batch is trained."""

    num_micro_batches: int
    lookahead: bool
    """Whether clean rows, which the batch before does not update, are fetched before its update."""

    def __str__(self) -> str:
        plural = "" if self.num_micro_batches == 1 else "es"
        ahead = "with" if self.lookahead else "without"
        return f"{self.num_micro_batches} micro-batch{plural} {ahead} lookahead"


@dataclass(frozen=True)
class Schedule:
    """The operations of one step, in order."""

    ops: tuple[Op, ...]
    forwards_first: bool = True
    """Whether all micro-batches run forward first, then backward in descending order, because they
    share rows or the loss needs all of them."""

    def __iter__(self) -> Iterator[Op]:
        return iter(self.ops)

    def __str__(self) -> str:
        return "\n".join(map(str, self.ops))

    def to_frame(self) -> pd.DataFrame:
        """Returns a DataFrame ``op, batch, index, wave, collective`` with one row per operation."""
        import pandas as pd

        return pd.DataFrame(
            [(op.kind, op.batch, op.index, op.wave, KINDS[op.kind].sends) for op in self.ops],
            columns=["op", "batch", "index", "wave", "collective"],
        ).astype({"index": "Int64", "wave": "Int64"})

    def check(self) -> None:
        """Raises PlanError if an operation runs before its dependencies; names both."""
        done: set[Op] = set()
        for op in self.ops:
            if op in done:
                raise PlanError(f"the schedule runs {op} twice; each operation runs once")
            # Only operations of this schedule count: earlier schedules may have run other
            # dependencies.
            for need in KINDS[op.kind].needs:
                if need.shared_rows_only and not self.forwards_first:
                    continue
                found = [o for o in self.ops if o.kind == need.kind and need.pick(op, o)]
                if need.required and not found:
                    raise PlanError(f"the schedule runs {op} without the {need.kind} it needs")
                for first in found:
                    if first != op and first not in done:
                        what = f"{op} before {first}, which it needs; swap them"
                        raise PlanError(f"the schedule runs {what}")
            done.add(op)


@cache
def training_schedule(
    this: Setting,
    following: Setting | None = None,
    after: Setting | None = None,
    *,
    num_waves: int = 1,
    forwards_first: bool = True,
    waits_on_stream: bool = False,
) -> Schedule:
    """Returns the schedule of a training step.

    Exchanges that wait for no update start first and are needed last: the clean rows of the next
    batch follow the dirty rows of this batch, so the wire is busy during forward; row numbers are
    sent a step ahead. Without clean rows, the next batch's layout is built while the last gradients
    are on the wire. A wait for row numbers that blocks the host comes after the last backward. One
    that blocks the ids' stream alone (``waits_on_stream``) comes before the first: exchanges of an
    accelerator run in the order of their start, and the dirty mask, which the next layout waits
    for, shall not be behind gradients.

    The next batch has by default the setting of this batch, and the batch after that the setting of
    the next. ``num_waves`` counts the waves of packs. ``forwards_first`` is that of
    :class:`Schedule`.
    """
    following = following or this
    waves = _waves(num_waves)
    ahead = _before_updates(following)
    # without fetch_clean, the layout can wait
    late_layout = [] if following.lookahead else [ahead.pop(0)]
    *early, last = backward_order(this, forwards_first)
    forwards = _for_chunks("forward", THIS, this)
    sends = [Op("send_row_numbers", AFTER)]
    arrivals = _row_numbers_arrive(AFTER, after or following)
    if waits_on_stream:
        sends, arrivals = sends + arrivals, []
    # Chunk k's gradients travel while the operations after backward k compute.
    if is_depth_first(this, forwards_first):
        ops = [*ahead, forwards[0], Op("backward", THIS, 0)]
        # After a backward: the header that they wait for is behind the rows on the wire.
        ops += [*sends, *_by_wave("send_gradients", THIS, 0, waves), forwards[1]]
    else:
        ops = [*ahead, *forwards, *sends]
        for index in early:
            ops += [Op("backward", THIS, index), Op("send_gradients", THIS, index)]
    ops.append(Op("backward", THIS, last))  # also reduces dense gradients
    for wave in waves:
        ops += [Op("send_gradients", THIS, last, wave), Op("reduce_hot", THIS, wave=wave)]
    ops += [*late_layout, *arrivals]
    for wave in waves:
        # Wave w's dirty rows are fetched while wave w + 1 waits for its gradients.
        ops += [Op("update", THIS, wave=wave), Op("fetch_dirty", NEXT, 0, wave)]
    # Later chunks arrive during forward of the first micro-batches of the next step.
    if is_depth_first(following, forwards_first):
        ops += _by_wave("fetch_dirty", NEXT, 1, waves)
    else:
        ops += _for_chunks("fetch_dirty", NEXT, following, first=1)
    ops += [Op("read_hot", NEXT), Op("dense_step")]
    return _checked(ops, forwards_first)


def is_depth_first(setting: Setting, forwards_first: bool) -> bool:
    """Whether the first micro-batch runs backward before the second one runs forward."""
    return setting.num_micro_batches == 2 and not forwards_first


def backward_order(setting: Setting, forwards_first: bool) -> Sequence[int]:
    """Returns the micro-batches in the order in which they run backward."""
    order = range(setting.num_micro_batches)
    return order if is_depth_first(setting, forwards_first) else order[::-1]


@cache
def evaluation_schedule(
    this: Setting,
    following: Setting | None = None,
    after: Setting | None = None,
    *,
    num_waves: int = 1,
) -> Schedule:
    """Returns the schedule of a step without backward; training steps may precede and follow it."""
    following = following or this
    ops = _before_updates(following)
    ops += _fetch_dirty(NEXT, following, num_waves)
    ops.append(Op("read_hot", NEXT))
    ops += _for_chunks("forward", THIS, this)
    ops.append(Op("send_row_numbers", AFTER))
    return _checked([*ops, *_row_numbers_arrive(AFTER, after or following)])


@cache
def first_batch_schedule(this: Setting, *, num_waves: int = 1) -> Schedule:
    """Returns the schedule that fetches the rows of the first batch, before the first step."""
    kinds = ("send_header", "send_row_numbers", "receive_row_numbers", "build_layout")
    ops = [Op(kind, THIS) for kind in kinds]
    return _checked([*ops, *_fetch_dirty(THIS, this, num_waves), Op("read_hot", THIS)])


@cache
def second_batch_schedule(following: Setting) -> Schedule:
    """Returns the schedule that sends the row numbers of the second batch, whose setting is
    ``following``, to home ranks, before the first step."""
    sends = [Op("send_header", NEXT), Op("send_row_numbers", NEXT)]
    return _checked([*sends, *_row_numbers_arrive(NEXT, following)])


def _for_chunks(kind: str, batch: int, setting: Setting, first: int = 0) -> list[Op]:
    return [Op(kind, batch, index) for index in range(first, setting.num_micro_batches)]


def _by_wave(kind: str, batch: int, index: int, waves: Sequence[int | None]) -> list[Op]:
    """Returns an operation for each wave; a wave of one pack is sent without copies."""
    return [Op(kind, batch, index, wave) for wave in waves]


def _waves(num_waves: int) -> Sequence[int | None]:
    """Returns every wave, or ``None`` (all packs) if there is only one wave."""
    return range(num_waves) if num_waves > 1 else [None]


def _fetch_dirty(batch: int, setting: Setting, num_waves: int) -> list[Op]:
    first = _by_wave("fetch_dirty", batch, 0, _waves(num_waves))
    return [*first, *_for_chunks("fetch_dirty", batch, setting, first=1)]


def _before_updates(following: Setting) -> list[Op]:
    """Returns operations that wait for no update: the next batch's layout and clean rows, a header.

    The layout is first, because the exchanges that its host syncs wait for started a step earlier.
    The header is small and goes ahead of the rows.
    """
    clean = [Op("fetch_clean", NEXT)] if following.lookahead else []
    return [Op("build_layout", NEXT), Op("send_header", AFTER), *clean]


def _row_numbers_arrive(batch: int, setting: Setting) -> list[Op]:
    mask = [Op("send_dirty_mask", batch)] if setting.lookahead else []
    return [Op("receive_row_numbers", batch), *mask]


def _checked(ops: list[Op], forwards_first: bool = True) -> Schedule:
    schedule = Schedule(tuple(ops), forwards_first)
    schedule.check()
    return schedule
