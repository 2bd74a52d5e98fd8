"""Choice of the stock finalists: timed alone, since not all fit into memory together."""

from __future__ import annotations

import dataclasses
import gc
import traceback
from collections.abc import Sequence
from statistics import median

import torch
import torch.distributed as dist
from torchrec.datasets.utils import Batch

from benchmarks.pipelines.question import WARMUP_STEPS, Question
from benchmarks.pipelines.runner import Runner, dlrm_trainer
from benchmarks.pipelines.variants import Variant
from torchrec_picasso.app.launch.progress import Progress
from torchrec_picasso.app.zoo.data.source import BatchSource

_PROBE_STEPS = 4


def choose_finalists(
    rank: int,
    variants: Sequence[Variant],
    question: Question,
    source: BatchSource,
    batches: Sequence[Batch],
) -> tuple[list[Variant], dict[str, float], dict[str, str]]:
    """The best stock variant and ours; also a stock one that is faster at another model.

    Collective.

    Returns:
        The finalists; step time of every stock variant that was probed, ms; and why a
        variant that was asked for does not take part.
    """
    stock = [c for c in variants if c.is_stock and c.placement]
    fused = [c for c in variants if c.pipeline == "fused"]
    ours = [c for c in variants if not c.is_stock]
    probe_ms: dict[str, float] = {}
    left_out: dict[str, str] = {}
    is_exact: dict[str, bool] = {}
    progress = Progress("probe", len(stock) + len(fused), shown=rank == 0)
    for variant in stock if len(stock) > 1 else []:
        progress.tell(variant.name)
        name = variant.name
        probe_ms[name], is_exact[name] = alone_ms(variant, question, source, batches)
        progress.advance()

    def speed(variant: Variant) -> float:
        return probe_ms.get(variant.name, 0.0)

    best = min([c for c in stock if is_exact.get(c.name, True)] or stock, key=speed)
    fastest = min(stock, key=speed)
    finalists = [best] if fastest is best else [best, fastest]
    for variant in fused:
        progress.tell(variant.name)
        name = f"{best.name}+fused"
        variant = dataclasses.replace(variant, name=name, placement=best.placement)
        try:
            probe_ms[name], _ = alone_ms(variant, question, source, batches)
            finalists.append(variant)
        except (RuntimeError, TypeError, AttributeError, NotImplementedError) as error:
            # the same on every rank: what TorchRec's pipeline cannot do, it can do nowhere
            place = traceback.extract_tb(error.__traceback__)[-1].line
            left_out[name] = f"{type(error).__name__}: {error} at `{place}`"
        gc.collect()
        progress.advance()
    progress.close()
    return finalists + ours, probe_ms, left_out


def alone_ms(
    variant: Variant,
    question: Question,
    source: BatchSource,
    batches: Sequence[Batch],
    num_steps: int = _PROBE_STEPS,
) -> tuple[float, bool]:
    """Median step of a variant that runs alone, and whether it trains the same model.

    Collective.

    Returns:
        Milliseconds on the slowest rank, and whether its plan trains what an unsharded model would.
    """
    runner = Runner(variant, dlrm_trainer(variant, question.config(), source), batches)
    runner.train(WARMUP_STEPS)
    step_ms = torch.tensor(median(runner.block(num_steps).step_s) * 1e3)
    dist.all_reduce(step_ms, dist.ReduceOp.MAX)
    is_exact = runner.result().trains_same_model
    del runner
    gc.collect()
    return float(step_ms), is_exact
