"""Real Criteo ids: are the losses stock's, how many bytes go, how much CPU does it cost?

Compares stock table-wise sharding with hot/cold sharding (row-wise Adagrad) on 2 ranks of one
machine, both in one run and in alternating blocks, and counts collectives for 26 and for 200
tables:

    python -m benchmarks.criteo_exactness --out exactness.json

Aims, which the kept results meet: losses to 1e-4 relative over the first 15 steps, bytes per rank
and step at most 1/3.5 of stock's, collectives per step equal for 26 and 200 tables, CPU seconds per
step at most 1.15 x stock's.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from pathlib import Path
from typing import Any

from torchrec_picasso.app.cli.outputs import write_result
from torchrec_picasso.app.cli.report import Comparison, print_comparisons
from torchrec_picasso.app.config import (
    DataConfig,
    ModelConfig,
    PipelineConfig,
    ShardingConfig,
    TrainConfig,
)
from torchrec_picasso.app.launch.quiet import quiet_upstream
from torchrec_picasso.app.launch.run_ranks import run_ranks
from torchrec_picasso.app.runs.compare import CompareSpec, compare_on_rank
from torchrec_picasso.errors import PicassoError

DEFAULT_DATA = Path("..") / "shared" / "data" / "criteo_tb_80k.parquet"
RANKS, STEPS, LOSS_STEPS, HOT_ROWS = 2, 35, 15, 5000
TIMEOUT_S = 3600


def spec(steps: int, data: DataConfig, dim: int, layer: int, hot_rows: int) -> CompareSpec:
    """Stock table-wise beside hot/cold tables under thin towers."""
    model = ModelConfig(embedding_dim=dim, dense_layers=(layer,), over_layers=(layer,))
    return CompareSpec(
        config=TrainConfig(
            steps=steps,
            ranks=RANKS,
            data=data,
            model=model,
            sharding=ShardingConfig(hot_rows=hot_rows),
            pipeline=PipelineConfig(kind="sparse_dist"),
        ),
        stock=("table_wise",),
    )


def exactness_spec(path: Path) -> CompareSpec:
    data = DataConfig(
        path=str(path),
        batch_size=4096,
        cardinalities="criteo_terabyte_10m",
        max_rows=1_000_000,
        heldout_steps=1,
    )
    return spec(STEPS, data, dim=128, layer=64, hot_rows=HOT_ROWS)


def tables_spec(num_tables: int) -> CompareSpec:
    data = DataConfig(batch_size=256, row_scale=0.001, num_tables=num_tables, heldout_steps=1)
    return spec(5, data, dim=16, layer=16, hot_rows=500)


def compare(spec: CompareSpec) -> Comparison:
    results = run_ranks(compare_on_rank, RANKS, spec, timeout_s=TIMEOUT_S)
    return Comparison(link="loopback", spec=spec, **results[0])


def collectives_by_tables() -> dict[str, dict[str, float]]:
    counts = {}
    for num_tables in (26, 200):
        sides = compare(tables_spec(num_tables))
        counts[str(num_tables)] = {
            "stock": sides.stock.collectives_per_step,
            "ours": sides.ours.collectives_per_step,
        }
        print(f"{num_tables} tables: {counts[str(num_tables)]} collectives per step")
    return counts


def summary(comparison: Comparison) -> dict[str, Any]:
    stock, ours = comparison.stock, comparison.ours
    differences = [abs(a - b) / abs(a) for a, b in zip(stock.losses, ours.losses)]
    kernel = (stock.loopback_bytes_per_step, ours.loopback_bytes_per_step)
    blocks = zip(ours.block_cpu_s_per_step, stock.block_cpu_s_per_step)
    return {
        f"max_relative_loss_difference_{LOSS_STEPS}_steps": max(differences[:LOSS_STEPS]),
        "max_relative_loss_difference_all_steps": max(differences),
        "sent_bytes_ratio_meter": comparison.sent_bytes_ratio,
        "sent_bytes_ratio_loopback": kernel[0] / kernel[1] if kernel[0] and kernel[1] else None,
        "loopback_bytes_per_rank_and_step": {"stock": kernel[0], "ours": kernel[1]},
        "cpu_ratio_of_medians": comparison.cpu_ratio,
        "cpu_ratio_by_block": [ours_s / stock_s for ours_s, stock_s in blocks],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=DEFAULT_DATA, help="Criteo file")
    parser.add_argument("--out", type=Path, default=Path("criteo_exactness.json"))
    args = parser.parse_args()
    if not args.data.is_file():
        print(f"{args.data}: no such file; give a Criteo file with --data. Nothing was measured.")
        return 2
    quiet_upstream()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        comparison = compare(exactness_spec(args.data))
    except PicassoError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print_comparisons([comparison])
    facts = summary(comparison)
    for name, value in facts.items():
        print(f"  {name}: {value}")
    document = {
        "config": dataclasses.asdict(comparison.spec),
        "summary": facts,
        "collectives_per_step_by_tables": collectives_by_tables(),
        "stock": dataclasses.asdict(comparison.stock),
        "ours": dataclasses.asdict(comparison.ours),
    }
    write_result(document, args.out)
    print(f"wrote {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
