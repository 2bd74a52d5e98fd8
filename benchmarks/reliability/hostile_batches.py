"""Hostile batches and plans: either trained as by stock TorchRec, or refused on all ranks.

    python -m benchmarks.reliability.hostile_batches -o runs/hostile_batches
    python -m benchmarks.reliability.hostile_batches -o runs/quick --cases 10 --ranks 1 2

Each case is a small model of pooled and sequence tables under a random plan (forms, hot sets from
empty to full, uneven homes) and three random batches per rank: no samples, no ids, one id, all ids,
the ends of the tables, a million ids in one bag, int32 or int64. Losses, weights and optimizer
state must be those of stock TorchRec on the same batches. Every third case has something bad in
one batch; then all ranks must raise, those at fault naming the feature, weights must be those
after a whole number of steps, and the training after ``reset()`` must go as by stock.

FOLDER gets a line per case in hostile_batches.jsonl and hostile_batches_summary.json; a rerun goes
on from there.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.reliability.hostile_cases import draw_case
from benchmarks.reliability.hostile_jobs import (
    HANG_S,
    LOSS_RTOL,
    Outcome,
    run_on_rank,
)
from torchrec_picasso.app.launch.environment import describe_environment
from torchrec_picasso.app.launch.progress import Progress
from torchrec_picasso.app.launch.quiet import quiet_upstream
from torchrec_picasso.app.launch.run_ranks import RankError, run_ranks

__all__ = ["run_cases"]

_RESULTS, _SUMMARY = "hostile_batches.jsonl", "hostile_batches_summary.json"
_PER_LAUNCH = 50
_LAUNCH_S = 120


def run_cases(
    folder: Path, seed: int, world_sizes: Sequence[int], num_cases: int
) -> Iterator[Outcome]:
    """Runs the cases that a folder has no outcome of, and yields those of all.

    Args:
        folder: Gets a line per outcome; made if missing.
        seed: Of all cases.
        world_sizes: Numbers of ranks.
        num_cases: Of each.
    """
    folder.mkdir(parents=True, exist_ok=True)
    results = folder / _RESULTS
    for world_size in world_sizes:
        known = _read(results)
        numbers = range(num_cases)
        names = {number: draw_case(seed, world_size, number).name for number in numbers}
        yield from (known[name] for name in names.values() if name in known)
        left = [number for number in numbers if names[number] not in known]
        while left:
            now = left[:_PER_LAUNCH]
            why = "no outcome was written"
            try:
                timeout_s = _LAUNCH_S + HANG_S * len(now)
                run_ranks(run_on_rank, world_size, str(results), seed, now, timeout_s=timeout_s)
            except RankError as error:
                last = error.rank_traceback.strip().splitlines()[-3:]
                why = f"rank {error.rank} {error.what}; {' '.join(last)}"
            known = _read(results)
            missing = next((number for number in now if names[number] not in known), None)
            if missing is not None:
                case = draw_case(seed, world_size, missing)
                Outcome(case.name, "failed", why, None, str(case)).write(results)
                known = _read(results)
            yield from (known[names[number]] for number in now if names[number] in known)
            left = [number for number in left if names[number] not in known]


def _read(path: Path) -> dict[str, Outcome]:
    """Outcomes by name; a line that was cut off in writing counts for nothing."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    outcomes = [Outcome(**json.loads(line)) for line in lines if line.endswith("}\n")]
    return {outcome.name: outcome for outcome in outcomes}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs all cases and prints a summary line.

    Returns:
        0 if every case went as it should, else 1.
    """
    args = _parser().parse_args(argv)
    quiet_upstream()
    progress = Progress("cases", args.cases * len(args.ranks))
    outcomes = []
    for outcome in run_cases(args.out, args.seed, args.ranks, args.cases):
        outcomes.append(outcome)
        if outcome.verdict == "failed":
            progress.say(f"{outcome.name}: {outcome.detail}")
        progress.advance()
    progress.close()
    summary = _summary(outcomes)
    document = {
        "environment": describe_environment(),
        "seed": args.seed,
        "loss_rtol": LOSS_RTOL,
        **summary,
    }
    (args.out / _SUMMARY).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(
        f"{summary['cases']:,} cases: {summary['right']:,} trained as by stock, "
        f"{summary['refused']:,} refused on all ranks, {len(summary['failed'])} failed"
        f"{''.join(f'; {name}' for name in summary['failed'])}"
    )
    return 1 if summary["failed"] else 0


def _summary(outcomes: Sequence[Outcome]) -> dict[str, object]:
    verdicts = Counter(outcome.verdict for outcome in outcomes)
    apart = [outcome.losses_apart for outcome in outcomes if outcome.losses_apart is not None]
    return {
        "cases": len(outcomes),
        "right": verdicts["right"],
        "refused": verdicts["refused"],
        "failed": {o.name: o.detail for o in outcomes if o.verdict == "failed"},
        "losses_apart_at_most": max(apart, default=None),
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.reliability.hostile_batches",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("-o", "--out", type=Path, required=True, metavar="FOLDER", help="a line per case, summary")
    add("--cases", type=int, default=250, help="of each number of ranks; default 250")
    add("--ranks", nargs="+", type=int, choices=(1, 2, 3, 4), default=(1, 2, 3, 4))
    add("--seed", type=int, default=0, help="of all cases; another one makes other cases")
    return parser


if __name__ == "__main__":
    sys.exit(main())
