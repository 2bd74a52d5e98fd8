"""Times steps on the device's own clock, variants taking turns, and counts host syncs."""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping

import torch

from benchmarks.gpu.variants import Variant
from benchmarks.turns import in_turns

_SYNC_WARNING = "called a synchronizing CUDA operation"


def elapsed_ms(work: Callable[[], object], device: torch.device) -> float:
    """Milliseconds from the first to the last kernel of ``work`` on the current stream.

    By CUDA events on a GPU, which the host may run ahead of; by the host's clock on the CPU.
    """
    if device.type != "cuda":
        start_s = time.perf_counter()
        work()
        return (time.perf_counter() - start_s) * 1e3
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end))


def take_turns(
    variants: Mapping[str, Variant], rounds: int, block_steps: int, device: torch.device
) -> dict[str, list[float]]:
    """Times all variants in turns.

    Returns:
        By variant, ms per step of every round.
    """
    step_ms: dict[str, list[float]] = {name: [] for name in variants}
    for _, (name, variant) in in_turns(list(variants.items()), rounds):
        variant.train(1)
        ms = elapsed_ms(lambda c=variant: c.train(block_steps), device)  # type: ignore[misc]
        step_ms[name].append(ms / block_steps)
    return step_ms


def count_syncs(variant: Variant, num_steps: int, device: torch.device) -> dict[str, float]:
    """Host syncs per step by the line of Python that caused them, the most frequent first.

    PyTorch reports those of its own operators; what NCCL and other libraries do is not seen. A sync
    in backward carries the line that started backward.
    """
    if device.type != "cuda":
        variant.train(num_steps)
        return {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            variant.train(num_steps)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sync_sites([(w.filename, w.lineno, str(w.message)) for w in caught], num_steps)


def sync_sites(caught: list[tuple[str, int, str]], num_steps: int) -> dict[str, float]:
    """Counts sync warnings by place."""
    sites = Counter(
        f"{_short(file)}:{line}" for file, line, text in caught if _SYNC_WARNING in text
    )
    return {site: count / num_steps for site, count in sites.most_common()}


def _short(file: str) -> str:
    """A path from its package on."""
    parts = file.split("/")
    for package in ("torchrec_picasso", "torchrec", "fbgemm_gpu", "torch", "benchmarks"):
        if package in parts[:-1]:
            last = len(parts) - 1 - parts[::-1].index(package)
            return "/".join(parts[last:])
    return parts[-1]
