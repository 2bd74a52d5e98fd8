"""Train pipelines and placements against each other, on hosts with links of a real network's rate.

    python -m benchmarks.pipelines --data ../shared/data/criteo_tb_80k.parquet \\
        --rate-mbit 1000 --towers thin -o out.json
    python -m benchmarks.pipelines --data ../shared/data/criteo_tb_80k.parquet \\
        --scenario 1gbit_uniform -o out.json

A DLRM trains under each variant from the same weights on the same batches. The stock variants
are probed alone first, since not all models fit into memory together; the fastest that trains the
same model meets ours. Variants take turns in blocks of steps, each round begun by the next, so
whatever else the machine does hits all of them.

Variants: table_wise, row_wise, column_wise and planner (TorchRec's own), each under
TrainPipelineSparseDist; fused, the best of them under TrainPipelineFusedSparseDist where that runs;
hot_cold (the planner's choice by measured curves) and hot_cold:HOT_ROWS under
TrainPipelineSparseDist; interleaved, the planner's choice under InterleavedTrainPipeline, which
chooses micro-batches and lookahead; interleaved:K and interleaved:K:HOT_ROWS with K micro-batches,
interleaved:auto:HOT_ROWS with its own choice of them, and interleaved_no_lookahead
in the same forms. +rows and +node_rows send the rows of its plan flat or by host.

--scenario NAME asks what was published under that name; options beside it replace its own.

Reported figures:

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
from typing import Any

from benchmarks.cluster import ClusterError, usable_rate
from benchmarks.command import at_least, command_parser
from benchmarks.pipelines.answer import answer, check_question
from benchmarks.pipelines.question import GENERATED, SCENARIOS, TOWERS, VARIANTS, Question
from benchmarks.pipelines.report import print_report, write_report
from torchrec_picasso.app.cli.outputs import check_outputs
from torchrec_picasso.app.launch.run_ranks import RankError
from torchrec_picasso.errors import PicassoError


def main(argv: Sequence[str] | None = None) -> int:
    """Answers one question.

    Returns:
        0; 2 where the options allow no answer.
    """
    args = _parser().parse_args(argv)
    try:
        check_outputs(args, "out", "curves")
        question = _question(args)
        check_question(question, args.curves)
        report = answer(question, args.curves)
    except (PicassoError, RankError, ClusterError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print_report(report)
    if args.out:
        write_report(report, args.out)
    return 0


def _question(args: argparse.Namespace) -> Question:
    names = {field.name for field in dataclasses.fields(Question)}
    given: dict[str, Any] = {name: value for name, value in vars(args).items() if name in names}
    if "variants" in given:
        given["variants"] = tuple(given["variants"].split(","))
    # a scenario that generates its ids reads no file
    asked = given | {"data": SCENARIOS.get(args.scenario, {}).get("data", args.data)}
    question = Question(**SCENARIOS.get(args.scenario, {}) | asked)
    return dataclasses.replace(question, rate_mbit=usable_rate(question.rate_mbit or None))


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("benchmarks.pipelines", __doc__)
    add = parser.add_argument
    own = argparse.SUPPRESS  # not given = the question's or the scenario's own
    add(
        "--data",
        type=os.path.relpath,
        required=True,
        help=f"Criteo file, or one of {', '.join(GENERATED)} to generate",
    )
    add("--scenario", choices=SCENARIOS, help="a published comparison")
    add("--rate-mbit", type=float, default=own, help="of each link; 0 = loopback (default: 1000)")
    add("--towers", choices=tuple(TOWERS), default=own, help="(default: thin)")
    add("--variants", default=own, metavar="A,B,...", help=f"(default: {','.join(VARIANTS)})")
    add("--curves", metavar="FILE", help="measured curves, written if missing")
    add("-o", "--out", metavar="FILE", help="JSON to write")
    for name, least, what in (
        ("hosts", 1, "hosts"),
        ("ranks-per-host", 1, "ranks that share a host's link"),
        ("batch-size", 1, "samples per rank and step"),
        ("dim", 4, "columns of every table"),
        ("max-rows", 1, "cap on a table's rows"),
        ("heldout-steps", 1, "global batches to choose hot rows from"),
        ("rounds", 1, "turns of every variant"),
        ("block-steps", 2, "timed steps of a turn"),
    ):
        what = f"{what} (default: {getattr(Question, name.replace('-', '_'))})"
        add(f"--{name}", type=at_least(least), default=own, help=what, metavar="N")
    return parser


if __name__ == "__main__":
    sys.exit(main())
