"""Time of a row's update on one core: FBGEMM's row-wise Adagrad against torch's operators.

    python -m benchmarks.row_update
    python -m benchmarks.row_update --dims 16 64 --json benchmarks/results/row_update.json

All update the same tables in the host's memory: FBGEMM's *TBE* looks rows up and updates them in
backward, its *kernel* does so alone, and *torch* are the operators of this package. *Rows* are what
a home gets from two ranks, the distinct rows of each; *bags* are lookups with one gradient for each
bag. Ids follow Zipf's law and lie scattered over the table. CPU time of the process, variants in
turns, medians.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchrec.distributed.embedding_types import (
    EmbeddingComputeKernel,
    GroupedEmbeddingConfig,
    ShardedEmbeddingTable,
)
from torchrec.modules.embedding_configs import DataType, PoolingType

from torchrec_picasso._torchrec import EmbOptimType
from torchrec_picasso.app.cli.outputs import write_result
from torchrec_picasso.storage.row_tables import RowTables, choose_memory
from torchrec_picasso.storage.row_updates import UpdateKernel, row_wise_adagrad

_CPU = torch.device("cpu")
_ROWS, _EXPONENT = 1_000_000, 0.9
_LOOKUPS_OF_A_RANK, _BAGS = 50_000, 40_000
_WAYS = ("tbe", "kernel", "torch")


def _tables(dim: int) -> RowTables:
    kernel = EmbeddingComputeKernel.FUSED
    table = ShardedEmbeddingTable(
        name="t",
        num_embeddings=_ROWS,
        embedding_dim=dim,
        local_rows=_ROWS,
        local_cols=dim,
        compute_kernel=kernel,
    )
    config = GroupedEmbeddingConfig(
        data_type=DataType.FP32,
        pooling=PoolingType.SUM,
        is_weighted=False,
        has_feature_processor=False,
        compute_kernel=kernel,
        embedding_tables=[table],
        fused_params={"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.1},
    )
    tables = RowTables(config, choose_memory(config, _CPU, 0), _CPU)
    tables._row_update = row_wise_adagrad  # on any processor
    return tables


def _lookups(seed: int) -> Tensor:
    """Rows of two ranks' lookups, one rank after the other."""
    rng = np.random.default_rng(seed)
    chance = np.arange(1, _ROWS + 1) ** -_EXPONENT
    cdf = np.cumsum(chance / chance.sum())
    ranked = np.searchsorted(cdf, rng.random(2 * _LOOKUPS_OF_A_RANK))
    return torch.from_numpy(rng.permutation(_ROWS)[np.minimum(ranked, _ROWS - 1)])


def _in_turns(variants: Sequence[Callable[[], object]], times: int) -> list[float]:
    """Median CPU seconds of each."""
    taken: list[list[float]] = [[] for _ in variants]
    for _ in range(times + 1):
        for seconds, run in zip(taken, variants):
            start_s = time.process_time()
            run()
            seconds.append(time.process_time() - start_s)
    return [median(seconds[1:]) for seconds in taken]


def measure(dim: int, times: int) -> dict[str, Any]:
    """Nanoseconds a row and a lookup."""
    tables, lookups_N = _tables(dim), _lookups(0)
    tbe, kernel = tables.tbe, UpdateKernel.find(tables.tbe, {})
    assert kernel is not None
    rows_n = torch.cat([rows.unique() for rows in lookups_N.split(_LOOKUPS_OF_A_RANK)])
    grads_nD, grads_SD = torch.randn(len(rows_n), dim), torch.randn(_BAGS, dim)
    no_slots = torch.empty(0, dtype=torch.int64)
    each_n1 = torch.arange(len(rows_n) + 1)
    offsets_S1 = torch.linspace(0, len(lookups_N), _BAGS + 1).long()
    rows_s = _in_turns(
        [
            lambda: torch.autograd.backward(tbe(rows_n, each_n1), grads_nD),
            lambda: kernel(rows_n, each_n1, None, grads_nD),
            lambda: tables.update(rows_n, no_slots, grads_nD),
        ],
        times,
    )
    bags_s = _in_turns(
        [
            lambda: torch.autograd.backward(tbe(lookups_N, offsets_S1), grads_SD),
            lambda: kernel(lookups_N, offsets_S1, None, grads_SD),
            lambda: tables.update(lookups_N, no_slots, grads_SD, (offsets_S1, None)),
        ],
        times,
    )
    return {
        "dim": dim,
        "rows": len(rows_n),
        "distinct_rows": len(rows_n.unique()),
        **{f"{way}_ns_per_row": 1e9 * s / len(rows_n) for way, s in zip(_WAYS, rows_s)},
        "lookups": len(lookups_N),
        **{f"{way}_ns_per_lookup": 1e9 * s / len(lookups_N) for way, s in zip(_WAYS, bags_s)},
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and prints one line per dim."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--dims", type=int, nargs="+", default=[8, 16, 32, 64, 128], metavar="D")
    parser.add_argument("--times", type=int, default=9, help="updates of each kind; median")
    parser.add_argument("--json", metavar="FILE", help="also write the figures there")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    print("ns per   row: TBE    kernel     torch      lookup of a bag: TBE    kernel     torch")
    found = []
    for dim in args.dims:
        taken = measure(dim, args.times)
        found.append(taken)
        rows, lookups = (
            "".join(f"{taken[f'{way}_ns_per_{each}']:>10.0f}" for way in _WAYS)
            for each in ("row", "lookup")
        )
        print(f"D={dim:<7}{rows}{lookups:>46}", flush=True)
    if args.json:
        write_result({"row_update": found}, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
