"""``torchrec-picasso simulate``: counts and prices a step on clusters of up to 1,024 ranks."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torchrec_picasso.app.cli.outputs import (
    new_picture,
    print_table,
    save_picture,
    write_result,
)
from torchrec_picasso.app.config import load_config
from torchrec_picasso.app.launch.progress import Progress
from torchrec_picasso.app.simulation.simulate import Question, Simulated, simulate
from torchrec_picasso.app.simulation.stock_traffic import STOCK_TYPES
from torchrec_picasso.cost import CommCurves
from torchrec_picasso.errors import ConfigError
from torchrec_picasso.frequency import FrequencyStats

_MB, _GBYTES_PER_MBIT = 1e6, 1 / 8000


def run(args: argparse.Namespace) -> None:
    """Runs the subcommand; raises PicassoError for unusable input."""
    config = load_config(args.config)
    batch_size, parts = config.data.batch_size, args.micro_batches
    if parts is not None and parts > batch_size:
        raise ConfigError(
            f"--micro-batches: expected 1 to {batch_size}, the samples of a batch, got {parts}"
        )
    question = Question(
        config=config,
        clusters=_clusters(args),
        curves=_curves(args),
        stats=FrequencyStats.from_parquet(args.stats) if args.stats else None,
        hot_rows=args.hot_rows,
        dense_ms=args.dense_ms,
        num_micro_batches=args.micro_batches,
    )
    progress = Progress("simulate", 2 * max(args.ranks))
    found = simulate(question, progress.advance)
    progress.close()
    _print(question, found)
    if args.json:
        asked = {name: value for name, value in vars(args).items() if name not in ("json", "plot")}
        write_result({"question": asked, "clusters": [each.as_dict() for each in found]}, args.json)
        print(f"wrote {args.json}")
    if args.plot:
        draw({Path(args.config).stem: [each.as_dict() for each in found]}, args.plot)
        print(f"wrote {args.plot}")


def _clusters(args: argparse.Namespace) -> list[tuple[int, int]]:
    """Returns hosts, and ranks on each, for each number of ranks."""
    clusters = []
    for size in sorted(set(args.ranks)):
        places = min(args.ranks_per_host, max(1, size))
        if size % places:
            raise ConfigError(f"--ranks: expected whole hosts of {places}, got {size}")
        clusters.append((size // places, places))
    return clusters


def _curves(args: argparse.Namespace) -> CommCurves:
    if args.curves is not None:
        return CommCurves.from_json(args.curves)
    # of two ranks on a host each, so the latency is that of a message
    return CommCurves.assumed(
        2, gbytes_per_s=args.link_mbit * _GBYTES_PER_MBIT, latency_ms=args.latency_ms
    )


def _print(question: Question, found: Sequence[Simulated]) -> None:
    print(
        f"\nCounted: the batches of all ranks, {question.config.data.batch_size:,} samples each, "
        f"{'of the configuration' if question.stats is None else 'drawn from the statistics'}; "
        "priced by the cost model"
    )
    head = (
        "hosts x ranks",
        "rows: rank",
        "host",
        "all",
        "served",
        "",
        "step ms",
        "MB",
        "across MB",
    )
    lines = []
    for cluster in found:
        rows = [f"{n:,.0f}" for n in (cluster.rank_rows, cluster.host_rows, cluster.all_rows)]
        cells = [f"{cluster.hosts} x {cluster.ranks_per_host}", *rows]
        cells.append(f"{cluster.served_over_mean:.2f}")
        for each in cluster.priced:
            sent, across = sum(each.sent_bytes.values()) / _MB, each.across_bytes / _MB
            figures = f"{each.step.step_ms:,.1f}", f"{sent:,.2f}", f"{across:,.2f}"
            busiest = f"{each.busiest_over_mean:.2f}", f"{each.messages:,}"
            lines.append((*cells, each.name, *figures, *busiest))
            cells = [""] * len(cells)
    print_table((*head, "busiest", "messages"), *lines)
    print(
        "  rows: distinct cold rows of a rank's, a host's and all batches; served: rows of the "
        "busiest home rank over the mean;\n  MB: sent per rank for tables, across MB: per host to "
        "other hosts, busiest: bytes of the busiest rank over the mean; messages: sent per rank"
    )


def draw(
    clusters_of: Mapping[str, Sequence[Mapping[str, Any]]], path: str | Path, **options: Any
) -> None:
    """Draws the predicted step, and the bytes that a host sends to others, over ranks: a line of
    pictures for each model.

    Args:
        clusters_of: Clusters of each model, as in the JSON.
        path: File to write.
        **options: Options of matplotlib's ``savefig``.
    """
    num_models = len(clusters_of)
    figure, axes = new_picture(9.0, 4.0 * num_models, num_axes=2, num_lines=num_models)
    axes_M2 = axes.reshape(num_models, 2)
    for (steps, sent), (model, clusters) in zip(axes_M2, clusters_of.items()):
        for name in dict.fromkeys(each["name"] for found in clusters for each in found["priced"]):
            points = [
                (cluster["ranks"], each["step"]["step_ms"], each["across_bytes"] / _MB)
                for cluster in clusters
                for each in cluster["priced"]
                if each["name"] == name
            ]
            ranks, step_ms, across_mb = zip(*points)
            line = "--" if name in STOCK_TYPES else "-"
            label = name if steps is axes_M2[0, 0] else None
            steps.plot(ranks, step_ms, line, label=label, marker=".")
            sent.plot(ranks, across_mb, line, marker=".")
        steps.set(title=f"{model}: predicted step, ms", yscale="log")
        # one host sends nothing
        sent.set(title=f"{model}: sent per host to others, MB", yscale="symlog")
        for each in (steps, sent):
            each.set(xscale="log", xlabel="ranks")
            sizes = [cluster["ranks"] for cluster in clusters]
            each.set_xticks(sizes, list(map(str, sizes)))
            each.minorticks_off()
    save_picture(figure, path, **options)
