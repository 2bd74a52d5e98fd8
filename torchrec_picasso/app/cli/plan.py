"""``torchrec-picasso plan``: what the planner would decide, and why, on a cluster not at hand."""

from __future__ import annotations

import argparse
import dataclasses
import re
import warnings

from torchrec.distributed.planner import Topology

from torchrec_picasso.app.cli.outputs import check_outputs
from torchrec_picasso.app.cli.plan_report import draw_plan, draw_sweep, print_plan, print_sweep
from torchrec_picasso.app.cli.plan_report import write_plan_json as write_json
from torchrec_picasso.app.config import load_config
from torchrec_picasso.app.runs.placements import hot_cold_sharders
from torchrec_picasso.app.runs.trainer import unsharded_model
from torchrec_picasso.app.zoo.registry import make_source
from torchrec_picasso.cost import CommCurves
from torchrec_picasso.cost.dense import DenseTimes
from torchrec_picasso.decision.explain import explain, summarize
from torchrec_picasso.decision.what_if import sweep
from torchrec_picasso.errors import ConfigError
from torchrec_picasso.frequency import FrequencyStats
from torchrec_picasso.planner.planner import hot_cold_planner
from torchrec_picasso.planner.table_facts import assumed_curves, dense_bytes_of, facts_of_model

__all__ = ["run"]

_SWEEP = re.compile(r"(?:(world_size)=(\d+)\.\.(\d+)|(bandwidth)=(\d*\.?\d+)\.\.(\d*\.?\d+))")
_GIB = 1 << 30


def run(args: argparse.Namespace) -> None:
    """Runs the subcommand.

    Raises:
        PicassoError: If an argument or a file cannot be used, or the tables do not fit.
    """
    _check_arguments(args)
    sweep_over = _sweep_values(args.sweep) if args.sweep else None
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
    if sweep_over is not None:
        name, values = sweep_over
        frame = sweep(
            facts_of_model(model, stats, config.data.batch_size),
            stats,
            curves or assumed_curves(topology),
            batch_size=config.data.batch_size,
            world_sizes=[int(v) for v in values] if name == "world_size" else [world_size],
            bandwidths=values if name == "bandwidth" else (1.0,),
            dense=_dense(args.dense_ms, curves, dense_bytes_of(model)),
        )
        print_sweep(frame)
        _write(args, {"sweep": frame.to_dict("records")})
        if args.plot:
            draw_sweep(frame, name, args.plot)
            print(f"wrote {args.plot}")
        return
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
        draw_plan(frame, args.plot)
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


def _dense(dense_ms: float | None, curves: CommCurves | None, num_bytes: int) -> DenseTimes:
    """The dense part as the planner takes it."""
    if dense_ms is not None:
        return DenseTimes.of(dense_ms, num_bytes)
    known = curves.dense if curves is not None else None
    return dataclasses.replace(known or DenseTimes(), parameter_bytes=num_bytes)


def _sweep_values(text: str) -> tuple[str, list[float]]:
    found = _SWEEP.fullmatch(text)
    if found is None:
        raise ConfigError(
            f"--sweep: expected world_size=A..B with whole numbers or bandwidth=A..B, such as "
            f"world_size=2..1024; got {text!r}"
        )
    name, *ends = (group for group in found.groups() if group is not None)
    low, high = map(float, ends)
    least = 2.0 if name == "world_size" else 1e-6
    if not least <= low <= high:
        raise ConfigError(f"--sweep {text}: expected {least:g} <= A <= B")
    values = [low]
    while values[-1] * 2 <= high:
        values.append(values[-1] * 2)
    return name, values


def _write(args: argparse.Namespace, content: dict[str, object]) -> None:
    if args.json:
        write_json(content, args.json)
        print(f"wrote {args.json}")
