"""The planner's own choice against a brute-force sweep over hot-set sizes, and against stock plans.

    python -m benchmarks.planner_choice --data criteo ../shared/data/criteo_tb_80k.parquet
    python -m benchmarks.planner_choice --data globo ../shared/data/globo_clicks_8days.parquet
    python -m benchmarks.planner_choice --data uniform

The ranks calibrate (or read ``--curves``, where a first run wrote them), the planner chooses from
statistics of the first part of the data, and then the choice, every size of the sweep and the stock
plans take turns on the part that follows. Times are of the embedding part of a step: what the
choice changes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
import torch.distributed as dist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from benchmarks.cluster import run_on_hosts, usable_rate
from torchrec_picasso.cli.calibrate import calibrate_on_rank
from torchrec_picasso.cost import CommCurves
from torchrec_picasso.frequency import FrequencyStats
from torchrec_picasso.launch.environment import describe_environment
from torchrec_picasso.launch.quiet import quiet_upstream
from torchrec_picasso.placement import HotColdParams
from torchrec_picasso.runs.exchange_step import ExchangeStep, bag_collection, one_hot_batch
from torchrec_picasso.runs.placements import Placement, make_placement

_SIZES = (0, 250, 1_000, 4_000, 16_000, 64_000)
_STOCK = ("table_wise", "row_wise")
_TIMEOUT_S = 3000.0
_GLOBO_COLUMNS = (
    *("article", "user", "session", "environment"),
    *("device", "os", "country", "region", "referrer"),
)


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is measured.

    Args:
        data: ``"criteo"``, ``"globo"`` or ``"uniform"``.
        path: Its file.
        world_size: Ranks.
        batch_size: Samples per rank and step.
        dim: Columns of every table.
        max_rows: Cap on a table's rows; ids wrap around.
        curves: File of measured curves; ``None`` = measure.
        rounds: Turns of every contestant; a turn is one warm and two timed steps.
    """

    data: str
    path: str | None
    world_size: int
    batch_size: int
    dim: int
    max_rows: int
    rounds: int
    curves: str | None


class Samples:
    """Row ids of all samples in time order: the first half to count, the second to measure."""

    def __init__(self, question: Question) -> None:
        if question.data == "uniform":
            rng = np.random.default_rng(0)
            ids_TN = rng.integers(question.max_rows, size=(26, 40 * question.batch_size))
        else:
            assert question.path is not None
            columns = [f"c{i}" for i in range(1, 27)]
            if question.data == "globo":
                columns = list(_GLOBO_COLUMNS)
            table = pq.read_table(question.path, columns=columns)
            ids_TN = np.stack(
                [np.asarray(table.column(name).fill_null(-1), dtype=np.int64) for name in columns]
            )
        self.rows_T = [min(question.max_rows, int(ids.max()) + 1) for ids in ids_TN]
        self._ids_TN = np.mod(ids_TN, np.array(self.rows_T)[:, None])
        self._half = self._ids_TN.shape[1] // 2
        self._size = question.batch_size

    def counted(self) -> Iterator[KeyedJaggedTensor]:
        """Batches of the first half, all ranks'; at most the 40 before the second half."""
        starts = range(self._half - self._size, -1, -self._size)
        return (self._batch(start) for start in list(starts)[:40])

    def measured(self, rank: int, world_size: int) -> Iterator[KeyedJaggedTensor]:
        """Endless batches of one rank from the second half, in order, again and again."""
        steps = (self._ids_TN.shape[1] - self._half) // (self._size * world_size)
        for step in itertools.cycle(range(steps)):
            yield self._batch(self._half + (step * world_size + rank) * self._size)

    def _batch(self, start: int) -> KeyedJaggedTensor:
        return one_hot_batch(torch.from_numpy(self._ids_TN[:, start : start + self._size].copy()))


