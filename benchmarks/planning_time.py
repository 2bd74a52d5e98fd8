"""How long planning takes, beside TorchRec's own planner: one process, no ranks, nothing trained.

    python -m benchmarks.planning_time
    python -m benchmarks.planning_time --tables 40 130 460 --json planning_time.json

Tables have dims of 8 to 64, one to three features, and ids that follow Zipf's law with exponents of
their own. TorchRec's planner weighs the stock types, ours those and hot/cold, with and without
statistics, or places a given number of hot rows. The first plan of a process imports and warms up,
and does not count.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, PoolingType
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.proposers import GreedyProposer, UniformProposer
from torchrec.distributed.types import ShardingPlan

from torchrec_picasso import HotColdEmbeddingBagCollectionSharder, hot_cold_planner
from torchrec_picasso.app.cli.outputs import write_result
from torchrec_picasso.frequency import FrequencyStats, TableCounts

_DIMS = (8, 16, 32, 64)
_MOST_ROWS = 100_000
_BATCH = 2048
_COUNTED_BATCHES = 40
_HOT_SHARE = 0.001


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model and its statistics.

    Args:
        num_tables: Tables, of mixed dims and features.
        world_size: Ranks to plan for.
        seed: Seed of the tables' sizes and ids.
    """

    num_tables: int
    world_size: int = 4
    seed: int = 0

    def model(self) -> EmbeddingBagCollection:
        """The tables, on the meta device."""
        return EmbeddingBagCollection(
            device=torch.device("meta"),
            tables=[
                EmbeddingBagConfig(
                    name=f"t{t}",
                    num_embeddings=rows,
                    embedding_dim=_DIMS[t % len(_DIMS)],
                    feature_names=[f"f{t}_{i}" for i in range(features)],
                    pooling=PoolingType.MEAN if t % 2 else PoolingType.SUM,
                )
                for t, (rows, features, _) in enumerate(self._tables())
            ],
        )

    def stats(self) -> FrequencyStats:
        """Counts of ids that follow Zipf's law, the frequent ones scattered over each table."""
        rng = np.random.default_rng(self.seed + 1)
        samples = _COUNTED_BATCHES * _BATCH
        counted = {}
        for t, (rows, features, exponent) in enumerate(self._tables()):
            chance = np.arange(1, rows + 1) ** -exponent
            counts = rng.poisson(samples * features * (1 + t % 3) * chance / chance.sum())
            counts = rng.permutation(counts)
            seen = np.flatnonzero(counts)
            counted[f"t{t}"] = TableCounts(
                num_embeddings=rows,
                feature_names=tuple(f"f{t}_{i}" for i in range(features)),
                rows_U=torch.from_numpy(seen),
                counts_U=torch.from_numpy(counts[seen].astype(np.int64)),
            )
        return FrequencyStats(tables=counted, num_batches=_COUNTED_BATCHES, num_samples=samples)

    def topology(self) -> Topology:
        """Ranks on CPU with room for everything."""
        return Topology(world_size=self.world_size, compute_device="cpu", ddr_cap=64 << 30)

    def _tables(self) -> list[tuple[int, int, float]]:
        """Rows, features and exponent of each table."""
        rng = np.random.default_rng(self.seed)
        rows = np.exp(rng.uniform(np.log(50), np.log(_MOST_ROWS), self.num_tables)).astype(int)
        features = rng.integers(1, 4, self.num_tables)
        exponents = rng.uniform(0.2, 1.4, self.num_tables)
        return [(int(r), int(f), float(e)) for r, f, e in zip(rows, features, exponents)]


def plan_stock(workload: Workload, model: nn.Module | None = None) -> ShardingPlan:
    """Plans with TorchRec's planner and sharder, and the proposers that ours stands for on CPU."""
    planner = EmbeddingShardingPlanner(
        topology=workload.topology(),
        batch_size=_BATCH,
        proposer=[GreedyProposer(), GreedyProposer(use_depth=False), UniformProposer()],
        debug=False,
    )
    sharders: list[Any] = [EmbeddingBagCollectionSharder()]
    return planner.plan(model or workload.model(), sharders)


def plan_ours(
    workload: Workload,
    stats: FrequencyStats | None,
    model: nn.Module | None = None,
    **arguments: Any,
) -> ShardingPlan:
    """Plans with :func:`hot_cold_planner`."""
    planner = hot_cold_planner(
        workload.topology(), stats, batch_size=_BATCH, debug=False, **arguments
    )
    sharders: list[Any] = [HotColdEmbeddingBagCollectionSharder()]
    return planner.plan(model or workload.model(), sharders)


def seconds(plan: Callable[[], object], times: int) -> float:
    """Median CPU time of a few calls: planning is one thread, and others may use the machine."""
    taken = []
    for _ in range(times):
        start_s = time.process_time()
        plan()
        taken.append(time.process_time() - start_s)
    return median(taken)


def measure(num_tables: int, times: int) -> dict[str, float]:
    """Seconds per plan, by planner."""
    workload = Workload(num_tables=num_tables)
    model = workload.model()
    # what is computed once per statistics belongs to the first plan: each has its own
    num_rows = sum(table.num_embeddings for table in model.embedding_bag_configs())
    hot_rows = int(_HOT_SHARE * num_rows)
    counted = iter([workload.stats() for _ in range(2 * times)])
    return {
        "stock_s": seconds(lambda: plan_stock(workload, model), times),
        "ours_s": seconds(lambda: plan_ours(workload, None, model), times),
        "ours_with_stats_s": seconds(lambda: plan_ours(workload, next(counted), model), times),
        "all_hot_cold_s": seconds(
            lambda: plan_ours(workload, next(counted), model, hot_rows=hot_rows), times
        ),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and prints one line per number of tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tables", type=int, nargs="+", default=[40, 130, 460], metavar="N")
    parser.add_argument("--times", type=int, default=3, help="plans of each kind; median")
    parser.add_argument("--json", metavar="FILE", help="also write the figures there")
    args = parser.parse_args(arguments)
    warm = Workload(num_tables=4)
    plan_stock(warm)
    plan_ours(warm, warm.stats())
    print(f"{'tables':>7}{'TorchRec':>12}{'ours':>12}{'with statistics':>18}{'hot rows given':>17}")
    found = []
    for num_tables in args.tables:
        taken = measure(num_tables, args.times)
        found.append({"num_tables": num_tables, **taken})
        print(
            f"{num_tables:>7}{taken['stock_s']:>10.2f} s{taken['ours_s']:>10.2f} s"
            f"{taken['ours_with_stats_s']:>16.2f} s{taken['all_hot_cold_s']:>15.2f} s",
            flush=True,
        )
    if args.json:
        write_result({"planning": found}, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
