"""Work of every rank: curves if they are missing, probes, and finalists in turns."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.pipelines.memory import PeakMemory
from benchmarks.pipelines.probes import choose_finalists
from benchmarks.pipelines.question import Question
from benchmarks.pipelines.runner import RankResult, Runner, dlrm_trainer, take_turns
from benchmarks.pipelines.variants import parse_variant
from torchrec_picasso.app.cli.calibrate import calibrate_on_rank
from torchrec_picasso.app.launch.progress import Progress
from torchrec_picasso.app.launch.quiet import quiet_upstream
from torchrec_picasso.app.zoo.registry import make_source

_MAX_BATCHES = 32
_CURVES_MAX_BYTES, _CURVES_LEAST_BYTES, _CURVES_SECONDS = 64 << 20, 1 << 20, 0.3
_CURVES_FULL_MBIT = 1000.0


@dataclass(frozen=True, kw_only=True)
class RankAnswer:
    """Results of one rank.

    Args:
        results: Measurements of the final run's variants.
        probe_ms: Step time of every stock variant that was probed.
        left_out: Reason why a requested variant did not run.
    """

    results: list[RankResult]
    probe_ms: dict[str, float]
    left_out: dict[str, str]


def compare_on_rank(rank: int, world_size: int, question: Question, curves: str) -> RankAnswer:
    """Calibrates if it must, probes the stock variants, and lets the finalists take turns.

    Collective: the main function of every rank.
    """
    quiet_upstream()
    torch.manual_seed(0)
    variants = [parse_variant(name) for name in question.variants]
    if any(variant.needs_curves for variant in variants):
        max_bytes = curve_bytes(question.rate_mbit)
        _provide_curves(rank, world_size, curves, max_bytes)
    source = make_source(question.config().data, seed=0)
    num_batches = min(_MAX_BATCHES, question.num_steps)
    batches = list(itertools.islice(source.batches(rank, world_size), num_batches))
    finalists, probe_ms, left_out = choose_finalists(rank, variants, question, source, batches)
    progress = Progress("compare", len(finalists) * (question.rounds + 1), shown=rank == 0)
    runners = []
    for variant in finalists:
        progress.tell(f"{variant.name}, building and warming up")
        memory = PeakMemory()
        runner = Runner(
            variant,
            dlrm_trainer(variant, question.config(), source, curves),
            batches,
            on_links=question.rate_mbit is not None,
            memory=memory,
        )
        runner.warm_up(question.num_steps)
        runners.append(runner)
        progress.advance()
    take_turns(runners, question, progress)
    results = [runner.result() for runner in runners]
    return RankAnswer(results=results, probe_ms=probe_ms, left_out=left_out)


def curve_bytes(rate_mbit: float | None) -> int:
    """Largest buffer that curves are measured with: less on slow links, where time is linear soon.

    64 MiB over 100 Mbit/s, some 40 times, would take minutes and tell nothing new.
    """
    share = 1.0 if rate_mbit is None else min(1.0, rate_mbit / _CURVES_FULL_MBIT)
    return max(_CURVES_LEAST_BYTES, int(_CURVES_MAX_BYTES * share))


def _provide_curves(rank: int, world_size: int, path: str, max_bytes: int) -> None:
    is_there = [Path(path).is_file()]
    dist.broadcast_object_list(is_there)
    if is_there[0]:
        return
    curves = calibrate_on_rank(rank, world_size, max_bytes, _CURVES_SECONDS, True)
    if rank == 0:
        curves.to_json(path)
    dist.barrier()
