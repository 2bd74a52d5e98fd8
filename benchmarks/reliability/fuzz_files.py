"""Damaged and malicious files: either read into something that can be used, or refused by name.

    python -m benchmarks.reliability.fuzz_files -o runs/fuzz_files
    python -m benchmarks.reliability.fuzz_files -o runs/quick --cases 300 --kinds config curves

Good configurations, statistics, curves, hot rows and checkpoints get bits flipped, are cut off, get
other values of other types, keys that nobody knows, documents that swell, and pickles that run a
command. The functions that users call then read them. Each file is ``loaded``, and what was read
can be used; or ``refused``, by one clear error that names it. Anything else has failed: another
exception, more than 10 s, more than 1 GiB of memory, the end of the process, a command that ran.

FOLDER gets a line per case in fuzz_files.jsonl, fuzz_files_summary.json, and the files that failed
under failed/; a rerun goes on from there.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
import random
import resource
import shutil
import sys
import tempfile
import threading
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.reliability.fuzz_target import Target
from benchmarks.reliability.fuzz_targets import TARGETS
from torchrec_picasso.app.launch.environment import describe_environment
from torchrec_picasso.app.launch.progress import Progress
from torchrec_picasso.app.launch.quiet import quiet_upstream
from torchrec_picasso.app.launch.run_ranks import RankError, run_ranks
from torchrec_picasso.errors import PicassoError

__all__ = ["Outcome", "read_damaged", "run_cases"]

LIMIT_S, LIMIT_BYTES = 10.0, 1 << 30
_LONGEST_LINE = 2000
"""Of a message; a path and what is wrong need less."""
_RESULTS, _SUMMARY = "fuzz_files.jsonl", "fuzz_files_summary.json"
_PER_LAUNCH = 400
_LAUNCH_S = 120


@dataclass(frozen=True)
class Outcome:
    """How a file was read.

    Args:
        name: Kind and number of the case.
        verdict: ``loaded``, ``refused`` or ``failed``.
        what: What was done to the file.
        detail: The refusal, or what went wrong.
    """

    name: str
    verdict: str
    what: str = ""
    detail: str = ""

    def write(self, path: Path) -> None:
        """Appends a line."""
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(dataclasses.asdict(self)) + "\n")


def run_cases(folder: Path, seed: int, numbers_of: dict[str, int]) -> Iterator[Outcome]:
    """Runs the cases that a folder has no outcome of, and yields those of all.

    Args:
        folder: Gets a line per outcome; made if missing.
        seed: Of all cases.
        numbers_of: Cases of each kind.
    """
    folder.mkdir(parents=True, exist_ok=True)
    results = folder / _RESULTS
    names = [f"{kind}/{number}" for kind, most in numbers_of.items() for number in range(most)]
    known = _read(results)
    yield from (known[name] for name in names if name in known)
    left = [name for name in names if name not in known]
    while left:
        now, why = left[:_PER_LAUNCH], "no outcome was written"
        try:
            timeout_s = _LAUNCH_S + LIMIT_S * len(now)
            run_ranks(_run_on_rank, 1, str(folder), seed, now, timeout_s=timeout_s)
        except RankError as error:
            why = error.what
        known = _read(results)
        missing = next((name for name in now if name not in known), None)
        if missing is not None:
            Outcome(missing, "failed", "", why).write(results)
            known = _read(results)
        yield from (known[name] for name in now if name in known)
        left = [name for name in left if name not in known]


def _run_on_rank(rank: int, world_size: int, folder: str, seed: int, names: Sequence[str]) -> None:
    """Reads files one by one, and appends each outcome; the process ends with one that hangs."""
    quiet_upstream()
    warnings.simplefilter("ignore")
    logging.disable()  # torch logs what it raises
    targets: dict[str, Target] = {}
    with tempfile.TemporaryDirectory(prefix="fuzz_files_") as scratch:
        for name in names:
            kind = name.split("/")[0]
            if kind not in targets:
                seeds = Path(scratch, "seeds", kind)
                seeds.mkdir(parents=True)
                targets[kind] = TARGETS[kind][0](seeds)
            case = Path(scratch, "case")
            case.mkdir()
            marker = Path(scratch, "a_command_ran")
            draw = random.Random(f"{seed}/{name}")
            what, path = targets[kind].damage(draw, case, marker)
            timer = threading.Timer(LIMIT_S, os._exit, [3])
            timer.daemon = True
            timer.start()
            verdict, detail = read_damaged(targets[kind], path, marker)
            timer.cancel()
            if verdict == "failed":
                kept = Path(folder, "failed", name.replace("/", "_"))
                shutil.rmtree(kept, ignore_errors=True)
                shutil.copytree(case, kept)
            shutil.rmtree(case)
            Outcome(name, verdict, what, detail).write(Path(folder, _RESULTS))


def read_damaged(target: Target, path: Path, marker: Path) -> tuple[str, str]:
    """Reads a file as users do.

    Args:
        target: Its kind.
        path: The file.
        marker: Exists if something in the file has run.

    Returns:
        Verdict and detail.
    """
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_address_space_bytes() + LIMIT_BYTES, before[1]))
    try:
        target.use(path)
        verdict, detail = "loaded", ""
    except PicassoError as error:
        verdict, detail = _judged(str(error), path)
    except MemoryError:
        verdict, detail = "failed", f"took more than {LIMIT_BYTES >> 20} MiB"
    except Exception as error:
        verdict, detail = "failed", f"{type(error).__name__}: {str(error)[:300]}"
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    if marker.exists():
        marker.unlink()
        return "failed", "a command in the file ran"
    return verdict, detail[:_LONGEST_LINE]


def _judged(message: str, path: Path) -> tuple[str, str]:
    """Whether a refusal names the file and can be read."""
    if path.name not in message:
        return "failed", f"the error does not name the file: {message[:300]}"
    if "Traceback" in message:
        return "failed", f"the error holds a traceback: {message[:300]}"
    if max(map(len, message.splitlines())) > _LONGEST_LINE:
        return "failed", f"a line of the error has over {_LONGEST_LINE} characters: {message[:300]}"
    return "refused", message


def _address_space_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()


def _read(path: Path) -> dict[str, Outcome]:
    """Outcomes by name; a line that was cut off in writing counts for nothing."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    outcomes = [Outcome(**json.loads(line)) for line in lines if line.endswith("}\n")]
    return {outcome.name: outcome for outcome in outcomes}


