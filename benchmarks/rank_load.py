"""Load of the busiest home rank: stock row-wise, and homes as the planner cuts them.

    python -m benchmarks.rank_load --data ../shared/data -o rank_load.json
    python -m benchmarks.rank_load --streams zipf_1.1 --ranks 4

The planner counts the first half of a stream; the batches of every rank are drawn from the second
half. Nothing is trained, so no ranks are started. Counted are, by home rank,

- lookups: what stock row-wise sharding, equal blocks, serves: each lookup of each rank;
- distinct, equal: the distinct rows of each rank's batch, with equal blocks;
- distinct, cut: the same with the planner's blocks, without replicas;
- stored: rows of the planner's blocks.

Each figure is the busiest rank's load over the mean of ranks, of the sum of all steps; `a step`
is the mean of single steps. `zipf_S` has one table of 1,000,000 rows, id 0 the most frequent one,
exponent S; other streams are those of `benchmarks.first_use`, each also `by frequency`: ids of each
column renumbered by descending frequency, as vocabularies are often made.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from benchmarks.command import at_least, can_write, command_parser
from benchmarks.first_use.streams import STREAMS, read_stream
from torchrec_picasso.app.cli.outputs import write_result
from torchrec_picasso.app.launch.quiet import quiet_upstream
from torchrec_picasso.cost import CommCurves
from torchrec_picasso.cost.stock import over_mean
from torchrec_picasso.cost.table_work import TableLoad
from torchrec_picasso.errors import PicassoError
from torchrec_picasso.frequency import FrequencyStats, ModelTable
from torchrec_picasso.frequency.counts import LookupCounter
from torchrec_picasso.planner.choice import TableInfo
from torchrec_picasso.planner.decision import Decision, decide
from torchrec_picasso.planner.home_blocks import even_blocks

_DATA = "../shared/data"
_ZIPF = ("zipf_0.8", "zipf_1.1", "zipf_1.4")
_ZIPF_ROWS, _ZIPF_SAMPLES = 1_000_000, 400_000
_DIM = 128
_HEAD = (
    f"{'stream':22} {'ranks':>5} {'lookups':>8} {'distinct, equal':>16} {'distinct, cut':>14} "
    f"{'a step':>7} {'stored':>7}  busiest table of stock"
)

Columns = Mapping[str, NDArray[np.int64]]
"""Ids by table, one line per sample, shape ``(n, ids)``; -1 = no id."""


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a line per stream and number of ranks.

    Returns:
        0; 2 where the options allow no answer.
    """
    args = _parser().parse_args(argv)
    quiet_upstream()
    if not can_write(args, "out"):
        return 2
    found: list[dict[str, object]] = []
    left_out: list[str] = []
    print(f"Busiest rank over mean; {args.batch_size:,} samples a rank\n{_HEAD}")
    for stream in args.streams:
        try:
            given = read_columns(stream, args.data)
        except PicassoError as error:
            left_out.append(f"{stream}: {error}")
            continue
        variants = {stream: given}
        if not stream.startswith("zipf_"):
            variants[f"{stream}, by frequency"] = {
                name: by_frequency(ids, len(ids) // 2) for name, ids in given.items()
            }
        for (name, columns), world_size in itertools.product(variants.items(), args.ranks):
            line = measure(columns, args.batch_size, world_size)
            print(_line(name, world_size, line), flush=True)
            found.append({"stream": name, "ranks": world_size, **line})
    for why in left_out:
        print(f"left out: {why}")
    if args.out:
        question = {name: value for name, value in vars(args).items() if name != "out"}
        write_result({"question": question, "found": found, "left_out": left_out}, args.out)
    return 0


def read_columns(stream: str, folder: str) -> Columns:
    """Reads or generates the ids of a stream.

    Raises:
        PicassoError: If the file is missing or malformed.
    """
    if stream.startswith("zipf_"):
        chance = np.arange(1.0, _ZIPF_ROWS + 1) ** -float(stream.removeprefix("zipf_"))
        drawn = np.random.default_rng(0).random(_ZIPF_SAMPLES)
        ids = np.searchsorted(np.cumsum(chance / chance.sum()), drawn)
        return {"item": ids.clip(max=_ZIPF_ROWS - 1)[:, None]}
    clicks = read_stream(stream, folder)
    columns = {name: ids.reshape(len(clicks), -1) for name, ids in clicks.profiles.items()}
    for name, ids in clicks.targets.items():
        history = clicks.histories[name]
        lengths = history.ends_n - history.starts_n
        padded = np.full((len(clicks), int(lengths.max(initial=0))), -1, dtype=np.int64)
        taken = np.arange(padded.shape[1]) < lengths[:, None]
        padded[taken] = history.values[
            (history.starts_n[:, None] + np.arange(padded.shape[1]))[taken]
        ]
        columns[name] = np.concatenate([ids.reshape(len(clicks), -1), padded], axis=1)
    return columns


def by_frequency(ids: NDArray[np.int64], half: int) -> NDArray[np.int64]:
    """Renumbers the ids of a column by descending frequency in the first ``half`` samples; -1
    stays."""
    is_id = ids >= 0
    present, place = np.unique(ids, return_inverse=True)
    place = place.reshape(ids.shape)
    counts = np.bincount(place[:half].ravel(), minlength=present.size)
    counts[present < 0] = 0
    order = np.argsort(-counts, kind="stable")
    order = order[present[order] >= 0]
    rank_of = np.full(present.size, -1, dtype=np.int64)
    rank_of[order] = np.arange(order.size)
    return np.where(is_id, rank_of[place], -1)


def measure(columns: Columns, batch_size: int, world_size: int) -> dict[str, object]:
    """Counts the load of every home rank in the second half of a stream."""
    num_samples = len(next(iter(columns.values())))
    half, rng = num_samples // 2, np.random.default_rng(0)
    num_rows = {name: int(ids.max()) + 1 for name, ids in columns.items()}
    decision = plan(
        {name: ids[:half] for name, ids in columns.items()}, num_rows, batch_size, world_size
    )
    cut_ends = [np.cumsum(decision.block_rows[t]) for t in range(len(columns))]
    even_ends = [np.cumsum(even_blocks(rows, world_size)) for rows in num_rows.values()]
    num_steps = max(1, (num_samples - half) // (batch_size * world_size))
    lookups_TW = np.zeros((len(columns), world_size))
    equal_W, cut_SW = np.zeros(world_size), np.zeros((num_steps, world_size))
    for step in range(num_steps):
        for _ in range(world_size):
            samples = half + rng.integers(num_samples - half, size=batch_size)
            for t, ids in enumerate(columns.values()):
                drawn = ids[samples]
                drawn = drawn[drawn >= 0]
                distinct = np.unique(drawn)
                lookups_TW[t] += _by_home(drawn, even_ends[t])
                equal_W += _by_home(distinct, even_ends[t])
                cut_SW[step] += _by_home(distinct, cut_ends[t])
    by_table = {name: over_mean(loads) for name, loads in zip(columns, lookups_TW)}
    busiest = max(by_table, key=by_table.__getitem__)
    stored_W = np.sum([np.diff(ends, prepend=0) for ends in cut_ends], axis=0)
    return {
        "lookups": over_mean(lookups_TW.sum(0)),
        "distinct_equal": over_mean(equal_W),
        "distinct_cut": over_mean(cut_SW.sum(0)),
        "distinct_cut_step": float(np.mean([over_mean(loads) for loads in cut_SW])),
        "stored": over_mean(stored_W),
        "busiest_table": busiest,
        "busiest_table_lookups": by_table[busiest],
    }


def plan(
    counted: Columns, num_rows: Mapping[str, int], batch_size: int, world_size: int
) -> Decision:
    """Makes the planner's decision from the counts of some samples; all tables row-exchanged."""
    tables, infos = {}, []
    for name, ids in counted.items():
        counter = LookupCounter(
            ModelTable(name=name, num_embeddings=num_rows[name], feature_names=(name,))
        )
        for chunk in np.array_split(ids, 32):  # in the order of time
            counter.add(chunk[chunk >= 0])
        tables[name] = counter.result()
        lookups = batch_size * float((ids >= 0).sum()) / len(ids)
        load = TableLoad(
            name=name,
            num_embeddings=num_rows[name],
            dim=_DIM,
            lookups=lookups,
            bags=lookups,
            spectrum=tables[name].spectrum,
        )
        infos.append(TableInfo(load=load))
    stats = FrequencyStats(tables=tables, num_samples=len(next(iter(counted.values()))))
    curves = CommCurves.assumed(world_size, gbytes_per_s=0.1)
    return decide(infos, stats, curves, world_size=world_size, batch_size=batch_size, hot_rows=0)


def _by_home(ids: NDArray[np.int64], ends_W: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.bincount(np.searchsorted(ends_W, ids, side="right"), minlength=ends_W.size)


def _line(name: str, world_size: int, line: Mapping[str, object]) -> str:
    return (
        f"{name:22} {world_size:5} {line['lookups']:8.2f} {line['distinct_equal']:16.2f} "
        f"{line['distinct_cut']:14.3f} {line['distinct_cut_step']:7.3f} {line['stored']:7.2f}  "
        f"{line['busiest_table_lookups']:.2f} {line['busiest_table']}"
    )


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("benchmarks.rank_load", __doc__)
    add = parser.add_argument
    add("--data", default=_DATA, metavar="DIR", help=f"folder of the files (default: {_DATA})")
    streams = (*_ZIPF, *STREAMS)
    add("--streams", nargs="+", default=streams, metavar="NAME", help="what is counted")
    add("-o", "--out", metavar="FILE", help="JSON to write")
    add("--batch-size", type=at_least(1), default=4096, metavar="N", help="samples per rank")
    add("--ranks", nargs="+", type=at_least(2), default=(2, 4, 8), metavar="N", help="ranks")
    return parser


if __name__ == "__main__":
    sys.exit(main())
