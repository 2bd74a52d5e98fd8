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
ranks, before rows are made unique. Nothing is trained for them, and no time is measured. With
`--rate-mbit` loads are measured too, one rank on each emulated host: bytes that its interface sends
and receives in a step, dense gradients and headers included; of ours the step reports by rank.

With `--config` the runs are those of `torchrec-picasso train` instead: each window is evaluated on
before it is trained on, half the steps are trained by new processes that resume from a checkpoint,
and ours refreshes `--hot-rows` hot rows. Rows that became hot are counted between checkpoints.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.datasets.utils import Batch
from torchrec.distributed.types import EnumerableShardingSpec, ShardingPlan
from torchrec.optim.optimizers import in_backward_optimizer_filter

from benchmarks.cluster import EmulatedCluster
from benchmarks.cluster.enter_host import HOST_INTERFACE
from benchmarks.command import add_numbers, can_write, command_parser
from benchmarks.fields.plans import Planned, plan_hot_cold, plan_in_parts, plan_table_wise
from benchmarks.fields.trainer import VariantTrainer
from benchmarks.fields.variants import VARIANTS
from benchmarks.fields.zoo import ZooWorkload
from benchmarks.scoreboard.entries import train_config
from torchrec_picasso import CommCurves, FrequencyStats
from torchrec_picasso.app.checkpoints.folder import folder_of_step
from torchrec_picasso.app.checkpoints.hot_rows import read_hot_rows
from torchrec_picasso.app.cli.outputs import write_result
from torchrec_picasso.app.config import (
    CheckpointConfig,
    PipelineConfig,
    ShardingConfig,
    TrainConfig,
)
from torchrec_picasso.app.config.load import load_config
from torchrec_picasso.app.launch.quiet import quiet_upstream
from torchrec_picasso.app.launch.run_ranks import run_ranks
from torchrec_picasso.app.runs import trainer
from torchrec_picasso.app.runs.train import train_on_rank
from torchrec_picasso.cost.stock import over_mean
from torchrec_picasso.errors import PicassoError
from torchrec_picasso.frequency.collect import table_configs
from torchrec_picasso.rows.refresh_policy import Refresh
from torchrec_picasso.train_pipeline.step_report import StepReports

MODELS = ("hstu_long", "hstu_long_64")
STOCK = ("table_wise", "row_wise", "column_wise")
OURS = "all_rows"
_COUNTED_STEPS, _LOAD_STEPS, _WARM_STEPS = 8, 8, 2
_TIMEOUT_S = 3600


def config_of(args: argparse.Namespace) -> TrainConfig:
    """The scoreboard's configuration, or that of ``--config``, with learning rates divided by
    ``--slow``.

    Raises:
        PicassoError: If the file of ``--config`` cannot be used.
    """
    config = load_config(args.config) if args.config else train_config(args.model, None, 0)
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


def train_windows(args: argparse.Namespace, kind: str, seed: int) -> dict[str, Any]:
    """Trains half the steps, and the others from the checkpoint in new processes.

    Returns:
        ``losses``; ``aucs`` of each task by the steps trained before; ``became_hot``, the rows that
        were not hot one checkpoint earlier, by steps trained.
    """
    config = config_of(args)
    ours, every = kind == OURS, config.data.window_steps or args.steps
    pipeline = PipelineConfig(
        num_micro_batches=2, lookahead=True, refresh=Refresh(every_steps=every)
    )
    result: dict[str, Any] = {"losses": [], "aucs": {}, "became_hot": {}}
    with TemporaryDirectory() as folder:
        config = replace(
            config,
            data=replace(config.data, path=args.data),
            sharding=ShardingConfig(
                placement="hot_cold" if ours else kind, hot_rows=args.hot_rows if ours else 0
            ),
            pipeline=pipeline if ours else PipelineConfig(kind="sparse_dist"),
            checkpoint=CheckpointConfig(folder=folder, every_steps=every, keep_last=None),
        )
        half = args.steps // 2
        for steps, resume in ((half, False), (args.steps, True)):
            given = replace(config, steps=steps), resume, args.moved, seed
            found = run_ranks(_run, args.ranks, *given, timeout_s=_TIMEOUT_S)[0]
            assert found["first_step"] == (half if resume else 0)
            result["losses"] += found["losses"]
            result["aucs"] |= found["by_window"]
        before: dict[str, Tensor] | None = None
        for step in sorted({*range(every, args.steps, every), half, args.steps}):
            hot = read_hot_rows(folder_of_step(Path(folder), step))
            if hot and before:
                moved = (set(hot[name].tolist()) - set(before[name].tolist()) for name in hot)
                result["became_hot"][step] = sum(map(len, moved))
            before = hot
    return result


def _run(
    rank: int, world_size: int, config: TrainConfig, resume: bool, one_of: int, seed: int
) -> dict[str, Any]:
    """The application's training. Seed 0 moves no weight. Collective."""
    torch.set_num_threads(1)
    build = trainer.unsharded_model

    def build_moved(*given: Any) -> nn.Module:
        model = build(*given)
        if seed:  # of a resumed run the checkpoint overwrites them
            move_weights(model, one_of, seed)
        return model

    with patch.object(trainer, "unsharded_model", build_moved):
        return train_on_rank(rank, world_size, config, resume)


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


