"""The operations of a schedule and their kinds: does one send, on which stream, after what.

All that a schedule, its check and the walk of it know of an operation is here; what it does is the
method of the same name in ``operations.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torchrec_picasso.errors import PlanError

__all__ = ["AFTER", "KINDS", "NEXT", "OF_BATCH", "THIS", "Kind", "Need", "Op"]

THIS, NEXT, AFTER = 0, 1, 2
"""Batches that a step works on."""
OF_BATCH = ("", " of the next batch", " of the batch after")


@dataclass(frozen=True)
class Op:
    """One operation.

    Args:
        kind: What runs, one of :data:`KINDS`.
        batch: 0 = the batch of this step, 1 = the next, 2 = the one after that.
        index: Micro-batch or chunk; ``None`` where the whole batch is meant.
        wave: Wave of packs; ``None`` where all packs are meant.

    Raises:
        PlanError: If there is no such kind.
    """

    kind: str
    batch: int = THIS
    index: int | None = None
    wave: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise PlanError(f"no operation is called {self.kind!r}; one of {', '.join(KINDS)}")

    def __str__(self) -> str:
        index = "" if self.index is None else f" {self.index}"
        wave = "" if self.wave is None else f" wave {self.wave}"
        return f"{self.kind}{index}{wave}{OF_BATCH[self.batch]}"


_Pick = Callable[[Op, Op], bool]
"""From an operation and another one of its schedule to whether it needs the other first."""


@dataclass(frozen=True)
class Need:
    """Operations that have to run before one, where they are in the same schedule.

    Args:
        kind: Their kind.
        pick: Which of that kind.
        required: Whether the schedule must have one; else another schedule may have run it.
    """

    kind: str
    pick: _Pick
    required: bool = False


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of operation.

    Args:
        sends: Whether it starts a collective: all ranks reach it in the same order.
        on_id_stream: Whether it works on ids only, ahead of the step, beside what computes.
        needs: What has to run before it.
    """

    sends: bool = False
    on_id_stream: bool = False
    needs: tuple[Need, ...] = ()


def _share_packs(op: Op, other: Op) -> bool:
    return op.wave is None or other.wave is None or op.wave == other.wave


def _of_batch(op: Op, other: Op) -> bool:
    """Of the same batch, and of packs that both are for."""
    return op.batch == other.batch and _share_packs(op, other)


def _of_part(op: Op, other: Op) -> bool:
    return op.batch == other.batch and op.index == other.index


def _before(op: Op, other: Op) -> bool:
    return op.batch == other.batch and (other.index or 0) < (op.index or 0)


def _later(op: Op, other: Op) -> bool:
    return op.batch == other.batch and (other.index or 0) > (op.index or 0)


def _of_batch_before(op: Op, other: Op) -> bool:
    """Of an earlier batch in flight; the first one's is over before the schedule begins."""
    return op.batch > other.batch and _share_packs(op, other)


def _all(*kinds: str) -> tuple[Need, ...]:
    return tuple(Need(kind, _of_batch) for kind in kinds)


_ROWS = (*_all("lay_out"), Need("update", _of_batch_before))

KINDS: Mapping[str, Kind] = {
    "request": Kind(sends=True, on_id_stream=True),
    "send_ids": Kind(sends=True, on_id_stream=True, needs=_all("request")),
    "receive_ids": Kind(on_id_stream=True, needs=_all("send_ids")),
    "send_marks": Kind(sends=True, on_id_stream=True, needs=_all("receive_ids")),
    "lay_out": Kind(on_id_stream=True, needs=_all("receive_ids", "send_marks")),
    "fetch_clean": Kind(sends=True, needs=_all("lay_out")),
    "fetch_dirty": Kind(sends=True, needs=_ROWS),
    "read_hot": Kind(sends=True, needs=_ROWS),
    "forward": Kind(needs=(Need("forward", _before),)),
    "backward": Kind(sends=True, needs=(*_all("forward"), Need("backward", _later))),
    "send_gradients": Kind(sends=True, needs=(Need("backward", _of_part, required=True),)),
    "reduce_hot": Kind(sends=True, needs=_all("backward")),
    "update": Kind(needs=_all("send_gradients", "reduce_hot")),
    "dense_step": Kind(needs=_all("backward", "update")),
}
"""Every kind, in the order in which a batch comes to it."""
