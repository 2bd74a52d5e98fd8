"""The operations of a schedule and their kinds: collective or not, stream, dependencies.

Schedules, their check and their executor read the properties of operations from this file; the
method ``_<kind>`` of ``Operations`` runs an operation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import eq, gt, le, lt

from torchrec_picasso.errors import PlanError

THIS, NEXT, AFTER = 0, 1, 2
"""Batches that a step works on."""
OF_BATCH = ("", " of the next batch", " of the batch after")
"""The batch of an operation, in words."""


@dataclass(frozen=True)
class Op:
    """One operation of a step; PlanError if no kind has its name."""

    kind: str
    batch: int = THIS
    index: int | None = None
    """Index of the micro-batch or chunk; ``None`` = the whole batch."""
    wave: int | None = None
    """Wave of packs; ``None`` = all packs."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise PlanError(f"no operation is called {self.kind!r}; one of {', '.join(KINDS)}")

    def __str__(self) -> str:
        index = "" if self.index is None else f" {self.index}"
        wave = "" if self.wave is None else f" wave {self.wave}"
        return f"{self.kind}{index}{wave}{OF_BATCH[self.batch]}"


@dataclass(frozen=True)
class Need:
    """Operations of a kind that must run before an operation, if they are in the same schedule."""

    kind: str
    pick: Callable[[Op, Op], bool]
    """Whether an operation requires another operation of that kind."""
    required: bool = False
    """Whether the schedule must contain one; otherwise an earlier schedule may have run it."""
    shared_rows_only: bool = False
    """Whether the need exists only where micro-batches share rows, so not depth first."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of operation."""

    sends: bool = False
    """Whether the operation starts a collective; all ranks reach it in the same order."""
    on_id_stream: bool = False
    """Whether the operation works on ids only, on a stream beside the computation."""
    leads: bool = False
    """Whether the operation may run before all ranks agree that the step begins; at the head of a
    schedule alone."""
    needs: tuple[Need, ...] = ()


def _share_packs(op: Op, other: Op) -> bool:
    """Whether any pack belongs to both; an operation without a wave has all packs."""
    return op.wave is None or other.wave is None or op.wave == other.wave


def _same_batch(op: Op, other: Op) -> bool:
    return op.batch == other.batch and _share_packs(op, other)


def _index(compare: Callable[[int, int], bool]) -> Callable[[Op, Op], bool]:
    """Compares the index of another operation on the same batch with that of the operation."""
    return lambda op, other: op.batch == other.batch and compare(other.index or 0, op.index or 0)


def _earlier_batch(op: Op, other: Op) -> bool:
    """Whether the other works on an earlier batch of the step."""
    return op.batch > other.batch and _share_packs(op, other)


def _all(*kinds: str) -> tuple[Need, ...]:
    """Needs all operations of these kinds on the same batch."""
    return tuple(Need(kind, _same_batch) for kind in kinds)


# Dirty rows and replicas may be read only after the update of the batch before.
_ROWS = (*_all("build_layout"), Need("update", _earlier_batch))

KINDS: Mapping[str, Kind] = {
    "send_header": Kind(sends=True, on_id_stream=True, leads=True),
    "send_row_numbers": Kind(sends=True, on_id_stream=True, needs=_all("send_header")),
    "receive_row_numbers": Kind(on_id_stream=True, needs=_all("send_row_numbers")),
    "send_dirty_mask": Kind(sends=True, on_id_stream=True, needs=_all("receive_row_numbers")),
    "build_layout": Kind(
        on_id_stream=True, leads=True, needs=_all("receive_row_numbers", "send_dirty_mask")
    ),
    "fetch_clean": Kind(sends=True, needs=_all("build_layout")),
    "fetch_dirty": Kind(sends=True, needs=_ROWS),
    "read_hot": Kind(needs=_ROWS),
    # Micro-batches run forward in ascending order. Backward runs in descending order where they
    # share rows, so that the gradients of chunk k are complete after backward k.
    "forward": Kind(
        needs=(
            Need("forward", _index(lt)),
            Need("fetch_clean", _index(le)),
            Need("fetch_dirty", _index(le)),
        )
    ),
    "backward": Kind(
        sends=True,
        needs=(Need("forward", _index(eq)), Need("backward", _index(gt), shared_rows_only=True)),
    ),
    "send_gradients": Kind(sends=True, needs=(Need("backward", _index(eq), required=True),)),
    "reduce_hot": Kind(sends=True, needs=_all("backward")),
    "update": Kind(needs=_all("send_gradients", "reduce_hot")),
    # DDP reduces dense gradients in backward; the optimizer of dense layers runs last.
    "dense_step": Kind(needs=_all("backward", "update")),
}
"""Every kind, in the order in which a batch passes through the kinds."""
