"""The schedule of a step as data: which piece of which batch runs when.

A step trains one batch, fetches the rows of the next, and exchanges the ids of the one after. Its
schedule is an ordered list of operations, the same on all ranks, so collectives meet in the same
order everywhere. It can be printed, checked and drawn; the pipeline only walks it.

Where one step meets the next, no computing hides the first chunk's exchanges: its gradients come
last and its rows are needed first. There, and only there, waves of packs are staggered: one is
updated and fetched again while the gradients of the next are on the wire.
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

__all__ = [
    "COLLECTIVES",
    "NUM_BATCHES",
    "OF_BATCH",
    "Op",
    "Schedule",
    "Setting",
    "evaluation_schedule",
    "first_batch_schedule",
    "second_batch_schedule",
    "training_schedule",
]

NUM_BATCHES = len(OF_BATCH)
"""Batches that a step works on."""

COLLECTIVES = frozenset(name for name, kind in KINDS.items() if kind.sends)
"""Operations that send: all ranks reach them in the same order."""


@dataclass(frozen=True)
class Setting:
    """How a batch is interleaved.

    Args:
        num_micro_batches: Pieces K that it is cut into.
        lookahead: Whether those of its rows that the batch before does not update are fetched
            before that one's update.
    """

    num_micro_batches: int
    lookahead: bool

    def __str__(self) -> str:
        pieces = f"{self.num_micro_batches} micro-batches"
        if self.num_micro_batches == 1:
            pieces = "1 micro-batch"
        return f"{pieces} {'with' if self.lookahead else 'without'} lookahead"


@dataclass(frozen=True)
class Schedule:
    """The operations of one step, in order."""

    ops: tuple[Op, ...]

    def __iter__(self) -> Iterator[Op]:
        return iter(self.ops)

    def __str__(self) -> str:
        return "\n".join(map(str, self.ops))

    def to_frame(self) -> pd.DataFrame:
        """A pandas DataFrame with columns ``op, batch, index, wave, collective``, a line per op."""
        import pandas as pd

        return pd.DataFrame(
            [(op.kind, op.batch, op.index, op.wave, op.kind in COLLECTIVES) for op in self.ops],
            columns=["op", "batch", "index", "wave", "collective"],
        ).astype({"index": "Int64", "wave": "Int64"})

    def check(self) -> None:
        """Refuses an order in which something would be used before it is there.

        Raises:
            PlanError: Names the operation and what has to come first.
        """
        done: set[Op] = set()
        for op in self.ops:
            if op in done:
                raise PlanError(f"the schedule runs {op} twice; each operation runs once")
            for need in KINDS[op.kind].needs:
                found = [o for o in self.ops if o.kind == need.kind and need.pick(op, o)]
                if need.required and not found:
                    raise PlanError(f"the schedule runs {op} without the {need.kind} it needs")
                for first in found:
                    if first != op and first not in done:
                        raise PlanError(
                            f"the schedule runs {op} before {first}, which it needs; swap them"
                        )
            done.add(op)


@cache
def training_schedule(
    this: Setting,
    following: Setting | None = None,
    after: Setting | None = None,
    *,
    num_waves: int = 1,
) -> Schedule:
    """The schedule of a training step.

    What no update waits for is on the wire first and needed last: the clean rows of the next batch
    follow the dirty rows of this one, so the wire works while forward does; ids are a step ahead.
    Where no clean rows are fetched, the next batch is laid out while the last gradients travel.

    Args:
        this: How the batch of the step is interleaved.
        following: How the next is; ``None`` = likewise.
        after: How the one after that is; ``None`` = likewise.
        num_waves: Waves of packs.
    """
    following = following or this
    waves = _waves(num_waves)
    ahead = _look_ahead(following)
    laid_out_late = [] if following.lookahead else [ahead.pop(0)]
    ops = [*ahead, *_of_chunks("forward", THIS, this)]
    ops.append(Op("send_ids", AFTER))
    for index in reversed(range(1, this.num_micro_batches)):
        ops += [Op("backward", THIS, index), Op("send_gradients", THIS, index)]
    ops.append(Op("backward", THIS, 0))  # in which dense gradients are reduced
    for wave in waves:
        ops += [Op("send_gradients", THIS, 0, wave), Op("reduce_hot", THIS, wave=wave)]
    ops += [*laid_out_late, *_ids_arrive(AFTER, after or following)]
    for wave in waves:
        ops += [Op("update", THIS, wave=wave), Op("fetch_dirty", NEXT, 0, wave)]
    ops += _of_chunks("fetch_dirty", NEXT, following, first=1)
    ops += [Op("read_hot", NEXT), Op("dense_step")]
    return _checked(ops)


@cache
def evaluation_schedule(
    this: Setting,
    following: Setting | None = None,
    after: Setting | None = None,
    *,
    num_waves: int = 1,
) -> Schedule:
    """The schedule of a step without backward; training steps may come before and after it.

    Args:
        this: How the batch of the step is interleaved.
        following: How the next is; ``None`` = likewise.
        after: How the one after that is; ``None`` = likewise.
        num_waves: Waves of packs.
    """
    following = following or this
    ops = _look_ahead(following)
    ops += _fetch_dirty(NEXT, following, num_waves)
    ops.append(Op("read_hot", NEXT))
    ops += _of_chunks("forward", THIS, this)
    return _checked([*ops, Op("send_ids", AFTER), *_ids_arrive(AFTER, after or following)])


@cache
def first_batch_schedule(this: Setting, *, num_waves: int = 1) -> Schedule:
    """How the first batch comes to its rows, before the first step."""
    ops = [Op(kind, THIS) for kind in ("request", "send_ids", "receive_ids", "lay_out")]
    return _checked([*ops, *_fetch_dirty(THIS, this, num_waves), Op("read_hot", THIS)])


@cache
def second_batch_schedule(following: Setting) -> Schedule:
    """How the second batch's ids come to their homes, before the first step."""
    return _checked([Op("request", NEXT), Op("send_ids", NEXT), *_ids_arrive(NEXT, following)])


def _of_chunks(kind: str, batch: int, setting: Setting, first: int = 0) -> list[Op]:
    return [Op(kind, batch, index) for index in range(first, setting.num_micro_batches)]


def _waves(num_waves: int) -> Sequence[int | None]:
    """Every wave; all packs at once where there is but one."""
    return range(num_waves) if num_waves > 1 else [None]


def _fetch_dirty(batch: int, setting: Setting, num_waves: int) -> list[Op]:
    first = [Op("fetch_dirty", batch, 0, wave) for wave in _waves(num_waves)]
    return [*first, *_of_chunks("fetch_dirty", batch, setting, first=1)]


def _look_ahead(following: Setting) -> list[Op]:
    """What no update has to come before: the clean rows of one batch, the header of another.

    The layout is first: what its host syncs wait for was sent in the step before. The header is
    small and goes ahead of the rows.
    """
    clean = [Op("fetch_clean", NEXT)] if following.lookahead else []
    return [Op("lay_out", NEXT), Op("request", AFTER), *clean]


def _ids_arrive(batch: int, setting: Setting) -> list[Op]:
    marks = [Op("send_marks", batch)] if setting.lookahead else []
    return [Op("receive_ids", batch), *marks]


def _checked(ops: list[Op]) -> Schedule:
    schedule = Schedule(tuple(ops))
    schedule.check()
    return schedule
