"""Frequency statistics at real sizes: seconds, memory and errors for 100 million lookups.

    python -m benchmarks.stats_scale -o stats_scale.json
    python -m benchmarks.stats_scale --lookups 2_600_000

Writes generated Parquet data (26 int64 id columns, bounded Zipf), then counts it with
``FrequencyStats.from_files`` in a fresh process on one core and compares with exact counts. Two
cases: Criteo Terabyte's table sizes and skew, where everything fits and is counted exactly, and 26
tables of 40 million rows with hardly any skew, where nearly every lookup is a new row and the
budget of memory has to hold. Generation is not timed.

What is read off: at most 60 s of CPU and 2 GiB of peak RSS, interpreter and libraries included.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray

from torchrec_picasso.app.launch.environment import describe_environment
from torchrec_picasso.app.zoo.data.generated import zipf_cdf
from torchrec_picasso.app.zoo.tables import CARDINALITIES
from torchrec_picasso.frequency.spectrum import CountSpectrum

_MAX_CPU_S, _MAX_RSS_GIB = 60.0, 2.0
_ROWS_PER_GROUP = 1 << 20
_NUM_HEAD = 10_000  # most frequent rows whose counts are compared
_BATCH_SIZE = 4096


@dataclass(frozen=True, kw_only=True)
class Case:
    """Tables and their skew."""

    name: str
    rows: tuple[int, ...]
    exponent: float


CASES = (
    Case(name="criteo", rows=CARDINALITIES["criteo_terabyte_40m"], exponent=1.05),
    Case(name="worst", rows=(40_000_000,) * 26, exponent=0.5),
)


def write_data(case: Case, num_samples: int, folder: Path, seed: int = 0) -> dict[str, Any]:
    """Writes ``data.parquet`` and returns the exact answers by column."""
    rng = np.random.default_rng(seed)
    columns, exact = {}, {}
    cdf: NDArray[np.float64] = np.empty(0)
    for index, rows in enumerate(case.rows):
        if cdf.size != rows:
            cdf = zipf_cdf(rows, case.exponent)
        drawn = np.sort(rng.random(num_samples))  # sorted queries are found 10 times faster
        rank_B = np.searchsorted(cdf, drawn, "right")
        rank_B = rank_B[rng.permutation(num_samples)]
        # an odd multiplier scatters the frequent rows; 7919 divides none of the sizes
        ids_B = (rank_B * 7919 + index) % rows
        name = f"c{index + 1}"
        columns[name] = pa.array(ids_B)
        exact[name] = _exact(ids_B)
    del cdf
    pq.write_table(pa.table(columns), folder / "data.parquet", row_group_size=_ROWS_PER_GROUP)
    return exact


def _exact(ids_B: NDArray[np.int64]) -> dict[str, Any]:
    rows_U, counts_U = np.unique(ids_B, return_counts=True)
    top_H = np.argsort(-counts_U, kind="stable")[:_NUM_HEAD]
    spectrum = CountSpectrum.from_counts(torch.from_numpy(counts_U), num_embeddings=1 << 62)
    return {
        "distinct": rows_U.size,
        "unique_per_batch": spectrum.expected_unique(_BATCH_SIZE),
        "unseen_mass": spectrum.unseen_mass,
        "head_rows": rows_U[top_H],
        "head_counts": counts_U[top_H],
    }


def count(folder: Path, rows: tuple[int, ...], max_rows_counted: int | None) -> None:
    """Counts in this process, writes the statistics and prints what it took as JSON."""
    from torchrec_picasso.frequency import FrequencyStats, ModelTable

    pa.set_cpu_count(1)
    torch.set_num_threads(1)
    tables = [
        ModelTable(name=f"c{i + 1}", num_embeddings=n, feature_names=(f"c{i + 1}",))
        for i, n in enumerate(rows)
    ]
    options = {} if max_rows_counted is None else {"max_rows_counted": max_rows_counted}
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    stats = FrequencyStats.from_files(folder / "data.parquet", tables, **options)
    taken = {
        "cpu_s": time.process_time() - cpu_s,
        "wall_s": time.perf_counter() - wall_s,
        "peak_rss_gib": _peak_rss_kib() / (1 << 20),
    }
    stats.to_parquet(folder / "stats.parquet")
    print(json.dumps(taken))


def _peak_rss_kib() -> int:
    """Of this program alone: ``ru_maxrss`` starts at what the parent had when it forked."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1])
    raise OSError("no VmHWM in /proc/self/status; this benchmark needs Linux")


