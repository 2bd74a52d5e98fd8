"""Lower bounds of a step: its bytes at the link's rate, its compute on one rank alone."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping

from benchmarks.pipelines.probes import alone_ms
from benchmarks.pipelines.question import WARMUP_STEPS, Question
from benchmarks.pipelines.rankings import Standing
from benchmarks.pipelines.variants import parse_variant
from torchrec_picasso.app.launch.quiet import quiet_upstream
from torchrec_picasso.app.launch.run_ranks import run_ranks
from torchrec_picasso.app.zoo.registry import make_source

_FLOOR_STEPS = 10
_TIMEOUT_S = 1800.0


def floors(
    question: Question, found: Mapping[str, Standing], compute_ms: float
) -> dict[str, float | None]:
    """Lower bounds of a step of our best variant.

    Returns:
        ``wire_ms`` (``None`` on loopback), ``compute_ms``, ``step_ms`` of that variant and
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


def floor_on_rank(rank: int, world_size: int, question: Question) -> float:
    """Milliseconds of a step of ``hot_cold:0``: the compute floor, when the group has one rank.

    Collective: the main function of every rank.
    """
    quiet_upstream()
    source = make_source(question.config().data, seed=0)
    num_steps = WARMUP_STEPS + 1 + _FLOOR_STEPS
    batches = list(itertools.islice(source.batches(rank, world_size), num_steps))
    variant = parse_variant("hot_cold:0")
    return alone_ms(variant, question, source, batches, _FLOOR_STEPS)[0]


def compute_floor_ms(question: Question) -> float:
    """Milliseconds of a step on one rank that sends nothing and has the machine to itself."""
    on_start = _keep_to_one_core if question.rate_mbit is not None else None
    return run_ranks(floor_on_rank, 1, question, timeout_s=_TIMEOUT_S, on_start=on_start)[0]


def _keep_to_one_core(rank: int) -> None:
    """Pins the process, as the ranks of an emulated cluster are."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
