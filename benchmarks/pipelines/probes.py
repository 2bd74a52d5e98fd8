"""Which stock contestants meet ours: timed alone, since not all fit into memory together."""

from __future__ import annotations

import dataclasses
import gc
import traceback
from collections.abc import Sequence
from statistics import median

import torch
import torch.distributed as dist
from torchrec.datasets.utils import Batch

from benchmarks.pipelines.contestants import Contestant
from benchmarks.pipelines.question import WARMUP_STEPS, Question
from benchmarks.pipelines.runner import Runner, dlrm_trainer
from torchrec_picasso.app.launch.progress import Progress
from torchrec_picasso.app.zoo.data.source import BatchSource

__all__ = ["alone_ms", "choose_finalists"]

_PROBE_STEPS = 4


def choose_finalists(
    rank: int,
    contestants: Sequence[Contestant],
    question: Question,
    source: BatchSource,
    batches: Sequence[Batch],
) -> tuple[list[Contestant], dict[str, float], dict[str, str]]:
    """The best stock contestant and ours; also a stock one that is faster at another model.

    Collective.

    Args:
        rank: This rank; rank 0 shows the progress.
        contestants: All that were asked for.
        question: What is measured.
        source: Tells the tables and the held-out samples.
        batches: This rank's batches.

    Returns:
        Who takes turns; step time of every stock contestant that was probed, ms; and why a
        contestant that was asked for does not take part.
    """
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
        probe_ms[name], is_exact[name] = alone_ms(contestant, question, source, batches)
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
            probe_ms[name], _ = alone_ms(contestant, question, source, batches)
            finalists.append(contestant)
        except (RuntimeError, TypeError, AttributeError, NotImplementedError) as error:
            # the same on every rank: what TorchRec's pipeline cannot do, it can do nowhere
            place = traceback.extract_tb(error.__traceback__)[-1].line
            left_out[name] = f"{type(error).__name__}: {error} at `{place}`"
        gc.collect()
        progress.advance()
    progress.close()
    return finalists + ours, probe_ms, left_out


def alone_ms(
    contestant: Contestant,
    question: Question,
    source: BatchSource,
    batches: Sequence[Batch],
    num_steps: int = _PROBE_STEPS,
) -> tuple[float, bool]:
    """Median step of a contestant that runs alone, and whether it trains the same model.

    Collective.

    Args:
        contestant: Who runs.
        question: What is measured.
        source: Tells the tables and the held-out samples.
        batches: This rank's batches.
        num_steps: Steps that are timed.

    Returns:
        Milliseconds on the slowest rank, and whether its plan trains what an unsharded model would.
    """
    runner = Runner(contestant, dlrm_trainer(contestant, question.config(), source), batches)
    runner.train(WARMUP_STEPS)
    step_ms = torch.tensor(median(runner.block(num_steps).step_s) * 1e3)
    dist.all_reduce(step_ms, dist.ReduceOp.MAX)
    is_exact = runner.result().trains_same_model
    del runner
    gc.collect()
    return float(step_ms), is_exact