def run_case(case: Case, num_lookups: int, max_rows_counted: int | None) -> dict[str, Any]:
    """Generates, counts in a fresh process, compares."""
    from torchrec_picasso.frequency import FrequencyStats

    num_samples = num_lookups // len(case.rows)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        exact = write_data(case, num_samples, folder)
        command = [sys.executable, "-m", "benchmarks.stats_scale", "--count", name]
        command += ["--case", case.name]
        if max_rows_counted is not None:
            command += ["--max-rows-counted", str(max_rows_counted)]
        done = subprocess.run(
            command,
            check=True,
            capture_output=True,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        taken = json.loads(done.stdout.splitlines()[-1])
        file_mib = (folder / "data.parquet").stat().st_size / (1 << 20)
        stats = FrequencyStats.from_parquet(folder / "stats.parquet")
    tables = [_compare(stats, name, exact[name]) for name in exact]
    return {
        "case": case.name,
        "lookups": num_samples * len(case.rows),
        "file_mib": file_mib,
        **taken,
        "exact_tables": sum(stats.tables[name].is_exact for name in exact),
        "worst": {key: max(table[key] for table in tables) for key in tables[0] if key != "table"},
        "holds": taken["cpu_s"] <= _MAX_CPU_S and taken["peak_rss_gib"] <= _MAX_RSS_GIB,
        "tables": tables,
    }


def _compare(stats: Any, name: str, exact: dict[str, Any]) -> dict[str, Any]:
    counts = stats.tables[name]
    place = np.searchsorted(counts.rows_U.numpy(), exact["head_rows"])
    place = np.minimum(place, max(counts.rows_U.numel() - 1, 0))
    found = counts.rows_U.numpy()[place] == exact["head_rows"]
    head = np.where(found, counts.counts_U.numpy()[place], 0)
    lacking = exact["head_counts"] - head
    assert (lacking >= 0).all(), f"{name}: a count is too high"
    assert (lacking <= counts.max_undercount).all(), f"{name}: a count lacks more than its bound"
    num_head = min(100, lacking.size)
    return {
        "table": name,
        "max_undercount": counts.max_undercount,
        "head_lacks_at_most": int(lacking.max()),
        "top_100_error": float((lacking / exact["head_counts"])[:num_head].max()),
        "distinct_error": abs(counts.num_rows_seen / exact["distinct"] - 1),
        "unique_error": abs(
            stats.expected_unique(name, _BATCH_SIZE) / exact["unique_per_batch"] - 1
        ),
        "unseen_mass_error": abs(counts.spectrum().unseen_mass - exact["unseen_mass"]),
    }


def main() -> int:
    """Runs the cases and prints what holds; exit code 1 where a target does not."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("-o", "--out", default="stats_scale.json", metavar="FILE")
    parser.add_argument("--lookups", type=int, default=100_000_000, help="over all tables")
    parser.add_argument("--case", choices=[case.name for case in CASES], help="only this one")
    parser.add_argument("--max-rows-counted", type=int, help="budget of each table")
    parser.add_argument("--count", metavar="FOLDER", help=argparse.SUPPRESS)
    args = parser.parse_args()
    cases = [case for case in CASES if args.case in (None, case.name)]
    if args.count:
        count(Path(args.count), cases[0].rows, args.max_rows_counted)
        return 0
    results = []
    for case in cases:
        result = run_case(case, args.lookups, args.max_rows_counted)
        results.append(result)
        worst = result["worst"]
        print(
            f"{case.name}: {result['lookups']:,} lookups ({result['file_mib']:.0f} MiB) in "
            f"{result['cpu_s']:.1f} s CPU, {result['wall_s']:.1f} s, peak RSS "
            f"{result['peak_rss_gib']:.2f} GiB; targets {'hold' if result['holds'] else 'MISSED'}\n"
            f"  {result['exact_tables']} of {len(case.rows)} tables exact; worst table: head lacks "
            f"{worst['head_lacks_at_most']} of at most {worst['max_undercount']:g} lookups, top "
            f"100 off by {worst['top_100_error']:.2%}, distinct {worst['distinct_error']:.2%}, "
            f"unique per batch {worst['unique_error']:.2%}, unseen mass "
            f"{worst['unseen_mass_error']:.4f}",
            flush=True,
        )
    document = {"environment": describe_environment(), "results": results}
    Path(args.out).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {args.out}")
    return 0 if all(result["holds"] for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
