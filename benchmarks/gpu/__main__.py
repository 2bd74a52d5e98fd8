"""Checks on one GPU: races between streams, cost of the exchange, hot rows over UVM.

    python -m benchmarks.gpu -o gpu.json
    python -m benchmarks.gpu --parts streams --repeats 100

Parts, each in a process of its own; one that fails says so, and the others still run:

- streams: the interleaved pipeline (1, 2, 4 micro-batches, with and without lookahead) against the
  plain loop of stock TorchRec, many times over with random delay kernels on its streams;
- overhead: hot/cold tables and stock table-wise ones on one rank, where nothing is exchanged: ms
  per step by CUDA events in alternating blocks, and host syncs per step;
- uvm: tables in host memory, hot rows in device memory against TorchRec's cache of as many rows.

Exit code 0, also where the machine lacks something, which is named, unless ``--require`` is given;
1 if a part failed or found a problem; 2 for bad options.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.command import add_numbers, command_parser
from benchmarks.gpu.overhead import overhead
from benchmarks.gpu.report import PartReport, describe_parts
from benchmarks.gpu.requirements import describe_machine, missing_piece
from benchmarks.gpu.settings import GpuSettings
from benchmarks.gpu.streams import streams
from benchmarks.gpu.uvm import uvm
from torchrec_picasso.app.launch.run_ranks import RankError, run_ranks

_TIMEOUT_S = 600.0
PARTS: dict[str, Callable[[int, int, GpuSettings], PartReport]] = {
    "streams": streams,
    "overhead": overhead,
    "uvm": uvm,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the check and prints its tables."""
    args = _parser().parse_args(argv)
    if args.out and not Path(args.out).absolute().parent.is_dir():
        print(f"error: {args.out}: there is no folder {Path(args.out).parent}", file=sys.stderr)
        return 2
    missing = missing_piece()
    if missing is not None:
        print(f"skipped: {missing}")
        return int(args.require)
    settings = GpuSettings(repeats=args.repeats, rounds=args.rounds)
    return run_parts(settings, args.parts.split(","), args.out)


def run_parts(settings: GpuSettings, parts: Sequence[str], out: str | None) -> int:
    """Runs parts one after the other, prints them and writes JSON.

    Returns:
        The exit code.
    """
    machine = describe_machine(settings.device)
    print(", ".join(f"{name} {value}" for name, value in machine.items()))
    reports = []
    for name in parts:
        print(f"running {name} ...", file=sys.stderr, flush=True)
        report = _run_part(name, settings)
        print(f"\n{describe_parts([report])}", flush=True)
        reports.append(report)
    if out:
        document = {
            "environment": machine,
            "settings": dataclasses.asdict(settings),
            "parts": {name: dataclasses.asdict(report) for name, report in zip(parts, reports)},
        }
        Path(out).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return int(any(report.problems for report in reports))


def _run_part(name: str, settings: GpuSettings) -> PartReport:
    try:
        return run_ranks(PARTS[name], 1, settings, timeout_s=_TIMEOUT_S)[0]
    except RankError as error:
        return PartReport(
            name=name, problems=[error.what], facts={"traceback": error.rank_traceback}
        )


def _parser() -> argparse.ArgumentParser:
    usual = GpuSettings()
    parser = command_parser("benchmarks.gpu", __doc__)
    add = parser.add_argument
    add("-o", "--out", metavar="FILE", help="JSON to write")
    add("--require", action="store_true", help="exit with 1 where nothing can be run")
    add("--parts", type=_parts, default=",".join(PARTS), metavar="A,B", help="parts to run")
    add_numbers(
        parser,
        ("--repeats", usual.repeats, 1, "runs of each pipeline in part streams"),
        ("--rounds", usual.rounds, 2, "turns of every variant on the clock"),
    )
    return parser


def _parts(text: str) -> str:
    unknown = [name for name in text.split(",") if name not in PARTS]
    if unknown:
        raise argparse.ArgumentTypeError(f"no part {unknown[0]!r}; there are {', '.join(PARTS)}")
    return text


if __name__ == "__main__":
    sys.exit(main())
