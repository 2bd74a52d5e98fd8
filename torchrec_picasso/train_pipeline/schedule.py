"""The schedule of a step as data: which piece of which batch runs when.

A step trains one batch and prepares the next. Its schedule is an ordered list of operations, the
same on all ranks, so collectives meet in the same order everywhere. It can be printed, checked and
drawn; the pipeline only walks it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchrec_picasso.errors import PlanError

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["COLLECTIVES", "Op", "Schedule", "evaluation_schedule", "training_schedule"]

THIS, NEXT = 0, 1

COLLECTIVES = frozenset(
    {
        "request",
        "send_ids",
        "send_marks",
        "fetch_clean",
        "fetch_dirty",
        "read_hot",
        "send_gradients",
        "reduce_hot",
        "reduce_dense",
    }
)
"""Operations that send: all ranks reach them in the same order."""


@dataclass(frozen=True)
class Op:
    """One operation.

    Args:
        kind: What runs, a method of the pipeline.
        batch: 0 = the batch of this step, 1 = the next.
        index: Micro-batch or chunk; ``None`` where the whole batch is meant.
    """

    kind: str
    batch: int = THIS
    index: int | None = None

    def __str__(self) -> str:
        index = "" if self.index is None else f" {self.index}"
        return f"{self.kind}{index}{' of the next batch' if self.batch == NEXT else ''}"


@dataclass(frozen=True)
class Schedule:
    """The operations of one step, in order."""

    ops: tuple[Op, ...]

    def __iter__(self) -> Iterator[Op]:
        return iter(self.ops)

    def __str__(self) -> str:
        return "\n".join(map(str, self.ops))

    def to_frame(self) -> pd.DataFrame:
        """A pandas DataFrame with columns ``op, batch, index, collective``, one line per op."""
        import pandas as pd

        return pd.DataFrame(
            [(op.kind, op.batch, op.index, op.kind in COLLECTIVES) for op in self.ops],
            columns=["op", "batch", "index", "collective"],
        ).astype({"index": "Int64"})

    def check(self) -> None:
        """Refuses an order in which something would be used before it is there.

        Raises:
            PlanError: Names the operation and what has to come first.
        """
        done: set[Op] = set()
        for op in self.ops:
            if op in done:
                raise PlanError(f"the schedule runs {op} twice; each operation runs once")
            for first in _needs(op, self.ops):
                if first not in done:
                    raise PlanError(
                        f"the schedule runs {op} before {first}, which it needs; swap them"
                    )
            done.add(op)


def training_schedule(num_micro_batches: int, lookahead: bool) -> Schedule:
    """The schedule of a training step.

    Args:
        num_micro_batches: Pieces that a batch is cut into.
        lookahead: Whether the next batch's clean rows are fetched before this batch's update.
    """
    chunks = range(num_micro_batches)
    last = num_micro_batches - 1
    # the next batch's ids travel behind the first forwards, its clean rows behind backward
    prepare = [[Op("request", NEXT)], [Op("send_ids", NEXT)], [Op("receive_ids", NEXT)]]
    if lookahead:
        prepare[2].append(Op("send_marks", NEXT))
    ops: list[Op] = []
    for index in chunks:
        ops.append(Op("forward", THIS, index))
        if index < last and prepare:
            ops += prepare.pop(0)
    early = [op for group in prepare for op in group]
    ops += early
    for index in reversed(chunks):
        ops += [Op("backward", THIS, index), Op("send_gradients", THIS, index)]
        if index == last:
            ops.append(Op("lay_out", NEXT))
            if lookahead:
                ops += [Op("fetch_clean", NEXT, chunk) for chunk in chunks]
    ops += [Op("reduce_hot"), Op("reduce_dense"), Op("update")]
    ops += [Op("fetch_dirty", NEXT, chunk) for chunk in chunks]
    ops += [Op("read_hot", NEXT), Op("dense_step")]
    return Schedule(tuple(ops))


def evaluation_schedule(num_micro_batches: int) -> Schedule:
    """The schedule of a step without backward: all rows of the next batch are clean."""
    chunks = range(num_micro_batches)
    prepare = [Op(kind, NEXT) for kind in ("request", "send_ids", "receive_ids", "lay_out")]
    return Schedule(
        (
            *prepare,
            *(Op("fetch_clean", NEXT, chunk) for chunk in chunks),
            Op("read_hot", NEXT),
            *(Op("forward", THIS, index) for index in chunks),
        )
    )


_PREPARED = ("request", "send_ids", "receive_ids", "send_marks", "lay_out")


def _needs(op: Op, ops: tuple[Op, ...]) -> list[Op]:
    """What has to run before an operation, among those of the same schedule."""
    of = [other for other in ops if other.kind != op.kind]

    def all_of(*kinds: str) -> list[Op]:
        return [other for other in of if other.kind in kinds]

    if op.kind in _PREPARED:
        return all_of(*_PREPARED[: _PREPARED.index(op.kind)])
    if op.kind == "fetch_clean":
        return all_of("lay_out")
    if op.kind == "fetch_dirty":
        return all_of("lay_out", "update")
    if op.kind == "read_hot":
        return all_of("lay_out", "update")
    if op.kind == "forward" and op.index:
        return [Op("forward", op.batch, op.index - 1)]
    if op.kind == "backward":
        later = [o for o in ops if o.kind == "backward" and (o.index or 0) > (op.index or 0)]
        return [*all_of("forward"), *later]
    if op.kind == "send_gradients":
        return [Op("backward", op.batch, op.index)]
    if op.kind in ("reduce_hot", "reduce_dense"):
        return all_of("backward")
    if op.kind == "update":
        return all_of("send_gradients", "reduce_hot")
    if op.kind == "dense_step":
        return all_of("reduce_dense", "update")
    return []
