"""Losses of HSTU with long histories: ours and stock after a rounding, beside stock's; rank loads.

    python -m benchmarks.hstu_losses -o hstu_losses.json

Every run trains `hstu_long` or `hstu_long_64` of `benchmarks.scoreboard` from equal weights on the
same batches, on `--ranks` ranks of this machine: stock's table-wise plan under
TrainPipelineSparseDist, ours with every table hot/cold and no hot rows, and stock again for each of
`--seeds`, with about one of `--moved` dense weights moved by one unit in its last place. What a
rounding grows to in stock is what ours may differ by. `--slow` divides learning rates: then a
rounding hardly grows, and the losses of right plans stay equal. A difference is relative to
stock's loss of that step.

Loads are lookups that each rank serves: by the plan, of the trained batches of `--load-ranks`
ranks, before rows are made unique. Nothing is trained for them, and no time is measured.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.datasets.utils import Batch
from torchrec.distributed.types import EnumerableShardingSpec, ShardingPlan
from torchrec.optim.optimizers import in_backward_optimizer_filter

from benchmarks.command import add_numbers, can_write, command_parser
from benchmarks.fields.plans import Planned, plan_hot_cold, plan_in_parts, plan_table_wise
from benchmarks.fields.trainer import VariantTrainer
from benchmarks.fields.variants import VARIANTS
from benchmarks.fields.zoo import ZooWorkload
from benchmarks.scoreboard.entries import train_config
from torchrec_picasso import CommCurves, FrequencyStats
from torchrec_picasso.app.cli.outputs import write_result
from torchrec_picasso.app.config import TrainConfig
from torchrec_picasso.app.launch.quiet import quiet_upstream
from torchrec_picasso.app.launch.run_ranks import run_ranks
from torchrec_picasso.cost.stock import over_mean
from torchrec_picasso.frequency.collect import table_configs

MODELS = ("hstu_long", "hstu_long_64")
STOCK = ("table_wise", "row_wise", "column_wise")
OURS = "all_rows"
_COUNTED_STEPS, _LOAD_STEPS = 8, 8
_TIMEOUT_S = 3600


def config_of(args: argparse.Namespace) -> TrainConfig:
    """The scoreboard's configuration, with learning rates divided by ``--slow``."""
    config = train_config(args.model, None, 0)
    rates = config.optimizer
    slow = {name: getattr(rates, name) / args.slow for name in ("embedding_lr", "dense_lr")}
    return replace(config, optimizer=replace(rates, **slow))


def make_plan(kind: str, workload: ZooWorkload, model: nn.Module, batch_size: int) -> Planned:
    """Plans a stock kind, or ours. Collective."""
    pg = dist.group.WORLD
    assert pg is not None
    if kind == OURS:
        heldout = workload.heldout(pg.size(), _COUNTED_STEPS)
        stats = FrequencyStats.collect(heldout, workload.model())
        curves = CommCurves.assumed(pg.size(), gbytes_per_s=0.1)
        return plan_hot_cold(model, pg, batch_size, 0, stats, curves)
    if kind == "table_wise":
        return plan_table_wise(workload.tables, model, pg)
    return plan_in_parts(kind, workload.tables, model, pg)


def train(
    rank: int, world_size: int, args: argparse.Namespace, kind: str, seed: int
) -> list[float]:
    """Trains; returns each step's loss, a mean over ranks. Seed 0 moves no weight. Collective."""
    quiet_upstream()
    torch.set_num_threads(1)
    config = config_of(args)
    workload = ZooWorkload(config, world_size)
    model = workload.model()
    if seed:
        move_weights(model, args.moved, seed)
    planned = make_plan(kind, workload, model, config.data.batch_size)
    pg = dist.group.WORLD
    assert pg is not None
    trainer = VariantTrainer(VARIANTS[kind], model, planned, pg, 0, config.optimizer)
    batches = workload.training(rank, args.steps)
    losses = torch.stack(list(trainer.steps(batches))).double().detach()
    dist.all_reduce(losses)
    return [float(loss) for loss in losses / world_size]


