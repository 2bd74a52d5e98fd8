"""Moves of a checkpoint, with those that stock TorchRec cannot make, and the ranks of a move: one
launch saves, another loads, compares and trains on."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.reliability.outcomes import FAILED, Outcome
from benchmarks.reliability.small_model import BAGS, SEQUENCES
from benchmarks.reliability.small_trainer import SmallTrainer, num_column_shards
from benchmarks.reliability.whole_state import differences, join_state
from torchrec_picasso.app.checkpoints.load import load_checkpoint
from torchrec_picasso.app.checkpoints.write import save_checkpoint
from torchrec_picasso.app.launch.quiet import quiet_upstream
from torchrec_picasso.errors import PicassoError

LOSS_RTOL = 2e-6
"""Losses of float32 whose sums have another order, 10 steps long; seen are at most 4e-7."""

SAME, REFUSED = "same", "refused"
"""Verdicts: training went on as if unbroken; the load was refused as by stock."""

_BEFORE, _AFTER = range(5), range(5, 10)
STEP, _WHOLE = f"step_{len(_BEFORE):08d}", "whole.pt"
_OTHER_STEPS = (90, 91)
"""Steps that a target trains before it loads, so that nothing is right by accident."""


@dataclass(frozen=True, order=True)
class Side:
    """A plan on a number of ranks."""

    plan: str
    world_size: int

    @property
    def name(self) -> str:
        """Such as ``bags@3``."""
        return f"{self.plan}@{self.world_size}"

    def column_shards(self) -> tuple[int, ...]:
        """Column shards of each table."""
        dims = [dim for _, dim in (BAGS | SEQUENCES).values()]
        if self.plan != "column_wise":
            return (1,) * len(dims)
        return tuple(num_column_shards(dim, self.world_size) for dim in dims)


@dataclass(frozen=True, order=True)
class Move:
    """A checkpoint that one side writes and the other loads."""

    optimizer: str
    source: Side
    target: Side

    @property
    def name(self) -> str:
        """Such as ``adagrad, rows@2 to bags@3``."""
        return f"{self.optimizer}, {self.source.name} to {self.target.name}"

    @property
    def fits(self) -> bool:
        """Whether the optimizer's state means the same on both sides.

        Row-wise Adagrad's is one value per row of a column shard.
        """
        same_columns = self.source.column_shards() == self.target.column_shards()
        return self.optimizer != "rowwise_adagrad" or same_columns

    @property
    def stock(self) -> Side:
        """The stock training, never cut in two, that goes as the target should go on."""
        is_column_wise = self.target.plan == "column_wise"
        return Side("column_wise" if is_column_wise else "table_wise", self.target.world_size)


def all_moves(optimizers: Iterable[str], sides: Iterable[Side]) -> list[Move]:
    """Every pair of sides in both directions, and each side to itself, by optimizer."""
    pairs = list(itertools.product(sides, repeat=2))
    return sorted(Move(optimizer, *pair) for optimizer in optimizers for pair in pairs)


def save_on_rank(
    rank: int,
    world_size: int,
    folder: str,
    sources: Sequence[tuple[str, str]],
    uncut: Sequence[tuple[str, str]],
) -> None:
    """Writes checkpoints, and losses of stock trainings that are never cut in two."""
    quiet_upstream()
    for optimizer, plan in sources:
        path = checkpoints_of(folder, optimizer, Side(plan, world_size))
        trainer = SmallTrainer(plan, optimizer)
        trainer.train(_BEFORE)
        whole = join_state(trainer.state())
        if rank == 0:
            path.mkdir(parents=True, exist_ok=True)
            torch.save(whole, path / _WHOLE)
        save_checkpoint(path, len(_BEFORE), trainer.state())
    for optimizer, plan in uncut:
        losses = SmallTrainer(plan, optimizer).train([*_BEFORE, *_AFTER])
        if rank == 0:
            path = uncut_losses_of(folder, optimizer, Side(plan, world_size))
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(losses))


def load_on_rank(rank: int, world_size: int, results: str, moves: Sequence[Move]) -> None:
    """Makes moves, and appends each outcome to a file on rank 0. Models are kept between moves."""
    quiet_upstream()
    trainers: dict[tuple[str, str], SmallTrainer] = {}
    for move in moves:
        key = move.optimizer, move.target.plan
        if key not in trainers:
            trainers.clear()
            trainers[key] = SmallTrainer(move.target.plan, move.optimizer, seed=1)
            trainers[key].train(_OTHER_STEPS)
        outcome = _make(move, trainers[key], Path(results).parent)
        if rank == 0:
            outcome.write(Path(results))


def _make(move: Move, trainer: SmallTrainer, folder: Path) -> Outcome:
    path = checkpoints_of(folder, move.optimizer, move.source)
    try:
        load_checkpoint(path / STEP, trainer.state(), trainer.load_state)
    except PicassoError as error:
        return Outcome(move.name, FAILED if move.fits else REFUSED, str(error))
    if not move.fits:
        return Outcome(move.name, FAILED, "was loaded; TorchRec's own state does not fit")
    found = join_state(trainer.state())
    losses = trainer.train(_AFTER)
    uncut = json.loads(uncut_losses_of(folder, move.optimizer, move.stock).read_text())
    uncut = uncut[len(_BEFORE) :]
    apart = max(abs(loss - other) / abs(other) for loss, other in zip(losses, uncut, strict=True))
    wrong = differences(found, torch.load(path / _WHOLE)) if dist.get_rank() == 0 else []
    detail = f"other values after the load: {', '.join(wrong)}" if wrong else ""
    if not apart <= LOSS_RTOL:
        detail += f"{'; ' if detail else ''}losses are {apart:.1e} from the uncut run's"
    return Outcome(move.name, FAILED if detail else SAME, detail, apart)


def checkpoints_of(folder: str | Path, optimizer: str, side: Side) -> Path:
    """Where a side's one checkpoint is."""
    return Path(folder, "checkpoints", optimizer, side.name)


def uncut_losses_of(folder: str | Path, optimizer: str, side: Side) -> Path:
    """The file of stock's losses."""
    return Path(folder, "uncut", f"{optimizer}, {side.name}.json")
