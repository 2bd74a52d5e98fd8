"""``torchrec-picasso plan``: what the planner would decide, and why, on a cluster not at hand."""

from __future__ import annotations

import argparse
import warnings

from torchrec.distributed.planner import Topology

from torchrec_picasso.app.cli.outputs import check_outputs
from torchrec_picasso.app.cli.plan_report import draw_plan, print_plan
from torchrec_picasso.app.cli.plan_report import write_plan_json as write_json
from torchrec_picasso.app.config import load_config
from torchrec_picasso.app.runs.placements import hot_cold_sharders
from torchrec_picasso.app.runs.trainer import unsharded_model
from torchrec_picasso.app.zoo.registry import make_source
from torchrec_picasso.cost import CommCurves
from torchrec_picasso.decision.explain import explain, summarize
from torchrec_picasso.errors import ConfigError
from torchrec_picasso.frequency import FrequencyStats
from torchrec_picasso.planner.planner import hot_cold_planner

__all__ = ["run"]

_GIB = 1 << 30


def run(args: argparse.Namespace) -> None:
    """Runs the subcommand.

    Raises:
        PicassoError: If an argument or a file cannot be used, or the tables do not fit.
    """
    _check_arguments(args)
    config = load_config(args.config)
    source = make_source(config.data, config.seed)
    model = unsharded_model(config, source)
    stats = FrequencyStats.from_parquet(args.stats) if args.stats else None
    curves = CommCurves.from_json(args.curves) if args.curves else None
    world_size = curves.world_size if curves is not None else config.ranks
    if args.world_size is not None:
        world_size = args.world_size
    if world_size < 2:
        raise ConfigError(f"--world-size: expected at least 2, got {world_size}")
    topology = _topology(args, world_size, curves)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        planner = hot_cold_planner(
            topology,
            stats,
            hot_rows=args.hot_rows,
            curves=curves,
            batch_size=config.data.batch_size,
            num_waves=config.sharding.num_waves,
            dense_ms=args.dense_ms,
            debug=False,
        )
    for warning in caught:
        if "curves" in str(warning.message):
            print(f"warning: {warning.message}")
    planner.plan(model, hot_cold_sharders())
    decision = planner.decision
    frame, summary = explain(decision), summarize(decision)
    print_plan(frame, summary)
    _write(args, {"summary": summary, "tables": frame.to_dict("records")})
    if args.plot:
        draw_plan(summary, args.plot)
        print(f"wrote {args.plot}")


def _check_arguments(args: argparse.Namespace) -> None:
    check_outputs(args, "json", "plot")
    if args.memory_gib is not None and not args.memory_gib > 0:
        raise ConfigError(f"--memory-gib: expected more than 0, got {args.memory_gib:g}")
    if args.dense_ms is not None and not args.dense_ms >= 0:
        raise ConfigError(f"--dense-ms: expected at least 0, got {args.dense_ms:g}")


def _topology(args: argparse.Namespace, world_size: int, curves: CommCurves | None) -> Topology:
    memory = {}
    if args.memory_gib is not None:
        kind = "ddr_cap" if args.device == "cpu" else "hbm_cap"
        memory[kind] = int(args.memory_gib * _GIB)
    per_host = curves.ranks_per_host if curves is not None else 1
    return Topology(
        world_size=world_size,
        compute_device=args.device,
        local_world_size=per_host if world_size % per_host == 0 else 1,
        **memory,
    )


def _write(args: argparse.Namespace, content: dict[str, object]) -> None:
    if args.json:
        write_json(content, args.json)
        print(f"wrote {args.json}")
