"""Train pipelines and placements against each other, on hosts with links of a real network's rate.

    python -m benchmarks.pipelines --data ../shared/data/criteo_tb_80k.parquet \\
        --rate-mbit 1000 --towers thin -o out.json --plot out.png
    python -m benchmarks.pipelines --data ../shared/data/criteo_tb_80k.parquet \\
        --scenarios -o runs/pipelines

A DLRM trains under each variant from the same weights on the same batches. The stock variants
are probed alone first, since not all models fit into memory together; the fastest that trains the
same model meets ours. Variants take turns in blocks of steps, in alternating order, so whatever
else the machine does hits all of them.

Variants: table_wise, row_wise, column_wise and planner (TorchRec's own), each under
TrainPipelineSparseDist; fused, the best of them under TrainPipelineFusedSparseDist where that runs;
hot_cold (the planner's choice by measured curves) and hot_cold:HOT_ROWS under
TrainPipelineSparseDist; interleaved, the planner's choice under InterleavedTrainPipeline, which
chooses micro-batches and lookahead; interleaved:K and interleaved:K:HOT_ROWS with K micro-batches,
interleaved:auto:HOT_ROWS with its own choice of them, and interleaved_no_lookahead
in the same forms.

--scenarios runs the comparisons with a target one after another (--only NAME some of them) and
sums them up; -o is a folder then. What is there already is not run again, unless --again. Sizes,
--rounds, --block-steps and --variants given beside it replace the scenarios' own; the target is
not judged where sizes are replaced.

What is reported:

- A step lasts as long as on its slowest rank, each timing its own progress(). Samples per second
  are of all ranks, by the median block.
- CPU seconds are of all ranks with all their threads.
- Link bytes are what the busiest host's link carried in one direction, headers included; metered
  bytes are what ranks handed to collectives, mean over ranks.
- The exposed share is 1 - (CPU time of the thread that trains / wall time) over all timed steps:
  the thread waits for the wire, for a slower rank, or for its core.
- Peak MB is the most memory that a variant added to a rank's process, from before its model was
  made until its bytes were counted: tables, state, buffers and steps.
- K and ahead are the micro-batches and the lookahead that an interleaved pipeline used.
- Floors of a step: the best of ours cannot be faster than its bytes at the link's rate, and hardly
  faster than hot_cold:0 on one rank with the same batch per rank, which sends nothing and has the
  machine to itself.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.cluster import ClusterError, usable_rate
from benchmarks.pipelines.answer import answer, check_question, without_missing
from benchmarks.pipelines.picture import draw_report
from benchmarks.pipelines.question import GENERATED, TOWERS, VARIANTS, Question
from benchmarks.pipelines.report import print_report, write_report
from benchmarks.pipelines.scenarios import SCENARIOS
from benchmarks.pipelines.suite import run_scenarios
from torchrec_picasso.app.cli.outputs import check_outputs
from torchrec_picasso.app.launch.run_ranks import RankError
from torchrec_picasso.errors import ConfigError, PicassoError

_SCENARIO_FLAGS = ("only", "again")
_OWN_TO_SCENARIOS = ("rate_mbit", "towers", "curves", "plot")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one question, or scenarios, and prints the answer.

    Returns:
        0; 1 if a scenario did not run; 2 where the options allow no answer.
    """
    args = _parser().parse_args(argv)
    try:
        if not args.scenarios:
            return _run_one(args)
        _check_scenario_options(args)
        return run_scenarios(Path(args.out), args.data, _asked(args), args.only, args.again)
    except (PicassoError, RankError, ClusterError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _run_one(args: argparse.Namespace) -> int:
    for flag in _SCENARIO_FLAGS:
        if getattr(args, flag):
            raise ConfigError(f"--{flag} is of --scenarios, which was not given")
    check_outputs(args, "out", "plot", "curves")
    question, left_out = without_missing(Question(data=args.data, **_asked(args)))
    question = dataclasses.replace(question, rate_mbit=usable_rate(question.rate_mbit))
    check_question(question, args.curves)
    report = answer(question, left_out, args.curves)
    print_report(report)
    if args.out:
        write_report(report, args.out)
    if args.plot:
        draw_report(report, args.plot)
    return 0


def _check_scenario_options(args: argparse.Namespace) -> None:
    for flag in _OWN_TO_SCENARIOS:
        if getattr(args, flag, None) is not None:
            name = flag.replace("_", "-")
            raise ConfigError(f"--{name} with --scenarios: each scenario has its own; leave it out")
    if not args.out:
        raise ConfigError("--scenarios: name the folder for the answers with -o")
    if Path(args.out).exists() and not Path(args.out).is_dir():
        raise ConfigError(f"-o {args.out} with --scenarios: expected a folder, found a file")


def _asked(args: argparse.Namespace) -> dict[str, Any]:
    """Those arguments of :class:`Question` that the command line gives."""
    fields = {field.name for field in dataclasses.fields(Question)} - {"data"}
    asked = {name: value for name, value in vars(args).items() if name in fields}
    if "rate_mbit" in asked:
        asked["rate_mbit"] = asked["rate_mbit"] or None
    if "variants" in asked:
        asked["variants"] = tuple(asked["variants"].split(","))
    return asked


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pipelines", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    own = argparse.SUPPRESS  # not given = the question's or the scenario's own
    names = [scenario.name for scenario in SCENARIOS]
    add(
        "--data",
        type=os.path.relpath,
        required=True,
        help=f"Criteo file, or one of {', '.join(GENERATED)} to generate",
    )
    add("--rate-mbit", type=float, default=own, help="of each link; 0 = loopback (default: 1000)")
    add("--towers", choices=tuple(TOWERS), default=own, help="(default: thin)")
    add("--variants", default=own, metavar="A,B,...", help=f"(default: {','.join(VARIANTS)})")
    add("--curves", metavar="FILE", help="measured curves, written if missing")
    add("-o", "--out", metavar="FILE", help="JSON to write; with --scenarios, the folder")
    add("--plot", metavar="FILE", help="picture to write")
    add("--scenarios", action="store_true", help="run the comparisons that have a target")
    add("--only", choices=names, action="append", default=[], help="run this scenario; repeatable")
    add("--again", action="store_true", help="run scenarios that the folder holds already, too")
    for name, least, what in (
        ("--hosts", 1, "hosts"),
        ("--ranks-per-host", 1, "ranks that share a host's link"),
        ("--batch-size", 1, "samples per rank and step"),
        ("--dim", 4, "columns of every table"),
        ("--max-rows", 1, "cap on a table's rows"),
        ("--heldout-steps", 1, "global batches to choose hot rows from"),
        ("--rounds", 1, "turns of every variant"),
        ("--block-steps", 2, "timed steps of a turn"),
    ):
        default = getattr(Question(data=""), name.removeprefix("--").replace("-", "_"))
        what = f"{what} (default: {default})"
        add(name, type=partial(_at_least, least), default=own, help=what, metavar="N")
    return parser


def _at_least(least: int, text: str) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least} on")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
