"""Checkpoints from every plan and world size to every other.

    python -m benchmarks.reliability.checkpoint_moves -o runs/checkpoint_moves
    python -m benchmarks.reliability.checkpoint_moves -o runs/quick --plans rows bags --ranks 1 2

A small model of pooled and sequence tables is trained for 5 steps under one plan on some ranks and
saved; a model under another plan on other ranks, which has trained something else before, loads it.
Then weights and optimizer state must be the saved ones bit for bit, and the losses of the next 5
steps those of stock TorchRec on as many ranks that was never saved, to rounding. Rows by host are
on 4 and 6 ranks, other plans on 1 to 4.

Moves that stock TorchRec cannot make either must be refused: row-wise Adagrad keeps a value per
row of each column shard, so column-wise tables load into as many column shards only.

FOLDER gets a line in moves.jsonl per finished move and a checkpoint_moves_summary.json; a rerun
goes on from there.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from benchmarks.command import command_parser
from benchmarks.reliability.moves import (
    LOSS_RTOL,
    REFUSED,
    SAME,
    STEP,
    Move,
    Side,
    all_moves,
    checkpoints_of,
    load_on_rank,
    save_on_rank,
    uncut_losses_of,
)
from benchmarks.reliability.outcomes import FAILED, Outcome, conclude, read_outcomes
from benchmarks.reliability.small_trainer import OPTIMIZERS, PLANS, RANKS_OF
from torchrec_picasso.app.checkpoints.folder import is_whole
from torchrec_picasso.app.launch.quiet import quiet_upstream
from torchrec_picasso.app.launch.run_ranks import RankError, run_ranks

_RESULTS, _SUMMARY = "moves.jsonl", "checkpoint_moves_summary.json"
RANKS = sorted({ranks for each in RANKS_OF.values() for ranks in each})
_PER_LAUNCH = 49
_LAUNCH_S, _MOVE_S = 120, 20


def run_moves(folder: Path, moves: Sequence[Move]) -> Iterator[Outcome]:
    """Makes the moves that a folder has no outcome of, and yields those of all."""
    folder.mkdir(parents=True, exist_ok=True)
    known = read_outcomes(folder / _RESULTS)
    yield from (known[move.name] for move in moves if move.name in known)
    left = [move for move in moves if move.name not in known]
    _save_sources(folder, left)
    left.sort(key=lambda move: move.target.world_size)
    for world_size, group in itertools.groupby(left, key=lambda move: move.target.world_size):
        moves = sorted(group, key=lambda move: (move.optimizer, move.target))
        for start in range(0, len(moves), _PER_LAUNCH):
            yield from _load(folder, world_size, moves[start : start + _PER_LAUNCH])


def _save_sources(folder: Path, moves: Sequence[Move]) -> None:
    """Writes the checkpoints that are still missing, and stock's uncut losses."""
    sources = {
        (move.optimizer, move.source)
        for move in moves
        if not is_whole(checkpoints_of(folder, move.optimizer, move.source) / STEP)
    }
    uncut = {
        (move.optimizer, move.stock)
        for move in moves
        if move.fits and not uncut_losses_of(folder, move.optimizer, move.stock).exists()
    }
    for world_size in sorted({side.world_size for _, side in sources | uncut}):
        jobs = [_plans_on(world_size, sides) for sides in (sources, uncut)]
        timeout_s = _LAUNCH_S + _MOVE_S * sum(map(len, jobs))
        run_ranks(save_on_rank, world_size, str(folder), *jobs, timeout_s=timeout_s)


def _plans_on(world_size: int, sides: Collection[tuple[str, Side]]) -> list[tuple[str, str]]:
    return sorted((name, side.plan) for name, side in sides if side.world_size == world_size)


def _load(folder: Path, world_size: int, moves: Sequence[Move]) -> Iterator[Outcome]:
    """Makes moves to one world size; one that ends its ranks is a failure, and the others go on."""
    left = list(moves)
    while left:
        why = "no outcome was written"
        try:
            timeout_s = _LAUNCH_S + _MOVE_S * len(left)
            run_ranks(load_on_rank, world_size, str(folder / _RESULTS), left, timeout_s=timeout_s)
        except RankError as error:
            why = f"rank {error.rank} {error.what}"
        known = read_outcomes(folder / _RESULTS)
        missing = next((move for move in left if move.name not in known), None)
        if missing is not None:
            Outcome(missing.name, FAILED, why).write(folder / _RESULTS)
            known = read_outcomes(folder / _RESULTS)
        yield from (known[move.name] for move in left if move.name in known)
        left = [move for move in left if move.name not in known]


def main(argv: Sequence[str] | None = None) -> int:
    """Makes all moves and prints a summary line.

    Returns:
        0 if every move went as it should, else 1.
    """
    args = _parser().parse_args(argv)
    quiet_upstream()
    sides = [Side(plan, n) for plan in args.plans for n in RANKS_OF[plan] if n in args.ranks]
    moves = all_moves(args.optimizers, sides)
    return conclude(
        run_moves(args.out, moves),
        args.out / _SUMMARY,
        "moves",
        len(moves),
        *(SAME, REFUSED),
        loss_rtol=LOSS_RTOL,
    )


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("benchmarks.reliability.checkpoint_moves", __doc__)
    add = parser.add_argument
    add("-o", "--out", type=Path, required=True, metavar="FOLDER", help="outcomes, checkpoints")
    add("--plans", nargs="+", choices=PLANS, default=PLANS)
    add("--optimizers", nargs="+", choices=OPTIMIZERS, default=tuple(OPTIMIZERS))
    add("--ranks", nargs="+", type=int, choices=RANKS, default=RANKS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