def measured_load(
    rank: int, world_size: int, args: argparse.Namespace
) -> dict[str, dict[str, list[float]]]:
    """Trains the batches of :func:`load` by each plan, after some of them to warm up. Collective.

    Returns:
        By plan, the MB of a step that each rank's host sent and received, and of ours the reports
        by rank.
    """
    quiet_upstream()
    torch.set_num_threads(1)
    config = config_of(args)
    workload = ZooWorkload(config, world_size)
    batches = workload.training(rank, _LOAD_STEPS)
    pg = dist.group.WORLD
    assert pg is not None
    found = {}
    for kind in (*STOCK, OURS):
        model, reports = workload.model(), StepReports()
        planned = make_plan(kind, workload, model, config.data.batch_size)
        variant = replace(VARIANTS[kind], num_micro_batches=1 if kind == OURS else None)
        trainer = VariantTrainer(variant, model, planned, pg, 0, config.optimizer, reports)
        list(trainer.steps(batches[:_WARM_STEPS]))
        reports.reports.clear()
        before_2 = link_mb()
        list(trainer.steps(batches))
        sent_received_2 = (link_mb() - before_2) / _LOAD_STEPS
        by_rank_W2 = [torch.zeros_like(sent_received_2) for _ in range(world_size)]
        dist.all_gather(by_rank_W2, sent_received_2)
        sent_received_2W = torch.stack(by_rank_W2, dim=1).tolist()
        found[kind] = dict(zip(("sent_mb", "received_mb"), sent_received_2W))
        if kind == OURS:
            frame = reports.by_rank()[["served_lookups", "served_rows"]]
            found[kind] |= frame.to_dict("list")
    return found


def link_mb() -> Tensor:
    """MB that this host's interface sent and received so far, ``(2,)``. Collective."""
    dist.barrier()
    lines = Path("/proc/net/dev").read_text().splitlines()
    (counters,) = (line for line in lines if line.strip().startswith(f"{HOST_INTERFACE}:"))
    fields = counters.partition(":")[2].split()
    counted_2 = torch.tensor([int(fields[8]), int(fields[0])], dtype=torch.float64) / 1e6
    dist.barrier()
    return counted_2


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
    runs = [("stock", STOCK[0], 0), ("ours", OURS, 0), *moved] if args.steps else []
    losses: dict[str, list[float]] = {}
    found: dict[str, Any] = {}
    try:
        config_of(args)
    except PicassoError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for name, kind, seed in runs:
        if args.config:
            found[name] = train_windows(args, kind, seed)
            losses[name] = found[name].pop("losses")
        else:
            losses[name] = run_ranks(train, args.ranks, args, kind, seed, timeout_s=_TIMEOUT_S)[0]
    apart = {name: differences(losses["stock"], each) for name, each in losses.items()}
    apart.pop("stock", None)
    what = args.config or args.model
    if runs:
        print(f"{what}, losses apart from stock's, largest of the first 5 steps, 10, 20, all")
    for name, each in apart.items():
        largest = [max(each[:steps]) for steps in (5, 10, 20, args.steps)]
        print(f"  {name:22}" + "".join(f"{value:10.1e}" for value in largest))
    for name, each in found.items():
        print(f"  {name:22} AUCs of the last window {each['aucs'][args.steps]}")
        print(f"  {'':22} rows that became hot {each['became_hot']}")
    loads: dict[str, list[float]] = {}
    if not args.config:
        loads = run_ranks(load, args.load_ranks, args, timeout_s=_TIMEOUT_S)[0]
    for kind, served_W in loads.items():
        print(f"  {kind:12} busiest of {args.load_ranks} ranks over mean {over_mean(served_W):.3f}")
    measured: dict[str, dict[str, list[float]]] = {}
    if args.rate_mbit and not args.config:
        with EmulatedCluster(args.load_ranks, args.rate_mbit) as hosts:
            given, more = (measured_load, args.load_ranks, args), {"on_start": hosts.on_start}
            measured = run_ranks(*given, timeout_s=_TIMEOUT_S, **more)[0]
    for kind, by_name in measured.items():
        over = (
            f"{name} {max(per_W):.2f} ({over_mean(per_W):.3f})" for name, per_W in by_name.items()
        )
        print(f"  {kind:12} busiest host (over mean): {', '.join(over)}")
    if args.out:
        question = {name: value for name, value in vars(args).items() if name != "out"}
        kept = {"losses": losses, "differences": apart, "served_lookups": loads}
        kept |= {"measured_loads": measured, "windows": found}
        write_result({"question": question, **kept}, args.out)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("benchmarks.hstu_losses", __doc__)
    add = parser.add_argument
    add("-o", "--out", metavar="FILE", help="JSON to write")
    add("--model", choices=MODELS, default=MODELS[0], help="what is trained")
    add("--config", metavar="FILE", help="train this configuration in windows, with a resume")
    add("--data", metavar="FILE", help="clicks of --config (default: generated ones)")
    add_numbers(
        parser,
        ("--steps", 26, 0, "steps of each run; 0 = only loads"),
        ("--seeds", 4, 1, "runs of stock with moved weights"),
        ("--moved", 10_000, 1, "one of this many dense weights is moved"),
        ("--slow", 1, 1, "divisor of learning rates"),
        ("--ranks", 2, 2, "ranks that train"),
        ("--rate-mbit", 0, 0, "Mbit/s of links on which loads are measured; 0 = they are not"),
        ("--hot-rows", 2000, 1, "hot rows of ours, with --config"),
        ("--load-ranks", 4, 2, "ranks whose loads are counted"),
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
