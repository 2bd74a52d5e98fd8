"""Bytes, step, busiest rank and memory of HSTU with long histories, drawn from kept results.

    python -m benchmarks.hstu -o docs/hstu.svg

Bytes and steps are measured by `benchmarks.scoreboard --only hstu_long`, under
TrainPipelineSparseDist, ours under its own; memory by `benchmarks.sequence_memory`, of a step of
one table; lookups that each of four ranks serves are counted by `benchmarks.hstu_losses`. Equal
files give an equal picture.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

from benchmarks.command import SVG_OPTIONS, SVG_STYLE, command_parser
from torchrec_picasso.app.cli.outputs import OURS_COLOR, STOCK_COLOR, new_picture, save_picture
from torchrec_picasso.cost.stock import over_mean

RESULTS = Path(__file__).parent / "results"
STOCK = ("row_wise", "table_wise", "column_wise")


def main(argv: Sequence[str] | None = None) -> int:
    """Draws the picture."""
    parser = command_parser("benchmarks.hstu", __doc__)
    parser.add_argument("-o", "--out", required=True, metavar="FILE", help="picture, .svg")
    args = parser.parse_args(argv)
    panels = read()
    with matplotlib.rc_context(SVG_STYLE):
        figure, axes = new_picture(9.0, 2.0, num_axes=len(panels))
        for each, (title, by_plan) in zip(axes, panels.items()):
            bars(each, title, by_plan)
        for each in axes[1:]:
            each.set_yticklabels([])
        save_picture(figure, args.out, **SVG_OPTIONS)
    return 0


def read() -> dict[str, dict[str, float]]:
    """Returns the figures of each panel, by plan."""
    variants = _kept("hstu_long")["variants"]
    served = _kept("hstu_losses")["served_lookups"]
    held = _kept("sequence_memory")["found"]
    stock = dict(zip(STOCK, STOCK))
    trained = {**stock, "ours": "ours"}
    counted = {**stock, "ours": "all_rows"}
    recorded = {**stock, "ours": "ours:1:ahead"}
    sent = {plan: variants[n]["metered_bytes_per_step"] / 1e6 for plan, n in trained.items()}
    step_ms = {plan: variants[name]["step_ms"][1] for plan, name in trained.items()}
    peaks = {plan: max(r["peak_bytes"] for r in held[n]) / 1e6 for plan, n in recorded.items()}
    return {
        "measured:\nMB sent per rank": sent,
        "measured:\nms a step": step_ms,
        "lookups served, 4 ranks:\nbusiest over mean": {
            plan: over_mean(served[name]) for plan, name in counted.items()
        },
        "measured, one table:\npeak of a step, MB": peaks,
    }


def bars(axes: Any, title: str, by_plan: Mapping[str, float]) -> None:
    """Draws a figure of each plan, ours in its own colour, the first plan on top."""
    colors = [OURS_COLOR if "ours" in plan else STOCK_COLOR for plan in by_plan]
    names = [plan.replace("_", "-") for plan in by_plan]
    drawn = axes.barh(names, list(by_plan.values()), color=colors)
    most = max(by_plan.values())
    axes.bar_label(drawn, fmt="{:,.1f}" if most < 100 else "{:,.0f}", padding=3)
    axes.set_xlim(0, 1.5 * most)
    axes.set_title(title, fontsize="small")
    axes.invert_yaxis()


def _kept(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


if __name__ == "__main__":
    sys.exit(main())
