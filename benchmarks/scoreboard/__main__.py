"""All models of the zoo against stock TorchRec in an emulated cluster: the scoreboard.

    python -m benchmarks.scoreboard -o scoreboard
    python -m benchmarks.scoreboard -o scoreboard --only din dien --rate-mbit 100
    python -m benchmarks.scoreboard -o scoreboard --data-folder ../shared/data

Each model, in its published sizes, and that of `benchmarks.fields` with each number of fields, is
trained by stock's two variants of `benchmarks.fields`, ``table_wise`` and ``planner``, under
TrainPipelineSparseDist, and by ``ours``: this package's defaults. They take turns. ``hstu_long``
(histories of up to 256, 256 columns) has every stock kind, under TrainPipelineBase, too;
``hstu_client`` has this package's tables under each driver.
Every model is a JSON file of its own in the folder; one that is there is not measured again, so a
run that was stopped goes on. So are the curves of the links and of a core's work, which are
measured first. The table shows all that are there, those that lose too, with the reason where it
is known:

- work: CPU time of a rank in our step, of all its threads: on one core no schedule is faster.
- wire, predicted: what the planner's cost model says of our step, by these curves and the dense
  part, measured before and after the turns; no schedule is faster than the wire.
- dense: the dense part's share of the work. exposed: part of our step in which the thread that
  trains waits.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.calibrated import calibrated_curves
from benchmarks.cluster import ClusterError, usable_rate
from benchmarks.command import command_parser
from benchmarks.fields.__main__ import answer
from benchmarks.fields.question import ZOO, Question
from benchmarks.fields.report import print_report
from benchmarks.pipelines.report import write_report
from benchmarks.scoreboard.board import print_board, read_line
from benchmarks.scoreboard.entries import ENTRIES, FIELDS, STOCK, train_config
from torchrec_picasso.app.launch.run_ranks import RankError
from torchrec_picasso.errors import PicassoError

_NAMES = [*ENTRIES, *FIELDS]


def question_of(name: str, args: argparse.Namespace) -> Question:
    """Settings of a model's comparison.

    Raises:
        PicassoError: If the data is not there, or links cannot have the rate.
    """
    asked = Question(
        rate_mbit=usable_rate(args.rate_mbit or None),
        rounds=args.rounds,
        block_steps=args.block_steps,
        seed=args.seed,
        dense=True,
        variants=(*STOCK, "ours"),
    )
    if name in FIELDS:
        num_fields, batch_size = FIELDS[name]
        return replace(asked, fields=num_fields, batch_size=batch_size)
    config = train_config(name, args.data_folder, args.seed)
    return replace(
        asked,
        model=ZOO,
        zoo=config,
        batch_size=config.data.batch_size,
        max_rows=config.data.max_rows,
        variants=(*ENTRIES[name].stock, *ENTRIES[name].ours),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Measures what is not there yet, and shows all.

    Returns:
        0; 2 where the options allow no answer.
    """
    args = _parser().parse_args(argv)
    folder = Path(args.out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for place, name in enumerate(args.only):
            path = folder / f"{name}.json"
            if path.exists():
                print(f"{name}: {path} is there", flush=True)
                continue
            print(f"{name}: {place + 1} of {len(args.only)}", flush=True)
            question = question_of(name, args)
            curves_file = folder / "curves.json"
            curves = calibrated_curves(curves_file, question.hosts, question.rate_mbit)
            report = answer(question, curves)
            print_report(report)
            write_report(report, path)
    except (PicassoError, RankError, ClusterError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    lines = [
        read_line(name, folder / f"{name}.json")
        for name in _NAMES
        if (folder / f"{name}.json").exists()
    ]
    print_board(lines)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("benchmarks.scoreboard", __doc__)
    add = parser.add_argument
    add("-o", "--out", required=True, metavar="FOLDER", help="a JSON file per model goes there")
    names = ", ".join(_NAMES)
    add("--only", nargs="+", metavar="MODEL", choices=_NAMES, default=_NAMES, help=names)
    add("--rate-mbit", type=float, default=1000.0, help="0 = loopback (default: 1000)")
    add("--data-folder", metavar="FOLDER", help="real samples (default: generated ones)")
    add("--rounds", type=int, default=3, metavar="N", help="turns of each (default: 3)")
    add("--block-steps", type=int, default=6, metavar="N", help="timed steps of one (default: 6)")
    add("--seed", type=int, default=0, metavar="N", help="draws everything (default: 0)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
