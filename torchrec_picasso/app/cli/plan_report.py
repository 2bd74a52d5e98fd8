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

__all__ = ["draw_plan", "print_plan", "write_plan_json"]

_OURS, _STOCK = "#0b7285", "#9aa5b1"
_MIB, _MB = 1 << 20, 1e6


def print_plan(frame: pd.DataFrame, summary: dict[str, Any]) -> None:
    """Prints the decision: two lines per table, numbers and the reason, then the whole step.

    Args:
        frame: Of ``explain``.
        summary: Of ``summarize``.
    """
    head = ("hot rows", "coverage", "cold rows", "memory MiB")
    print(f"{'table':<12}{'rows':>12}{'dim':>5}" + "".join(f"{word:>11}" for word in head))
    for line in frame.to_dict("records"):
        memory = (line["home_bytes"] + line["replica_bytes"]) / _MIB
        print(
            f"{line['table']:<12}{line['rows']:>12,}{line['dim']:>5}{line['hot_rows']:>11,}"
            f"{line['coverage']:>11.1%}{line['cold_rows']:>11,.0f}{memory:>11,.1f}"
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


def write_plan_json(content: dict[str, Any], path: str | Path) -> None:
    """Writes the numbers with what they were computed on; renamed when whole."""
    target = Path(path)
    aside = target.with_name(target.name + ".tmp")
    document = {"environment": describe_environment(), **content}
    aside.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    os.replace(aside, target)


def draw_plan(summary: dict[str, Any], path: str | Path) -> None:
    """Draws the predicted step of every plan that was weighed, and of the one that was taken."""
    steps_ms = {**summary["priced_ms"], "taken": summary["step_ms"]}
    if summary["stock_ms"] is not None:
        steps_ms["stock"] = summary["stock_ms"]
    figure, axes = new_picture()
    colors = [_OURS if name == "taken" else _STOCK for name in steps_ms]
    axes.bar(list(steps_ms), list(steps_ms.values()), color=colors)
    axes.set(ylabel="predicted step, ms", title="Plans that were priced")
    save_picture(figure, axes, path)
