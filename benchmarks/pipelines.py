"""Train pipelines and placements against each other, on hosts with links of a real network's rate.

    python -m benchmarks.pipelines --data ../shared/data/criteo_tb_80k.parquet \\
        --rate-mbit 1000 --towers thin -o out.json --plot out.png

A DLRM trains under each contestant from the same weights on the same batches. The stock contestants
are probed alone first, since not all models fit into memory together; the fastest that trains the
same model meets ours. Contestants take turns in blocks of steps, in alternating order, so whatever
else the machine does hits all of them. Contestants: table_wise, row_wise, column_wise and planner
(TorchRec's own), each under TrainPipelineSparseDist; fused, the best of them under
TrainPipelineFusedSparseDist where that runs; hot_cold (the planner's choice by measured curves) and
hot_cold:HOT_ROWS under TrainPipelineSparseDist; interleaved:K and interleaved:K:HOT_ROWS, the same
under InterleavedTrainPipeline with K micro-batches.

What is reported:

- A step lasts as long as on its slowest rank, each timing its own ``progress()``. Samples per
  second are of all ranks, by the median block.
- CPU seconds are of all ranks with all their threads.
- Link bytes are what the busiest host's link carried in one direction, headers included; metered
  bytes are what ranks handed to collectives, mean over ranks.
- The exposed share is 1 - (CPU time of the thread that trains / wall time) over all timed steps:
  the thread waits for the wire, for a slower rank, or for its core.
- Floors of a step: the best of ours cannot be faster than its bytes at the link's rate, and hardly
  faster than hot_cold:0 on one rank with the same batch per rank, which sends nothing and has the
  machine to itself.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import itertools
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torchrec.datasets.utils import Batch

from benchmarks.cluster import run_on_hosts, usable_rate
from benchmarks.contestants import (
    Contestant,
    RankResult,
    Runner,
    Standing,
    interleaved_is_missing,
    parse_contestant,
    standings,
)
from torchrec_picasso.cli.calibrate import calibrate_on_rank
from torchrec_picasso.cli.outputs import check_outputs, new_picture, save_picture
from torchrec_picasso.config import DataConfig, ModelConfig, ShardingConfig, TrainConfig
from torchrec_picasso.cost import CommCurves
from torchrec_picasso.errors import ConfigError, PicassoError
from torchrec_picasso.workloads.environment import describe_environment
from torchrec_picasso.workloads.launch import RankError, run_ranks
from torchrec_picasso.workloads.progress import Progress
from torchrec_picasso.workloads.quiet import quiet_upstream
from torchrec_picasso.workloads.samples import check_source, make_source
from torchrec_picasso.workloads.source import BatchSource
from torchrec_picasso.workloads.tables import table_specs

TOWERS = {"thin": ((64,), (64,)), "dlrm": ((512, 256), (512, 512, 256))}
GENERATED = {"uniform": 0.0, "zipf": 1.05}
"""Data without a file: exponent of the ids' distribution."""
CONTESTANTS = (
    *("table_wise", "row_wise", "column_wise", "planner", "fused"),
    *("hot_cold", "hot_cold:0", "hot_cold:5000", "interleaved:2", "interleaved:4"),
)

