"""``torchrec-picasso plan``: prints the planner's decision for any cluster."""

from __future__ import annotations

import argparse
import warnings
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from torchrec.distributed.planner import Topology

from torchrec_picasso.app.cli.outputs import (
    OURS_COLOR,
    STOCK_COLOR,
    new_picture,
    save_picture,
    write_result,
)
from torchrec_picasso.app.config import load_config
from torchrec_picasso.app.runs.placements import hot_cold_sharders
from torchrec_picasso.app.runs.trainer import unsharded_model
from torchrec_picasso.app.zoo.registry import make_source
from torchrec_picasso.cost import CommCurves
from torchrec_picasso.errors import ConfigError
from torchrec_picasso.frequency import FrequencyStats
from torchrec_picasso.planner.explain import explain, summarize
from torchrec_picasso.planner.planner import hot_cold_planner

if TYPE_CHECKING:
    import pandas as pd

_GIB, _MIB, _MB = 1 << 30, 1 << 20, 1e6


def run(args: argparse.Namespace) -> None:
    """Runs the subcommand; raises PicassoError for unusable input."""
    config = load_config(args.config)
    model = unsharded_model(config, make_source(config.data, config.seed))
    stats = FrequencyStats.from_parquet(args.stats) if args.stats else None
    curves = CommCurves.from_json(args.curves) if args.curves else None
    world_size = args.world_size
    if world_size is None:
        world_size = curves.world_size if curves is not None else config.ranks
    if world_size < 2:
        raise ConfigError(f"--world-size: expected at least 2, got {world_size}")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        planner = hot_cold_planner(
            _topology(args, world_size, curves),
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
    frame, summary = explain(planner.decision), summarize(planner.decision)
    _print_tables(frame)
    _print_summary(summary, frame)
    if args.json:
        write_result({"summary": summary, "tables": frame.to_dict("records")}, args.json)
        print(f"wrote {args.json}")
    if args.plot:
        _draw(summary, args.plot)
        print(f"wrote {args.plot}")


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


def _print_tables(frame: pd.DataFrame) -> None:
    """Prints a line of numbers per table, and below tables that share a reason the reason."""
    head = ("hot rows", "coverage", "cold rows", "memory MiB")
    print(f"{'table':<12}{'rows':>12}{'dim':>5}" + "".join(f"{word:>11}" for word in head))
    for why, tables in groupby(frame.to_dict("records"), itemgetter("why")):
        for line in tables:
            memory = (line["home_bytes"] + line["replica_bytes"]) / _MIB
            print(
                f"{line['table']:<12}{line['rows']:>12,}{line['dim']:>5}{line['hot_rows']:>11,}"
                f"{line['coverage']:>11.1%}{line['cold_rows']:>11,.0f}{memory:>11,.1f}"
            )
        print(f"    {why}")


def _print_summary(summary: dict[str, Any], frame: pd.DataFrame) -> None:
    memory, num_parts = summary["memory_bytes"], summary["num_micro_batches"]
    print(
        f"\n{summary['world_size']} ranks x {summary['batch_size']} samples: "
        f"{summary['hot_cold_tables']} tables hot/cold with {summary['hot_rows']:,} hot rows, "
        f"{summary['stock_tables']} stock"
    )
    stock = ""
    if summary["stock_ms"] is not None:
        stock = (
            f"; all stock {summary['stock_ms']:.1f} ms, {summary['stock_sent_bytes'] / _MB:.1f} MB "
            f"({summary['speedup']:.2f}x)"
        )
    schedule = "under TrainPipelineSparseDist"
    if num_parts is not None:
        schedule = f"interleaved in {num_parts} micro-batch{'es' if num_parts > 1 else ''}"
    dense = "the dense part not known"
    if summary["dense_ms"]:
        dense = f"{summary['dense_ms']:.1f} ms of it dense"
    print(
        f"predicted step: {summary['step_ms']:.1f} ms {schedule}, no less than "
        f"{summary['wire_ms']:.1f} ms on the wire and {summary['compute_ms']:.1f} ms of work, "
        f"{dense}; {summary['sent_bytes'] / _MB:.1f} MB sent per rank{stock}"
    )
    if summary["priced_ms"]:
        priced = (f"{name} {ms:.1f} ms" for name, ms in summary["priced_ms"].items())
        print(f"predicted without hot rows: {', '.join(priced)}")
    print(
        f"memory per rank: homes {memory['home'] / _MIB:,.0f} MiB and replicas "
        f"{memory['replica'] / _MIB:,.1f} MiB, {memory['optimizer'] / _MIB:,.0f} MiB of both "
        f"optimizer state; buffers {memory['buffers'] / _MIB:,.0f} MiB, "
        f"{memory['lookahead'] / _MIB:,.0f} MiB of them for lookahead"
    )
    over = summary["busiest_over_mean"]
    fullest = max(summary["ranks"], key=lambda rank: rank["memory_bytes"])
    print(
        f"busiest rank over mean: rows served {over['served_bytes']:.2f} (lookups "
        f"{over['served_lookups']:.2f}), bytes sent {over['sent_bytes']:.2f}, received "
        f"{over['received_bytes']:.2f}, memory {over['memory_bytes']:.2f} (rank "
        f"{summary['ranks'].index(fullest)}, {fullest['memory_bytes'] / _MIB:,.0f} MiB); stock "
        f"table_wise {over['table_wise']:.2f}, column_wise {over['column_wise']:.2f}"
        f"{_row_wise(over, frame)}"
    )
    plans = {"this plan": summary["ranks"], **summary["stock_ranks"]}
    sent = (
        f"{name} {max(r['sent_bytes'] for r in each) / _MB:.1f}" for name, each in plans.items()
    )
    print(f"MB sent by the busiest rank: {', '.join(sent)}")
    held = (
        f"{name} {max(r['memory_bytes'] for r in each) / _MIB:,.0f}" for name, each in plans.items()
    )
    print(f"MiB of tables and buffers on the fullest rank: {', '.join(held)}")


def _row_wise(over: dict[str, float], frame: pd.DataFrame) -> str:
    if "row_wise" not in over:
        return ""
    # the table that gives its busiest rank most beyond an equal share
    beyond = frame["lookups"] * (frame["row_wise_load"] - 1)
    table = frame.loc[beyond.idxmax()]
    return f", row_wise {over['row_wise']:.2f} ({table['row_wise_load']:.2f} on {table['table']})"


def _draw(summary: dict[str, Any], path: str) -> None:
    """Draws the predicted step time of every plan that was priced, and of the chosen one."""
    steps_ms = {**summary["priced_ms"], "taken": summary["step_ms"]}
    if summary["stock_ms"] is not None:
        steps_ms["stock"] = summary["stock_ms"]
    figure, axes = new_picture()
    colors = [OURS_COLOR if name == "taken" else STOCK_COLOR for name in steps_ms]
    axes.bar(list(steps_ms), list(steps_ms.values()), color=colors)
    axes.set(ylabel="predicted step, ms", title="Plans that were priced")
    save_picture(figure, path)
