"""Plans and train pipelines on generated fields, sequences of clicks, or columns of a log.

    python -m benchmarks.fields --rate-mbit 1000 -o fields.json
    python -m benchmarks.fields --rate-mbit 0 --fields 200

Fields: a seed draws them, 1,000 to --max-rows rows (log-uniform), --dim / 8 to --dim columns, ids
of Zipf exponent 0.4 to 1.3, 1 to 8 ids per sample, summed or (one field in three) averaged. One
thin over-arch reads them all. Each table does little, so what counts is what a step costs beside
its rows: operators, collectives, Python.

Sequences: a DIN-like model reads clicks with the history before them, by an EmbeddingCollection
of --dim columns beside pooled profiles of 16. They come from Alimama's rows, drawn again for each
batch, from Globo's clicks in time order, each beside an article that was not clicked, or are
generated; the columns of --data tell which:

    python -m benchmarks.fields --model sequences --data ../shared/data/alimama_10k.parquet \
        --batch-size 4096 -o sequences.json

Columns: a log is trained on in time order, one table of --dim columns for each column of ids:
Criteo's, Globo's clicks, or 26 uniform ones:

    python -m benchmarks.fields --model columns --data ../shared/data/criteo_tb_80k.parquet

Variants train from equal weights on the same batches, and take turns in blocks of steps, each
round begun by the next, so whatever else the machine does hits all of them:

- table_wise: whole tables, the largest first, each to the rank with the fewest bytes; and planner:
  TorchRec's own; each under TrainPipelineSparseDist.
- row_wise, column_wise: every table in a part per rank. table_wise_loop, row_wise_loop,
  column_wise_loop: the same under TrainPipelineBase.
- table_wise_again: table_wise once more, which shows noise; nothing is compared with it.
- table_wise_ours: the plan of table_wise under InterleavedTrainPipeline, which then has nothing to
  interleave.
- ours: what a user gets by default. Curves are measured on these links, hot rows are chosen from
  held-out batches, InterleavedTrainPipeline chooses its settings before the clock starts.
- ours_plain: the same plan under TrainPipelineSparseDist; ours_loop: under TrainPipelineBase.
- all_rows: every table hot/cold without hot rows, interleaved; all_rows_plain: the same plan, not
  interleaved; all_bags: every table of a pooled collection as bags, at the homes of table_wise.
- rows:K, rows:K:HOT_ROWS and bags:K: the same plans in K fixed micro-batches.

The cost model's prediction stands beside each measured step, for plans made by hand, too; with
--local-costs and --dense it knows all that calibration can tell. Plans are made by what is measured
before the turns; predictions are the mean of that and of the same measured after them, as the pace
of a machine changes.

Numbers are defined as in `python -m benchmarks.pipelines`; calls are the collectives of a step.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.cluster import ClusterError, run_on_hosts, usable_rate
from benchmarks.command import at_least, command_parser
from benchmarks.fields.compare import RankAnswer, compare_on_rank, make_workload
from benchmarks.fields.predicted import errors_of
from benchmarks.fields.question import MODELS, Question
from benchmarks.fields.report import Report, print_report
from benchmarks.fields.variants import VARIANTS, named
from benchmarks.pipelines.rankings import rankings
from benchmarks.pipelines.report import write_report
from torchrec_picasso import CommCurves
from torchrec_picasso.app.cli.outputs import check_outputs
from torchrec_picasso.app.launch.run_ranks import RankError
from torchrec_picasso.app.zoo.data.field_specs import LEAST_ROWS
from torchrec_picasso.errors import PicassoError

_TIMEOUT_S = 3600.0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one comparison.

    Returns:
        0; 2 where the options allow no answer.
    """
    args = _parser().parse_args(argv)
    try:
        check_outputs(args, "out")
        question = _question(args)
        named(question.variants)
        curves = CommCurves.from_json(args.curves) if args.curves else None
        report = answer(question, curves)
    except (PicassoError, RankError, ClusterError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print_report(report)
    if args.out:
        write_report(report, args.out)
    return 0


def answer(question: Question, curves: CommCurves | None = None) -> Report:
    """Measures all variants of a question.

    Raises:
        RankError: If a rank fails.
        ClusterError: If the links cannot be made.
    """
    answers: list[RankAnswer] = run_on_hosts(
        compare_on_rank,
        question.hosts,
        question.rate_mbit,
        *(question, curves),
        timeout_s=_TIMEOUT_S,
    )
    workload = make_workload(question)
    found = rankings([answer.results for answer in answers], question.batch_size, 1)
    return Report(
        question=question,
        trained=workload.in_words(),
        tables=workload.tables,
        variants=found,
        says=answers[0].says,
        chose=answers[0].chose,
        predicted=answers[0].predicted,
        errors=errors_of(answers[0].predicted, found, answers[0].dense_bytes),
        dense_ms=answers[0].dense_ms,
    )


def _question(args: argparse.Namespace) -> Question:
    names = {field.name for field in dataclasses.fields(Question)}
    asked: dict[str, Any] = {name: value for name, value in vars(args).items() if name in names}
    asked["variants"] = tuple(args.variants.split(","))
    return Question(**asked | {"rate_mbit": usable_rate(args.rate_mbit or None)})


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("benchmarks.fields", __doc__)
    add, default = parser.add_argument, Question()
    add("--rate-mbit", type=float, default=default.rate_mbit, help="0 = loopback (default: 1000)")
    names = ",".join(default.variants)
    add(
        "--variants",
        default=names,
        help=f"of {', '.join(VARIANTS)}, rows:K:HOT, bags:K (default: {names})",
    )
    add("--model", choices=MODELS, default=default.model, help="what is trained")
    add(
        "--data",
        type=os.path.relpath,
        metavar="FILE",
        help="Parquet, of columns or of clicks for sequences; or uniform",
    )
    add("--local-costs", action="store_true", help="measure the planner's local costs, too")
    add("--dense", action="store_true", help="measure the model's dense part, too")
    add("--curves", metavar="FILE", help="measured curves to use (default: measure)")
    add("-o", "--out", metavar="FILE", help="JSON to write")
    for name, least, what in (
        ("--fields", 1, "fields, each with its table"),
        ("--dim", 4, "columns of tables of a log or of sequences, and of the widest fields"),
        ("--batch-size", 1, "samples per rank and step"),
        ("--hosts", 2, "hosts, one rank on each"),
        ("--rounds", 1, "turns of every variant"),
        ("--block-steps", 2, "timed steps of a turn"),
        ("--seed", 0, "draws everything"),
        ("--max-rows", LEAST_ROWS, "most rows of a table"),
        ("--heldout-steps", 1, "global batches to choose hot rows from"),
    ):
        own = getattr(default, name.removeprefix("--").replace("-", "_"))
        what = f"{what} (default: {own})"
        add(name, type=at_least(least), default=own, help=what, metavar="N")
    return parser


if __name__ == "__main__":
    sys.exit(main())
