"""Bytes of first-use chunks against those of a dedup per micro-batch.

    python -m benchmarks.first_use --data ../shared/data -o first_use.json
    python -m benchmarks.first_use --streams zipf --batch-sizes 4096 --micro-batches 8

A batch that is cut into K micro-batches may send each micro-batch's own unique rows, and then a row
that several use travels several times. Here every unique row of the batch travels once, in the
chunk of the first micro-batch that uses it. Both are counted from the package's own requests: id,
row and gradient of each row that is at home on another rank, and headers; all tables have --dim
columns, float32. Hot rows, if any, are those that one step more looks up most, and their gradients
are summed once a step either way. Nothing is trained, so no ranks are started.

Sorting the samples of a batch makes micro-batches share less. The last columns give each stream the
one of its columns that saves most, found by trying all; first-use chunks need no order.

- criteo: real Criteo ids, 26 one-hot tables.
- alimama: categories and brands of the target and of the clicks before, and 13 profile fields.
- globo_clicks: one-hot clicks in time order. globo_sessions: the same with the user's clicks
  before, each beside an article that was not clicked.
- zipf: generated, 26 one-hot tables. A stream whose file is missing is left out, with the reason.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
from collections.abc import Sequence

from benchmarks.command import at_least, can_write, command_parser
from benchmarks.first_use.compare import Found, compare
from benchmarks.first_use.streams import STREAMS, read_stream
from torchrec_picasso.app.cli.outputs import write_result
from torchrec_picasso.app.launch.quiet import quiet_upstream
from torchrec_picasso.errors import PicassoError

_DATA = "../shared/data"
_HEAD = (
    f"{'stream':14} {'samples':>7} {'K':>3} {'hot rows':>8} {'lookups':>9} {'first use':>10} "
    f"{'per micro-batch':>16} {'ratio':>6} {'sorted':>7} ratio"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a line per stream, batch size and K.

    Returns:
        0; 2 where the options allow no answer.
    """
    args = _parser().parse_args(argv)
    quiet_upstream()
    if not can_write(args, "out"):
        return 2
    found: list[Found] = []
    left_out: list[str] = []
    print(f"MB that a rank sends in a step; tables of {args.dim} columns, {args.ranks} ranks")
    print(_HEAD)
    for stream in args.streams:
        found += _count(stream, args, left_out)
    for why in left_out:
        print(f"left out: {why}")
    if args.out:
        write_result(_document(args, found, left_out), args.out)
    return 0


def _count(stream: str, args: argparse.Namespace, left_out: list[str]) -> list[Found]:
    found: list[Found] = []
    try:
        samples = read_stream(stream, args.data)
    except PicassoError as error:
        left_out.append(f"{stream}: {error}")
        return found
    for batch_size, hot_rows in itertools.product(args.batch_sizes, args.hot_rows):
        try:
            for result in compare(
                stream,
                samples,
                batch_size=batch_size,
                micro_batches=args.micro_batches,
                dim=args.dim,
                hot_rows=hot_rows,
                world_size=args.ranks,
                num_steps=args.steps,
            ):
                print(_line(result), flush=True)
                found.append(result)
        except PicassoError as error:
            left_out.append(str(error))
    return found


def _line(result: Found) -> str:
    first, each, clustered = (
        number / 1e6
        for number in (result.first_use_bytes, result.per_micro_batch_bytes, result.clustered_bytes)
    )
    return (
        f"{result.stream:14} {result.batch_size:7,} {result.micro_batches:3} {result.hot_rows:8,}"
        f" {result.lookups:9,.0f} {first:10.2f} {each:16.2f} {result.ratio:6.2f}"
        f" {clustered:7.2f} {result.clustered_ratio:5.2f} ({result.clustered_by})"
    )


def _document(
    args: argparse.Namespace, found: Sequence[Found], left_out: Sequence[str]
) -> dict[str, object]:
    question = {name: value for name, value in vars(args).items() if name != "out"}
    return {
        "question": question,
        "found": [
            {
                **dataclasses.asdict(result),
                "ratio": round(result.ratio, 4),
                "clustered_ratio": round(result.clustered_ratio, 4),
            }
            for result in found
        ],
        "left_out": list(left_out),
    }


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("benchmarks.first_use", __doc__)
    add = parser.add_argument
    add("--data", default=_DATA, metavar="DIR", help=f"folder of the files (default: {_DATA})")
    add("--streams", nargs="+", choices=STREAMS, default=STREAMS, help="what is counted")
    add("-o", "--out", metavar="FILE", help="JSON to write")
    for name, many, default, what in (
        ("--batch-sizes", "+", (4096, 16384), "samples per rank and step"),
        ("--micro-batches", "+", (2, 4, 8, 16), "numbers of them, K"),
        ("--dim", None, 128, "columns of every table"),
        ("--ranks", None, 2, "ranks"),
        ("--steps", None, 2, "most steps to count"),
        ("--hot-rows", "+", (0,), "rows with replicas, over all tables"),
    ):
        least = 0 if name == "--hot-rows" else 1
        add(name, nargs=many, type=at_least(least), default=default, metavar="N", help=what)
    return parser


if __name__ == "__main__":
    sys.exit(main())