def compare(rank: int, world_size: int, question: Question) -> dict[str, Any]:
    """Calibrates, plans and measures. Collective: the main function of every rank."""
    quiet_upstream()
    pg = dist.group.WORLD
    assert pg is not None
    if question.curves is not None and Path(question.curves).is_file():
        curves = CommCurves.from_json(question.curves)
    else:
        curves = calibrate_on_rank(rank, world_size, 64 << 20, 0.3, True)
        if question.curves is not None and rank == 0:
            curves.to_json(question.curves)
    samples = Samples(question)
    rows_T, dims_T = samples.rows_T, [question.dim] * len(samples.rows_T)
    stats = FrequencyStats.collect(samples.counted(), bag_collection(rows_T, dims_T))
    contestants: dict[str, ExchangeStep] = {}
    chosen: dict[str, Any] = {}
    asked: dict[str, tuple[str, int | None]] = {
        **{name: (name, 0) for name in _STOCK},
        **{f"{size} hot": ("hot_cold", size) for size in _SIZES if size <= sum(rows_T)},
        "planner": ("hot_cold", None),
    }
    for label, (name, hot_rows) in asked.items():
        collection = bag_collection(rows_T, dims_T)
        placement = make_placement(
            name,
            collection,
            pg,
            device_type="cpu",
            batch_size=question.batch_size,
            hot_rows=hot_rows,
            stats=stats,
            curves=curves,
        )
        if label == "planner":
            chosen = _describe(placement)
        contestants[label] = ExchangeStep(collection, placement, pg)
    streams = {label: samples.measured(rank, world_size) for label in contestants}
    times: dict[str, list[float]] = {label: [] for label in contestants}
    for turn in range(question.rounds):
        labels = list(contestants)
        for label in labels if turn % 2 == 0 else labels[::-1]:
            for step in range(3):
                batch = next(streams[label])
                dist.barrier()
                taken = torch.tensor(contestants[label].run(batch).total_ms)
                dist.all_reduce(taken, dist.ReduceOp.MAX)
                if step and turn:
                    times[label].append(float(taken))
    return {
        "ms": {label: median(of) for label, of in times.items()},
        "quartiles_ms": {label: quantiles(of, n=4) for label, of in times.items()},
        "chosen": chosen,
    }


def _describe(placement: Placement) -> dict[str, Any]:
    kinds: dict[str, int] = {}
    hot = 0
    for module_plan in placement.plan.plan.values():
        for sharding in module_plan.values():  # type: ignore[attr-defined]
            is_ours = isinstance(sharding.cache_params, HotColdParams)
            kind = "hot_cold" if is_ours else sharding.sharding_type
            kinds[kind] = kinds.get(kind, 0) + 1
            hot += sharding.cache_params.num_hot_rows if is_ours else 0
    return {"tables": kinds, "hot_rows": hot}


def main() -> int:
    """Runs one question and prints the answer."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("path", nargs="?", help="data file; none for uniform ids")
    parser.add_argument("--data", choices=("criteo", "globo", "uniform"), required=True)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rate-mbit", type=float, default=1000.0, help="0 = loopback")
    parser.add_argument("--batch-size", type=int, default=4096)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--max-rows", type=int, default=100_000)
    parser.add_argument("--curves", metavar="FILE", help="measured curves, written if missing")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("-o", "--out", metavar="FILE")
    args = parser.parse_args()
    question = Question(
        data=args.data,
        path=args.path,
        world_size=args.ranks,
        batch_size=args.batch_size,
        dim=args.dim,
        max_rows=args.max_rows,
        rounds=args.rounds,
        curves=args.curves,
    )
    rate = usable_rate(args.rate_mbit or None)
    answer = run_on_hosts(compare, args.ranks, rate, question, timeout_s=_TIMEOUT_S)[0]
    ms = answer["ms"]
    swept = {label: value for label, value in ms.items() if label.endswith("hot")}
    best_size = min(swept, key=lambda label: swept[label])
    best_stock = min(_STOCK, key=lambda label: ms[label])
    best = min(swept[best_size], ms[best_stock])
    link = f"{rate:g} Mbit/s" if rate else "loopback"
    print(f"{args.data}, {args.ranks} ranks x {args.batch_size}, dim {args.dim}, {link}")
    for label, value in ms.items():
        low, _, high = answer["quartiles_ms"][label]
        print(
            f"  {label:<12}{value:>9.1f} ms{value / best:>8.3f} of the best swept"
            f"   (half of the steps: {low:.1f} to {high:.1f} ms)"
        )
    print(f"  planner chose {answer['chosen']}")
    print(
        f"  planner / best swept ({best_size}) {ms['planner'] / swept[best_size]:.3f}, "
        f"planner / best stock ({best_stock}) {ms['planner'] / ms[best_stock]:.3f}"
    )
    if args.out:
        document = {
            "environment": describe_environment(),
            "question": asdict(question),
            "rate_mbit": rate,
            **answer,
        }
        Path(args.out).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