def main(argv: Sequence[str] | None = None) -> int:
    """Reads all files and prints a summary line.

    Returns:
        0 if every file was read or refused as it should, else 1.
    """
    args = _parser().parse_args(argv)
    quiet_upstream()
    shares = {kind: TARGETS[kind][1] for kind in args.kinds}
    numbers_of = {
        kind: max(1, round(args.cases * share / sum(shares.values())))
        for kind, share in shares.items()
    }
    progress = Progress("files", sum(numbers_of.values()))
    outcomes = []
    for outcome in run_cases(args.out, args.seed, numbers_of):
        outcomes.append(outcome)
        if outcome.verdict == "failed":
            progress.say(f"{outcome.name} ({outcome.what}): {outcome.detail}")
        progress.advance()
    progress.close()
    summary = _summary(outcomes)
    document = {"environment": describe_environment(), "seed": args.seed, **summary}
    (args.out / _SUMMARY).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(
        f"{summary['files']:,} files: {summary['loaded']:,} loaded, {summary['refused']:,} "
        f"refused, {len(summary['failed'])} failed"
        f"{''.join(f'; {name}' for name in list(summary['failed'])[:20])}"
    )
    return 1 if summary["failed"] else 0


def _summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    verdicts = Counter(outcome.verdict for outcome in outcomes)
    by_kind = Counter((o.name.split("/")[0], o.verdict) for o in outcomes)
    return {
        "files": len(outcomes),
        "loaded": verdicts["loaded"],
        "refused": verdicts["refused"],
        "by_kind": {f"{kind} {verdict}": n for (kind, verdict), n in sorted(by_kind.items())},
        "failed": {o.name: f"{o.what}: {o.detail}" for o in outcomes if o.verdict == "failed"},
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.reliability.fuzz_files",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("-o", "--out", type=Path, required=True, metavar="FOLDER", help="a line per file, summary")
    add("--cases", type=int, default=10_000, help="of all kinds together; default 10,000")
    add("--kinds", nargs="+", choices=TARGETS, default=tuple(TARGETS))
    add("--seed", type=int, default=0, help="of all cases; another one makes other files")
    return parser


if __name__ == "__main__":
    sys.exit(main())
