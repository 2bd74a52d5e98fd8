"""A long training with all that happens in one, beside stock TorchRec on the same batches.

    python -m benchmarks.reliability.soak -o runs/soak
    python -m benchmarks.reliability.soak -o runs/soak_cut --micro-batches 4 --ranks 3

A small model of pooled and sequence tables is trained under InterleavedTrainPipeline as it comes:
it tries settings, its hot rows follow ids that drift. Batches have 0 to 288 samples, data ends at
other times on ranks, each such end is followed by an evaluation, and between two of them a
checkpoint is written, by turns while training waits and while it goes on; every third is reloaded
into the model once all of it has been spoiled. Stock TorchRec trains the same way in a launch of
its own; where a rank has no samples it gets one that counts nothing.

Every step's loss has to be stock's, and so have the weights at the end; replicas have to be their
homes to the bit; memory, Python objects and tensors must not grow; and no descriptor, thread,
tensor, pipeline or model may be left that stock does not leave.

FOLDER gets soak.json. Where it is whole and of the same settings it is shown and nothing runs; an
unfinished soak begins again, since 2,000 steps take a minute or two.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.command import command_parser
from benchmarks.reliability.soak_side import Found, Plan, Plant, train_side
from benchmarks.reliability.soak_verdict import judge
from torchrec_picasso.app.cli.outputs import write_result
from torchrec_picasso.app.launch.quiet import quiet_upstream
from torchrec_picasso.app.launch.run_ranks import RankError, run_ranks

_RESULT = "soak.json"
_OURS, _STOCK = "rows", "table_wise"
_LAUNCH_S, _STEP_S = 120.0, 1.0
_FEWEST_STEPS = 40


def plans(steps: int, num_micro_batches: int | None = None) -> dict[str, Plan]:
    """Plans of both sides for so many steps: at least 4 stretches and 16 looks at the process."""
    ours = Plan(
        placement=_OURS,
        steps=steps,
        stretch=min(100, steps // 4),
        sample_every=max(1, min(50, steps // 16)),
        verify_every=20,
        num_micro_batches=num_micro_batches,
    )
    return {"stock": dataclasses.replace(ours, placement=_STOCK), "ours": ours}


def run_side(plan: Plan, num_ranks: int, folder: Path, plant: Plant | None = None) -> list[Found]:
    """Trains one side; what each rank found.

    Raises:
        RankError: If a rank failed.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    timeout_s = _LAUNCH_S + _STEP_S * plan.steps
    try:
        return run_ranks(
            train_side,
            num_ranks,
            plan,
            str(folder),
            plant,
            timeout_s=timeout_s,
            on_start=keep_few_records,
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def keep_few_records(rank: int) -> None:
    """Lets torch remember few collectives: 2,000 take 2 MiB, and hundreds of steps to come by."""
    os.environ["TORCH_FR_BUFFER_SIZE"] = "50"


def soak(
    folder: Path, steps: int, num_ranks: int, num_micro_batches: int | None = None
) -> dict[str, Any]:
    """Trains both sides and writes what was found, or reads it where it was found before.

    Returns:
        The contents of soak.json.

    Raises:
        RankError: If stock's side failed.
    """
    by_side = plans(steps, num_micro_batches)
    settings = {"ranks": num_ranks, **dataclasses.asdict(by_side["ours"])}
    path = folder / _RESULT
    known = _read(path)
    if known is not None and known["settings"] == settings:
        return known
    path.unlink(missing_ok=True)
    stock = run_side(by_side["stock"], num_ranks, folder / "checkpoints")
    document: dict[str, Any] = {"settings": settings}
    try:
        ours = run_side(by_side["ours"], num_ranks, folder / "checkpoints")
    except RankError as error:
        document["failed"] = [str(error)]
    else:
        document.update(judge(ours, stock))
    write_result(document, path)
    return document


def _read(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def _show(found: dict[str, Any]) -> None:
    for line in found.get("lines", ()):
        print(line)
    for failure in found["failed"]:
        print(f"FAILED: {failure}")
    print(f"{len(found['failed'])} failed" if found["failed"] else "all as it should be")


def main(argv: Sequence[str] | None = None) -> int:
    """Soaks, and shows what was found.

    Returns:
        0 if all is as it should be, else 1; 2 where the options allow no answer.
    """
    parser = command_parser("benchmarks.reliability.soak", __doc__)
    add = parser.add_argument
    add("-o", "--out", type=Path, required=True, metavar="FOLDER", help="soak.json goes there")
    add("--steps", type=int, default=2000, help=f"at least {_FEWEST_STEPS} (default: 2000)")
    add("--ranks", type=int, choices=(1, 2, 3, 4), default=2)
    add("--micro-batches", type=int, choices=(1, 2, 4), help="default: chosen by trying")
    args = parser.parse_args(argv)
    if args.steps < _FEWEST_STEPS:
        print(f"error: {args.steps} steps tell nothing, give {_FEWEST_STEPS}", file=sys.stderr)
        return 2
    quiet_upstream()
    args.out.mkdir(parents=True, exist_ok=True)
    try:
        found = soak(args.out, args.steps, args.ranks, args.micro_batches)
    except (RankError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    _show(found)
    return 1 if found["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
