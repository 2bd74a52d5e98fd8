"""A plan on the screen, as JSON and as a picture."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrec_picasso.app.cli.outputs import new_picture, save_picture
from torchrec_picasso.app.launch.environment import describe_environment

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["draw_plan", "draw_sweep", "print_plan", "print_sweep", "write_plan_json"]

_KINDS = ("hot_cold", "table_wise", "row_wise", "column_wise", "data_parallel")
_COLORS = {"hot_cold": "#0b7285", "table_wise": "#9aa5b1", "row_wise": "#c9b79c"}
_MIB, _MB = 1 << 20, 1e6
_MOST_BARS = 40


def print_plan(frame: pd.DataFrame, summary: dict[str, Any]) -> None:
    """Prints the decision: two lines per table, numbers and the reason, then the whole step.

    Args:
        frame: Of ``explain``.
        summary: Of ``summarize``.
    """
    head = ("table", "rows", "dim", "hot rows", "coverage", "cold rows", "memory MiB")
    kinds = "".join(f"{kind + ' ms / MB':>23}" for kind in _KINDS)
    print(f"{head[0]:<12}{head[1]:>12}{head[2]:>5}" + "".join(f"{h:>11}" for h in head[3:]) + kinds)
    for line in frame.to_dict("records"):
        memory = (line["home_bytes"] + line["replica_bytes"]) / _MIB
        costs = "".join(
            f"{line[f'{kind}_ms']:>14.2f} /{line[f'{kind}_bytes'] / _MB:>7.2f}" for kind in _KINDS
        )
        print(
            f"{line['table']:<12}{line['rows']:>12,}{line['dim']:>5}{line['hot_rows']:>11,}"
            f"{line['coverage']:>11.1%}{line['cold_rows']:>11,.0f}{memory:>11,.1f}{costs}"
        )
        print(f"    {line['why']}")
    _print_summary(summary)


def _print_summary(summary: dict[str, Any]) -> None:
    memory = summary["memory_bytes"]
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
    print(
        f"predicted step: {summary['step_ms']:.1f} ms {_schedule(summary)}, no less than "
        f"{summary['wire_ms']:.1f} ms on the wire and {summary['compute_ms']:.1f} ms of work, "
        f"{_dense(summary)}; {summary['sent_bytes'] / _MB:.1f} MB sent per rank{stock}"
    )
    print(
        f"memory per rank: homes {memory['home'] / _MIB:,.0f} MiB and replicas "
        f"{memory['replica'] / _MIB:,.1f} MiB, {memory['optimizer'] / _MIB:,.0f} MiB of both "
        f"optimizer state; buffers {memory['buffers'] / _MIB:,.0f} MiB"
    )
    if summary["home_max_over_mean"] is not None:
        print(
            "load of the homes, max over mean: "
            f"{summary['even_home_max_over_mean']:.2f} with equal blocks, "
            f"{summary['home_max_over_mean']:.2f} as cut"
        )


def _schedule(summary: dict[str, Any]) -> str:
    pieces = summary["num_micro_batches"]
    if pieces is None:
        return "under TrainPipelineSparseDist"
    return f"interleaved in {pieces} micro-batch{'es' if pieces > 1 else ''}"


def _dense(summary: dict[str, Any]) -> str:
    if not summary["dense_ms"]:
        return "the dense part not known"
    return f"{summary['dense_ms']:.1f} ms of it dense"


def print_sweep(frame: pd.DataFrame) -> None:
    """Prints one line per world size and bandwidth."""
    print(
        f"{'ranks':>6}{'bandwidth':>11}{'hot/cold':>10}{'stock':>7}{'hot rows':>11}{'cut':>5}"
        f"{'step ms':>10}{'stock ms':>10}{'speed-up':>10}{'MB sent':>9}{'homes':>7}"
    )
    for line in frame.to_dict("records"):
        balance, pieces = line["home_max_over_mean"], line["num_micro_batches"]
        print(
            f"{line['world_size']:>6}{line['bandwidth']:>10g}x{line['hot_cold_tables']:>10}"
            f"{line['stock_tables']:>7}{line['hot_rows']:>11,}"
            f"{pieces or '-':>5}{line['step_ms']:>10.1f}"
            f"{line['stock_ms']:>10.1f}{line['speedup']:>9.2f}x{line['sent_bytes'] / _MB:>9.1f}"
            f"{'-' if balance is None else f'{balance:.2f}':>7}"
        )
    print("(extrapolated: bandwidth per rank as measured, latency growing with the peers)")


def write_plan_json(content: dict[str, Any], path: str | Path) -> None:
    """Writes the numbers with what they were computed on; renamed when whole."""
    target = Path(path)
    aside = target.with_name(target.name + ".tmp")
    document = {"environment": describe_environment(), **content}
    aside.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    os.replace(aside, target)


def draw_plan(frame: pd.DataFrame, path: str | Path) -> None:
    """Draws what each table adds to a step, hot/cold against stock table- and row-wise."""
    shown = frame.sort_values("table_wise_ms", ascending=False, kind="stable").head(_MOST_BARS)
    figure, axes = new_picture(width=max(6, 0.4 * len(shown)))
    width = 0.8 / len(_COLORS)
    for index, (kind, color) in enumerate(_COLORS.items()):
        places = [position + (index - 1) * width for position in range(len(shown))]
        axes.bar(places, shown[f"{kind}_ms"], width, color=color, label=kind)
    axes.set_xticks(range(len(shown)), shown["table"], rotation=90)
    axes.set(ylabel="ms per step", title="What each table adds to a step")
    save_picture(figure, axes, path)


def draw_sweep(frame: pd.DataFrame, over: str, path: str | Path) -> None:
    """Draws the predicted step against world size or bandwidth, ours and stock."""
    figure, axes = new_picture()
    for column, kind, label in (
        ("step_ms", "hot_cold", "plan"),
        ("stock_ms", "table_wise", "all stock"),
    ):
        axes.plot(frame[over], frame[column], color=_COLORS[kind], marker="o", label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set(xlabel=over.replace("_", " "), ylabel="embedding part of a step, ms")
    save_picture(figure, axes, path)
