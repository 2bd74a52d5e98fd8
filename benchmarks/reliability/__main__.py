"""All questions of reliability, one after another, and a report of what was found.

    python -m benchmarks.reliability -o runs/reliability --data-folder ../shared/data
    python -m benchmarks.reliability -o runs/reliability --only checkpoint_moves

Every question keeps what it has in the folder, so a run that was cut off goes on there.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.reliability import checkpoint_moves, drift, fuzz_files, hostile_batches
from torchrec_picasso.launch.environment import describe_environment

__all__ = ["main"]


def _moves(folder: Path, data: str | None) -> int:
    return checkpoint_moves.main(["-o", str(folder)])


def _drift(folder: Path, data: str | None) -> int:
    if data is None:
        print("drift: passed over, it needs --data-folder", flush=True)
        return 0
    return drift.main(["-o", str(folder), "--data-folder", data])


def _hostile_batches(folder: Path, data: str | None) -> int:
    return hostile_batches.main(["-o", str(folder)])


def _fuzz_files(folder: Path, data: str | None) -> int:
    return fuzz_files.main(["-o", str(folder)])


_QUESTIONS: dict[str, Callable[[Path, str | None], int]] = {
    "checkpoint_moves": _moves,
    "drift": _drift,
    "hostile_batches": _hostile_batches,
    "fuzz_files": _fuzz_files,
}


def _found(folder: Path) -> dict[str, Any]:
    """What the questions have in the folder."""
    found: dict[str, Any] = {}
    if (folder / "summary.json").exists():
        moves = json.loads((folder / "summary.json").read_text())
        found["checkpoint_moves"] = {key: of for key, of in moves.items() if key != "environment"}
    for name in ("hostile_batches", "fuzz_files"):
        path = folder / f"{name}_summary.json"
        if path.exists():
            summary = json.loads(path.read_text())
            found[name] = {key: of for key, of in summary.items() if key != "environment"}
    for name in ("globo", "criteo"):
        path = folder / f"drift_{name}.json"
        if path.exists():
            of_stream = json.loads(path.read_text())
            shares = drift.moved_shares(of_stream)
            found[f"drift_{name}"] = {
                "steps": of_stream["num_steps"],
                "looks": len(shares),
                "moved_at_a_look": sum(shares) / len(shares),
                "loss_difference": of_stream["loss_difference"],
                **(drift.summary_of(of_stream) if len(of_stream["by_hour"]) > 1 else {}),
            }
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Asks, and writes ``report.json``.

    Returns:
        0; else what a question that failed returned.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reliability")
    parser.description, parser.formatter_class = __doc__, argparse.RawDescriptionHelpFormatter
    parser.add_argument("-o", "--out", required=True, metavar="FOLDER", help="results go there")
    parser.add_argument("--data-folder", metavar="FOLDER", help="real ids, for drift")
    parser.add_argument("--only", nargs="+", choices=_QUESTIONS, default=list(_QUESTIONS))
    args = parser.parse_args(argv)
    folder = Path(args.out)
    folder.mkdir(parents=True, exist_ok=True)
    status = 0
    for name in args.only:
        status = _QUESTIONS[name](folder, args.data_folder) or status
    document = {"environment": describe_environment(), **_found(folder)}
    (folder / "report.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(_found(folder), indent=1))
    return status


if __name__ == "__main__":
    sys.exit(main())