_WARMUP_STEPS, _COUNTED_STEPS, _LAST_STEPS = 3, 2, 3  # the last ones read no further batch ahead
_PROBE_STEPS, _FLOOR_STEPS = 4, 10
_MAX_BATCHES = 32
_CURVES_MAX_BYTES, _CURVES_SECONDS = 64 << 20, 0.3
_TIMEOUT_S = 7200.0
_LEAST_EXPOSED = 0.05
_MB = 1e6
_STOCK_COLOR, _OURS_COLOR = "#9aa5b1", "#0b7285"


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is measured.

    Args:
        hosts: Hosts of the cluster.
        ranks_per_host: Ranks on each.
        rate_mbit: Rate of their links that this machine can give; ``None`` = loopback.
        data: A Criteo file, or a name in :data:`GENERATED`.
        batch_size: Samples per rank and step.
        dim: Columns of every table.
        towers: A name in :data:`TOWERS`.
        max_rows: Cap on a table's rows; ids wrap around.
        heldout_steps: Global batches that hot rows are chosen from, and none is trained on.
        rounds: Turns of every contestant.
        block_steps: Timed steps of a turn.
        contestants: Their names.
    """

    hosts: int
    ranks_per_host: int
    rate_mbit: float | None
    data: str
    batch_size: int
    dim: int
    towers: str
    max_rows: int
    heldout_steps: int
    rounds: int
    block_steps: int
    contestants: tuple[str, ...]

    @property
    def world_size(self) -> int:
        """Ranks of all hosts."""
        return self.hosts * self.ranks_per_host

    @property
    def num_steps(self) -> int:
        """Steps that every contestant takes."""
        timed = self.rounds * (self.block_steps + 1)
        return _WARMUP_STEPS + _COUNTED_STEPS + timed + _LAST_STEPS

    def config(self) -> TrainConfig:
        """The training run, but for the placement."""
        dense_layers, over_layers = TOWERS[self.towers]
        generated = self.data in GENERATED
        return TrainConfig(
            data=DataConfig(
                path=None if generated else self.data,
                zipf_exponent=GENERATED.get(self.data, 0.0),
                batch_size=self.batch_size,
                cardinalities="criteo_terabyte_10m",
                max_rows=self.max_rows,
                heldout_steps=self.heldout_steps,
            ),
            model=ModelConfig(
                embedding_dim=self.dim, dense_layers=dense_layers, over_layers=over_layers
            ),
            sharding=ShardingConfig(),
        )


@dataclass(frozen=True, kw_only=True)
class RankAnswer:
    """What one rank brings home.

    Args:
        results: Of the contestants of the final run.
        probe_ms: Step time of every stock contestant that was probed.
        left_out: Why a contestant that was asked for did not run.
    """

    results: list[RankResult]
    probe_ms: dict[str, float]
    left_out: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Report:
    """The whole answer, as it is written.

    Args:
        question: What was measured.
        contestants: Of the final run.
        probe_ms: Step time of every stock contestant that was probed.
        left_out: Why a contestant that was asked for did not run.
        floors: As :func:`floors` gives them.
    """

    question: Question
    contestants: dict[str, Standing]
    probe_ms: dict[str, float]
    left_out: dict[str, str]
    floors: dict[str, float | None]


def compare_on_rank(rank: int, world_size: int, question: Question, curves: str) -> RankAnswer:
    """Calibrates if it must, probes the stock contestants, and lets the finalists take turns.

    Collective: the main function of every rank.

    Args:
        rank: This rank.
        world_size: Ranks in the default process group.
        question: What to measure.
        curves: File of measured curves; written if some contestant needs it and it is missing.
    """
    quiet_upstream()
    torch.manual_seed(0)
    contestants = [parse_contestant(name) for name in question.contestants]
    if any(contestant.needs_curves for contestant in contestants):
        _provide_curves(rank, world_size, curves)
    source = make_source(question.config().data, seed=0)
    num_batches = min(_MAX_BATCHES, question.num_steps)
    batches = list(itertools.islice(source.batches(rank, world_size), num_batches))
    finalists, probe_ms, left_out = _finalists(rank, contestants, question, source, batches)
    per_finalist = 1 + question.num_steps
    progress = Progress("compare", len(finalists) * per_finalist, shown=rank == 0)
    runners = []
    for contestant in finalists:
        progress.tell(f"{contestant.name}, building and warming up")
        runner = Runner(
            contestant,
            question.config(),
            source,
            batches,
            question.num_steps,
            curves=curves,
            on_links=question.rate_mbit is not None,
        )
        runner.train(_WARMUP_STEPS)
        runner.count(_COUNTED_STEPS)
        runners.append(runner)
        progress.advance(1 + _WARMUP_STEPS + _COUNTED_STEPS)
    for turn in range(question.rounds):
        for runner in runners if turn % 2 == 0 else runners[::-1]:
            progress.tell(f"{runner.contestant.name}, round {turn + 1} of {question.rounds}")
            runner.block(question.block_steps)
            progress.advance(1 + question.block_steps)
    for runner in runners:
        runner.train(_LAST_STEPS)
        progress.advance(_LAST_STEPS)
    progress.close()
    results = [runner.result() for runner in runners]
    return RankAnswer(results=results, probe_ms=probe_ms, left_out=left_out)


def floor_on_rank(rank: int, world_size: int, question: Question) -> float:
    """Milliseconds of a step of ``hot_cold:0``: the compute floor, when the group has one rank."""
    quiet_upstream()
    source = make_source(question.config().data, seed=0)
    num_steps = _WARMUP_STEPS + 1 + _FLOOR_STEPS + _LAST_STEPS
    batches = list(itertools.islice(source.batches(rank, world_size), num_steps))
    contestant = parse_contestant("hot_cold:0")
    return _alone_ms(contestant, question, source, batches, _FLOOR_STEPS)[0]


def _provide_curves(rank: int, world_size: int, path: str) -> None:
    is_there = [Path(path).is_file()]
    dist.broadcast_object_list(is_there)
    if is_there[0]:
        return
    curves = calibrate_on_rank(rank, world_size, _CURVES_MAX_BYTES, _CURVES_SECONDS, True)
    if rank == 0:
        curves.to_json(path)
    dist.barrier()


def _finalists(
    rank: int,
    contestants: Sequence[Contestant],
    question: Question,
    source: BatchSource,
    batches: Sequence[Batch],
) -> tuple[list[Contestant], dict[str, float], dict[str, str]]:
    """The best stock contestant and ours; also a stock one that is faster at another model."""
    stock = [c for c in contestants if c.is_stock and c.placement]
    fused = [c for c in contestants if c.pipeline == "fused"]
    ours = [c for c in contestants if not c.is_stock]
    probe_ms: dict[str, float] = {}
    left_out: dict[str, str] = {}
    is_exact: dict[str, bool] = {}
    progress = Progress("probe", len(stock) + len(fused), shown=rank == 0)
    for contestant in stock if len(stock) > 1 else []:
        progress.tell(contestant.name)
        name = contestant.name
        probe_ms[name], is_exact[name] = _alone_ms(contestant, question, source, batches)
        progress.advance()

    def speed(contestant: Contestant) -> float:
        return probe_ms.get(contestant.name, 0.0)

    best = min([c for c in stock if is_exact.get(c.name, True)] or stock, key=speed)
    fastest = min(stock, key=speed)
    finalists = [best] if fastest is best else [best, fastest]
    for contestant in fused:
        progress.tell(contestant.name)
        name = f"{best.name}+fused"
        contestant = dataclasses.replace(contestant, name=name, placement=best.placement)
        try:
            probe_ms[name], _ = _alone_ms(contestant, question, source, batches)
            finalists.append(contestant)
        except (RuntimeError, TypeError, AttributeError, NotImplementedError) as error:
            # the same on every rank: what TorchRec's pipeline cannot do, it can do nowhere
            place = traceback.extract_tb(error.__traceback__)[-1].line
            left_out[name] = f"{type(error).__name__}: {error} at `{place}`"
        gc.collect()
        progress.advance()
    progress.close()
    return finalists + ours, probe_ms, left_out


def _alone_ms(
    contestant: Contestant,
    question: Question,
    source: BatchSource,
    batches: Sequence[Batch],
    num_steps: int = _PROBE_STEPS,
) -> tuple[float, bool]:
    """Median step of a contestant that runs alone, and whether it trains the same model."""
    total = _WARMUP_STEPS + 1 + num_steps + _LAST_STEPS
    runner = Runner(contestant, question.config(), source, batches, total)
    runner.train(_WARMUP_STEPS)
    step_ms = torch.tensor(median(runner.block(num_steps).step_s) * 1e3)
    runner.train(_LAST_STEPS)
    dist.all_reduce(step_ms, dist.ReduceOp.MAX)
    is_exact = runner.result().trains_same_model
    del runner
    gc.collect()
    return float(step_ms), is_exact


def floors(
    question: Question, found: Mapping[str, Standing], compute_ms: float
) -> dict[str, float | None]:
    """What a step of our best contestant is bounded by.

    Returns:
        ``wire_ms`` (``None`` on loopback), ``compute_ms``, ``step_ms`` of that contestant and
        ``step_over_floor``, its step over the larger floor.
    """
    ours = [standing for standing in found.values() if not standing.is_stock]
    best = max(ours or list(found.values()), key=lambda standing: standing.samples_per_s)
    wire_ms = None
    if question.rate_mbit is not None and best.link_bytes_per_step is not None:
        wire_ms = best.link_bytes_per_step * 8 / (question.rate_mbit * 1e6) * 1e3
    step_ms = best.step_ms[1]
    return {
        "wire_ms": wire_ms,
        "compute_ms": compute_ms,
        "step_ms": step_ms,
        "step_over_floor": step_ms / max(wire_ms or 0.0, compute_ms),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one question and prints the answer; returns 2 where the options allow none."""
    args = _parser().parse_args(argv)
    try:
        check_outputs(args, "out", "plot", "curves")
        question, left_out = _question(args)
        with tempfile.TemporaryDirectory(prefix="pipelines_") as folder:
            answers = _compare(question, args.curves or str(Path(folder) / "curves.json"))
        compute_ms = _compute_floor_ms(question)
    except (PicassoError, RankError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    results_RC = [answer.results for answer in answers]
    found = standings(results_RC, question.batch_size, question.ranks_per_host)
    report = Report(
        question=question,
        contestants=found,
        probe_ms=answers[0].probe_ms,
        left_out=left_out | answers[0].left_out,
        floors=floors(question, found, compute_ms),
    )
    _print(report)
    if args.out:
        document = {"environment": describe_environment(), **dataclasses.asdict(report)}
        Path(args.out).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    if args.plot:
        _draw(report, args.plot)
    return 0


def _compare(question: Question, curves: str) -> list[RankAnswer]:
    if question.rate_mbit is None:
        ranks = question.world_size
        return run_ranks(compare_on_rank, ranks, question, curves, timeout_s=_TIMEOUT_S)
    return run_on_hosts(
        compare_on_rank,
        question.hosts,
        question.rate_mbit,
        question,
        curves,
        timeout_s=_TIMEOUT_S,
        ranks_per_host=question.ranks_per_host,
    )


def _compute_floor_ms(question: Question) -> float:
    on_start = _keep_to_one_core if question.rate_mbit is not None else None
    return run_ranks(floor_on_rank, 1, question, timeout_s=_TIMEOUT_S, on_start=on_start)[0]


def _keep_to_one_core(rank: int) -> None:
    """As the ranks of an emulated cluster."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


def _question(args: argparse.Namespace) -> tuple[Question, dict[str, str]]:
    """The question of a command line, and why contestants that were asked for are left out."""
    contestants = {name: parse_contestant(name) for name in args.contestants.split(",")}
    left_out = {}
    missing = interleaved_is_missing()
    for name, contestant in list(contestants.items()):
        if contestant.pipeline == "interleaved" and missing is not None:
            left_out[name] = missing
            del contestants[name]
    if not any(c.is_stock and c.pipeline == "sparse_dist" for c in contestants.values()):
        raise ConfigError("--contestants: there is no stock one to compare with; add table_wise")
    if args.curves and Path(args.curves).is_file():
        CommCurves.from_json(args.curves)
    question = Question(
        hosts=args.hosts,
        ranks_per_host=args.ranks_per_host,
        rate_mbit=usable_rate(args.rate_mbit or None),
        data=args.data,
        batch_size=args.batch_size,
        dim=args.dim,
        towers=args.towers,
        max_rows=args.max_rows,
        heldout_steps=args.heldout_steps,
        rounds=args.rounds,
        block_steps=args.block_steps,
        contestants=tuple(contestants),
    )
    data = question.config().data
    check_source(make_source(data, seed=0), question.world_size)
    stock = [c for c in contestants.values() if c.is_stock]
    _check_memory(data, args.dim, len(contestants) - len(stock) + min(3, len(stock)))
    return question, left_out


def _check_memory(data: DataConfig, dim: int, num_models: int) -> None:
    """Refuses what would end in the kernel's killing of a rank, where the kernel tells."""
    facts = Path("/proc/meminfo")
    if not facts.is_file():
        return
    words = facts.read_text().partition("MemAvailable:")[2].split()
    needed = num_models * dim * 4 * sum(table.num_embeddings for table in table_specs(data))
    if words and needed > int(words[0]) * 1024:
        raise ConfigError(
            f"the tables of {num_models} contestants take {needed / 1e9:.1f} GB, but "
            f"{int(words[0]) / 1e6:.1f} GB of memory are free; lower --max-rows or --dim, or name "
            "fewer --contestants"
        )


def _print(report: Report) -> None:
    question, found = report.question, report.contestants
    link = f"{question.rate_mbit:g} Mbit/s" if question.rate_mbit else "loopback"
    print(
        f"{question.data}: {question.hosts} hosts x {question.ranks_per_host} ranks x "
        f"{question.batch_size} samples, dim {question.dim}, {question.towers} towers, {link}"
    )
    if report.probe_ms:
        probes = (f"{name} {ms:.0f}" for name, ms in report.probe_ms.items())
        print(f"  stock contestants alone, ms per step: {', '.join(probes)}")
    for name, reason in report.left_out.items():
        print(f"  left out: {name} ({reason})")
    print(
        f"  {'':<22}{'samples/s':>10}{'x stock':>9}{'by round':>14}{'step ms':>9}{'quartiles':>17}"
        f"{'CPU s':>8}{'link MB':>9}{'meter MB':>10}{'exposed':>9}{'loss diff.':>12}"
    )
    for name, of in found.items():
        low, middle, high = of.step_ms
        rounds = f"{min(of.ratio_by_round):.2f} to {max(of.ratio_by_round):.2f}"
        link_mb = f"{of.link_bytes_per_step / _MB:.2f}" if of.link_bytes_per_step else "-"
        mark = "" if of.trains_same_model else " *"
        print(
            f"  {name + mark:<22}{of.samples_per_s:>10.0f}{of.ratio:>9.2f}{rounds:>14}"
            f"{middle:>9.1f}{f'{low:.1f} to {high:.1f}':>17}{of.cpu_s_per_step:>8.3f}{link_mb:>9}"
            f"{of.metered_bytes_per_step / _MB:>10.2f}{of.exposed_share:>9.0%}"
            f"{of.max_loss_difference:>12.0e}"
        )
    if not all(of.trains_same_model for of in found.values()):
        print("  * tables cut by columns have a row-wise Adagrad state per cut: another optimizer")
    for name, of in found.items():
        if not of.is_stock:
            kinds = ", ".join(f"{count} {kind}" for kind, count in of.tables.items())
            print(f"  {name}: {kinds}; {of.hot_rows} hot rows")
    bounds = report.floors
    wire = "-" if bounds["wire_ms"] is None else f"{bounds['wire_ms']:.0f} ms"
    print(
        f"  floors of a step: wire {wire}, compute {bounds['compute_ms']:.0f} ms; our best takes "
        f"{bounds['step_ms']:.0f} ms, {bounds['step_over_floor']:.2f} of the larger one"
    )
    exposed = max(of.exposed_share for of in found.values() if of.is_stock)
    if exposed < _LEAST_EXPOSED:
        print(f"  stock waits for {exposed:.0%} of its step: no placement or pipeline can win here")


def _draw(report: Report, path: str) -> None:
    """Bars of samples per second, with the ratio to the best stock contestant on each."""
    found = report.contestants
    figure, axes = new_picture(width=2.5 + 1.2 * len(found))
    bars = axes.bar(
        [name.replace("+", "\n+ ").replace(":", "\n", 1) for name in found],
        [of.samples_per_s for of in found.values()],
        color=[_STOCK_COLOR if of.is_stock else _OURS_COLOR for of in found.values()],
        width=0.6,
    )
    axes.bar_label(bars, [f"{of.ratio:.2f} x" for of in found.values()], padding=3)
    axes.margins(y=0.12)
    question = report.question
    link = f"links of {question.rate_mbit:g} Mbit/s" if question.rate_mbit else "loopback"
    axes.set(
        ylabel="samples per second",
        title=f"{question.hosts} x {question.ranks_per_host} ranks x {question.batch_size} "
        f"samples, dim {question.dim}, {question.towers} towers, {link}",
    )
    save_picture(figure, axes, path)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pipelines", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--data", required=True, help=f"Criteo file, or one of {', '.join(GENERATED)} to generate")
    add("--rate-mbit", type=float, default=1000.0, help="rate of each link; 0 = loopback")
    add("--towers", choices=tuple(TOWERS), default="thin")
    add("--contestants", default=",".join(CONTESTANTS), metavar="A,B,...")
    add("--curves", metavar="FILE", help="measured curves, written if missing")
    add("-o", "--out", metavar="FILE", help="JSON to write")
    add("--plot", metavar="FILE", help="picture to write")
    for name, default, least, what in (
        ("--hosts", 2, 1, "hosts"),
        ("--ranks-per-host", 1, 1, "ranks that share a host's link"),
        ("--batch-size", 4096, 1, "samples per rank and step"),
        ("--dim", 128, 4, "columns of every table"),
        ("--max-rows", 500_000, 1, "cap on a table's rows"),
        ("--heldout-steps", 4, 1, "global batches to choose hot rows from"),
        ("--rounds", 6, 1, "turns of every contestant"),
        ("--block-steps", 4, 2, "timed steps of a turn"),
    ):
        what = f"{what} (default: {default})"
        add(name, type=partial(_at_least, least), default=default, help=what, metavar="N")
    return parser


def _at_least(least: int, text: str) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least} on")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