def move_weights(model: nn.Module, one_of: int, seed: int) -> None:
    """Moves about one of this many dense weights up by one unit in its last place."""
    drawn = torch.Generator().manual_seed(seed)
    for _, weights in in_backward_optimizer_filter(model.named_parameters()):
        moves = torch.randint(one_of, weights.shape, generator=drawn) == 0
        above = torch.nextafter(weights.data, torch.tensor(torch.inf))
        weights.data = torch.where(moves, above, weights.data)


def load(rank: int, world_size: int, args: argparse.Namespace) -> dict[str, list[float]]:
    """Returns the lookups that each rank serves in a step, by plan. Collective."""
    quiet_upstream()
    config = config_of(args)
    workload = ZooWorkload(config, world_size)
    batches = workload.training(rank, _LOAD_STEPS)
    found = {}
    for kind in (*STOCK, OURS):
        model = workload.model()
        plan = make_plan(kind, workload, model, config.data.batch_size).placement.plan
        served_W = sum(served_lookups(plan, model, batch, world_size) for batch in batches)
        assert isinstance(served_W, Tensor)
        dist.all_reduce(served_W)
        found[kind] = (served_W / _LOAD_STEPS).tolist()
    return found


def served_lookups(plan: ShardingPlan, model: nn.Module, batch: Batch, world_size: int) -> Tensor:
    """Counts a batch's lookups by the rank that serves them, ``(W,)``; a shard of some columns
    serves that share of a lookup."""
    served_W, features = torch.zeros(world_size, dtype=torch.float64), batch.sparse_features
    for path, table in table_configs(model):
        module_plan: Mapping[str, Any] = plan.plan[path]  # type: ignore[assignment]
        spec = module_plan[table.name].sharding_spec
        assert isinstance(spec, EnumerableShardingSpec)
        ids = torch.cat([features[name].values() for name in table.feature_names])
        for shard in spec.shards:
            (row, _), (num_rows, columns) = shard.shard_offsets, shard.shard_sizes
            num_ids = int(((ids >= row) & (ids < row + num_rows)).sum())
            served_W[shard.placement.rank()] += num_ids * columns / table.embedding_dim
    return served_W


def differences(stock: Sequence[float], other: Sequence[float]) -> list[float]:
    """The relative difference of each step's loss."""
    return [abs(one - another) / abs(one) for one, another in zip(stock, other)]


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the differences and the loads.

    Returns:
        0; 2 where the options allow no answer.
    """
    args = _parser().parse_args(argv)
    quiet_upstream()
    if not can_write(args, "out"):
        return 2
    moved = [(f"stock, moved, seed {seed}", STOCK[0], seed) for seed in range(1, args.seeds + 1)]
    runs = [("stock", STOCK[0], 0), ("ours", OURS, 0), *moved]
    losses: dict[str, list[float]] = {}
    for name, kind, seed in runs:
        losses[name] = run_ranks(train, args.ranks, args, kind, seed, timeout_s=_TIMEOUT_S)[0]
    apart = {name: differences(losses["stock"], each) for name, each in losses.items()}
    apart.pop("stock")
    print(f"{args.model}, losses apart from stock's, largest of the first 5 steps, 10, 20, all")
    for name, each in apart.items():
        largest = [max(each[:steps]) for steps in (5, 10, 20, args.steps)]
        print(f"  {name:22}" + "".join(f"{value:10.1e}" for value in largest))
    loads = run_ranks(load, args.load_ranks, args, timeout_s=_TIMEOUT_S)[0]
    for kind, served_W in loads.items():
        print(f"  {kind:12} busiest of {args.load_ranks} ranks over mean {over_mean(served_W):.3f}")
    if args.out:
        question = {name: value for name, value in vars(args).items() if name != "out"}
        found = {"losses": losses, "differences": apart, "served_lookups": loads}
        write_result({"question": question, **found}, args.out)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("benchmarks.hstu_losses", __doc__)
    add = parser.add_argument
    add("-o", "--out", metavar="FILE", help="JSON to write")
    add("--model", choices=MODELS, default=MODELS[0], help="what is trained")
    add_numbers(
        parser,
        ("--steps", 26, 1, "steps of each run"),
        ("--seeds", 4, 1, "runs of stock with moved weights"),
        ("--moved", 10_000, 1, "one of this many dense weights is moved"),
        ("--slow", 1, 1, "divisor of learning rates"),
        ("--ranks", 2, 2, "ranks that train"),
        ("--load-ranks", 4, 2, "ranks whose loads are counted"),
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
