"""Simulated steps beside measured ones, on emulated hosts: bytes and milliseconds.

    python -m benchmarks.simulated --data ../shared/data/criteo_tb_80k.parquet \\
        -o benchmarks/results/simulated.json

A DLRM of 26 tables trains with whole tables under TrainPipelineSparseDist, and with row-exchanged
ones, flat and on hosts of several ranks by host, under InterleavedTrainPipeline with one
micro-batch and lookahead. Variants take turns. `torchrec-picasso simulate` gets the same samples
and the measured work of a rank; ranks that share a core take turns on it, so their work takes as
many times longer. Links are measured on the same hosts, up to the sizes that a step sends: gloo's
all-to-all fills a link the better the more messages share it, and what exceeds the largest
measured size has the slope between the last two, whatever disturbed them.

Bytes are what ranks handed to collectives, mean over ranks; errors are simulated over measured,
minus 1. The JSON has the measured links, and of a simulated step its work and its messages.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from benchmarks.cluster import ClusterError, run_on_hosts, usable_rate
from benchmarks.command import add_numbers, command_parser
from benchmarks.pipelines.question import Question as Settings
from benchmarks.pipelines.rankings import rankings
from benchmarks.pipelines.runner import RankResult, Runner, dlrm_trainer, take_turns
from benchmarks.pipelines.variants import parse_variant
from torchrec_picasso.app.cli.calibrate import calibrate_on_rank
from torchrec_picasso.app.cli.outputs import check_outputs, print_table, write_result
from torchrec_picasso.app.launch.progress import Progress
from torchrec_picasso.app.launch.quiet import quiet_upstream
from torchrec_picasso.app.launch.run_ranks import RankError
from torchrec_picasso.app.simulation.simulate import Question, Simulated, simulate
from torchrec_picasso.app.zoo.registry import make_source
from torchrec_picasso.cost import CommCurves
from torchrec_picasso.errors import PicassoError

_CLUSTERS = ("2x1", "4x1", "8x1", "2x2", "2x4", "4x2")
_FORMS = {"rows": "interleaved:1:0+rows", "node_rows": "interleaved:1:0+node_rows"}
_VARIANTS = {"table_wise": "table_wise", **_FORMS}
"""Variant of `benchmarks.pipelines` by its name in a simulation."""
_CURVES_MAX_BYTES, _LEAST_BYTES, _CURVES_SECONDS, _CURVES_BUDGET_S = 4 << 20, 4 << 10, 1.0, 120.0
_TIMEOUT_S = 600.0


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One variant on one cluster.

    Args:
        cluster: Hosts x ranks on each.
        name: Name of the variant in a simulation.
        measured_ms: Median step.
        simulated_ms: Predicted step.
        wire_ms: All messages of the predicted step, one after another.
        compute_ms: All work of the predicted step.
        measured_bytes: Bytes per rank and step.
        simulated_bytes: Counted bytes, with those of dense gradients.
    """

    cluster: str
    name: str
    measured_ms: float
    simulated_ms: float
    wire_ms: float
    compute_ms: float
    measured_bytes: float
    simulated_bytes: float

    @property
    def errors(self) -> tuple[float, float]:
        """Of the step, and of the bytes."""
        step = self.simulated_ms / self.measured_ms - 1
        return step, self.simulated_bytes / self.measured_bytes - 1


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and simulates each cluster.

    Returns:
        0; 2 where the options allow no answer.
    """
    args = _parser().parse_args(argv)
    try:
        check_outputs(args, "out")
        if (rate := usable_rate(args.rate_mbit)) is None:
            raise ClusterError("hosts of several ranks need links; see `benchmarks.cluster`")
        links, found = compare_all([_settings(args, name, rate) for name in args.clusters])
    except (PicassoError, RankError, ClusterError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    steps, sent = zip(*(each.errors for each in found))
    worst = {"step": max(map(abs, steps)), "bytes": max(map(abs, sent))}
    print(
        f"steps off by {median(map(abs, steps)):.0%} in the median, {worst['step']:.0%} at worst; "
        f"bytes by {worst['bytes']:.1%} at worst"
    )
    if args.out:
        lines = [{**dataclasses.asdict(each), "errors": each.errors} for each in found]
        question = {name: value for name, value in vars(args).items() if name != "out"}
        kept = {"question": question, "worst": worst, "compared": lines, "links": links}
        write_result(kept, args.out)
    return 0


def compare_all(clusters: Sequence[Settings]) -> tuple[dict[str, Any], list[Compared]]:
    """Measures work, then each cluster's links and variants, and prints these.

    Returns:
        Links by cluster, for JSON, and the variants.

    Raises:
        RankError: If a rank fails.
        ClusterError: If the links cannot be made.
    """
    pair = dataclasses.replace(clusters[0], hosts=2, ranks_per_host=1, rate_mbit=None)
    work = calibrate(pair, _LEAST_BYTES, with_work=True)  # links would only slow it
    links: dict[str, Any] = {}
    found: list[Compared] = []
    for cluster in clusters:
        measured = calibrate(cluster, _CURVES_MAX_BYTES)
        links[_name(cluster)] = dataclasses.asdict(measured)["collectives"]
        found += compare(cluster, dataclasses.replace(measured, local=work.local, dense=work.dense))
        _print(found[-len(cluster.variants) :])
    return links, found


def calibrate(settings: Settings, max_bytes: int, with_work: bool = False) -> CommCurves:
    """Measures links, and the work of a rank, on the hosts of some settings."""
    config = settings.config() if with_work else None
    arguments = max_bytes, _CURVES_SECONDS, with_work, _CURVES_BUDGET_S, config
    curves: CommCurves = run_on_hosts(
        calibrate_on_rank,
        settings.hosts,
        settings.rate_mbit,
        *arguments,
        timeout_s=_TIMEOUT_S,
        ranks_per_host=settings.ranks_per_host,
    )[0]
    return curves


def compare(settings: Settings, curves: CommCurves) -> list[Compared]:
    """Measures the variants of one cluster, and simulates them."""
    by_rank: list[list[RankResult]] = run_on_hosts(
        measure_on_rank,
        settings.hosts,
        settings.rate_mbit,
        settings,
        timeout_s=_TIMEOUT_S,
        ranks_per_host=settings.ranks_per_host,
    )
    found = rankings(by_rank, settings.batch_size, settings.ranks_per_host)
    per_core = settings.world_size / min(settings.world_size, os.cpu_count() or 1)
    question = Question(
        config=settings.config(),
        clusters=[(settings.hosts, settings.ranks_per_host)],
        curves=_slower(curves, per_core),
        num_micro_batches=1,
    )
    (simulated,) = simulate(question)
    return [
        Compared(
            cluster=_name(settings),
            name=priced.name,
            measured_ms=found[_VARIANTS[priced.name]].step_ms[1],
            simulated_ms=priced.step.step_ms,
            wire_ms=priced.step.wire_ms,
            compute_ms=priced.step.compute_ms,
            measured_bytes=found[_VARIANTS[priced.name]].metered_bytes_per_step,
            simulated_bytes=sum(priced.sent_bytes.values()) + _dense_bytes(simulated),
        )
        for priced in simulated.priced
        if priced.name in _VARIANTS
    ]


def measure_on_rank(rank: int, world_size: int, settings: Settings) -> list[RankResult]:
    """Lets the variants take turns. Collective: the main function of every rank."""
    quiet_upstream()
    torch.manual_seed(0)
    source = make_source(settings.config().data, seed=0)
    batches = list(itertools.islice(source.batches(rank, world_size), settings.num_steps))
    runners = []
    for name in settings.variants:
        variant = parse_variant(name)
        trainer = dlrm_trainer(variant, settings.config(), source)
        runners.append(Runner(variant, trainer, batches))
        runners[-1].warm_up(settings.num_steps)
    progress = Progress("measure", len(runners) * settings.rounds, shown=rank == 0)
    take_turns(runners, settings, progress)
    return [runner.result() for runner in runners]


def _settings(args: argparse.Namespace, cluster: str, rate_mbit: float | None) -> Settings:
    hosts, places = map(int, cluster.split("x"))
    variants = _VARIANTS if hosts > 1 and places > 1 else ("table_wise", "rows")
    return Settings(
        data=args.data,
        hosts=hosts,
        ranks_per_host=places,
        rate_mbit=rate_mbit,
        batch_size=args.batch_size,
        dim=args.dim,
        heldout_steps=1,
        rounds=args.rounds,
        block_steps=args.block_steps,
        variants=tuple(_VARIANTS[name] for name in variants),
    )


def _name(settings: Settings) -> str:
    return f"{settings.hosts}x{settings.ranks_per_host}"


def _dense_bytes(simulated: Simulated) -> float:
    return 2 * (simulated.ranks - 1) / simulated.ranks * simulated.dense_bytes


def _slower(curves: CommCurves, factor: float) -> CommCurves:
    """Multiplies the times of work, not those of links."""

    def times(costs: Any) -> Any:
        if dataclasses.is_dataclass(costs):
            parts = {name: times(cost) for name, cost in vars(costs).items()}
            return dataclasses.replace(costs, **parts)  # type: ignore[type-var]
        return costs * factor if isinstance(costs, float) else costs

    assert curves.dense is not None, "it was measured"
    dense = curves.dense.at(round(curves.dense.batch_size * factor))
    return dataclasses.replace(
        curves,
        local=times(curves.local),
        dense=dataclasses.replace(dense, batch_size=0),
        wire_core_ns=curves.core_ns_per_byte * factor,
    )


def _print(found: Sequence[Compared]) -> None:
    rows = [
        (
            f"{each.cluster} {each.name}",
            f"{each.measured_ms:,.0f}",
            f"{each.simulated_ms:,.0f}",
            f"{each.errors[0]:+.0%}",
            f"{each.measured_bytes / 1e6:.3f}",
            f"{each.simulated_bytes / 1e6:.3f}",
            f"{each.errors[1]:+.1%}",
        )
        for each in found
    ]
    head = ("cluster and variant", "ms", "simulated", "off by", "MB", "simulated", "off by")
    print_table(head, *rows)
    sys.stdout.flush()


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("benchmarks.simulated", __doc__)
    add = parser.add_argument
    add("--data", required=True, metavar="FILE", help="Criteo file")
    add("--clusters", nargs="+", choices=_CLUSTERS, default=_CLUSTERS, help="hosts x ranks")
    add("--rate-mbit", type=float, default=100.0, metavar="R", help="of each link (default: 100)")
    add("-o", "--out", metavar="FILE", help="JSON to write")
    add_numbers(
        parser,
        ("--batch-size", 512, 16, "samples per rank and step"),
        ("--dim", 64, 4, "columns of every table"),
        ("--rounds", 3, 1, "turns of every variant"),
        ("--block-steps", 3, 2, "timed steps of a turn"),
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
