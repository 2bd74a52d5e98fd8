"""Does the interleaved pipeline train the same model under any timing of the streams?

Each pipeline trains again and again from the same weights on the same batches, undelayed first and
then with random delays on its streams. A race shows as a difference to the plain loop of stock
TorchRec, or, more finely, as two runs that are not equal to the bit. The plain loop itself is
repeated as well: where its own runs differ, kernels add in no fixed order and bits prove nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torchrec.distributed.train_pipeline import TrainPipeline

from benchmarks.gpu.delays import RandomDelays, delayed_batches, streams_of
from benchmarks.gpu.one_rank import one_rank
from benchmarks.gpu.report import PartReport
from benchmarks.gpu.settings import GpuSettings
from benchmarks.gpu.training_state import keep_state, largest_difference, put_back, weights_of
from benchmarks.gpu.variants import Workload, interleaved
from torchrec_picasso.app.launch.quiet import quiet_upstream
from torchrec_picasso.app.runs.trainer import MakePipeline, Trainer

LOSS_TOLERANCE = 1e-4  # float32 sums in another order, as in the tests
WEIGHT_TOLERANCE = 1e-3  # relative to the largest weight; a stale or wrong row is off by its update
_STOCK = "stock, plain loop"


class PlainLoop(TrainPipeline):
    """Copy, forward, backward, step, all on one stream."""

    def __init__(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, device: torch.device
    ) -> None:
        super().__init__()
        self._model = model
        self._optimizer = optimizer
        self._device = device

    def progress(self, dataloader_iter: Iterator[Any]) -> Any:
        """Takes one step."""
        batch = next(dataloader_iter).to(self._device)
        self._optimizer.zero_grad()
        losses, output = self._model(batch)
        torch.sum(losses, dim=0).backward()
        self._optimizer.step()
        return output


@dataclass(frozen=True)
class _Run:
    """Losses and weights of a few steps, on the CPU."""

    losses: Tensor
    weights: Mapping[str, Tensor]

    def equals(self, other: _Run) -> bool:
        """To the bit."""
        mine = {**self.weights, "": self.losses}
        theirs = {**other.weights, "": other.losses}
        return all(torch.equal(mine[name], theirs[name]) for name in mine)


@dataclass(frozen=True, kw_only=True)
class PipelineRuns:
    """A pipeline's runs.

    Args:
        loss_difference: Largest relative one of any loss of any run to the plain loop's.
        weight_difference: Largest of any weight after any run, relative to the table's largest.
        unequal_runs: Number of runs that differ from the first, which had no delays, in any bit.
    """

    loss_difference: float
    weight_difference: float
    unequal_runs: int


def streams(rank: int, world_size: int, settings: GpuSettings) -> PartReport:
    """Runs the part; the main function of its only rank."""
    quiet_upstream()
    with one_rank(settings.device) as device:
        work = Workload.make(settings.races, settings.race_steps, device)
        hot = settings.races.hot_rows
        stock = work.trainer(device, None, PlainLoop)
        stock_found, reference = _repeat(stock, work, settings.repeats)
        found = {_STOCK: stock_found}
        pipelines: dict[str, MakePipeline | None] = {
            "hot_cold, plain loop": PlainLoop,
            "hot_cold, SparseDist": None,
        }
        for num_micro in settings.micro_batches:
            for ahead in (False, True):
                name = f"interleaved K={num_micro}{', lookahead' if ahead else ''}"
                pipelines[name] = interleaved(num_micro, ahead)
        firsts: dict[str, _Run] = {}
        failures: dict[str, str] = {}
        for name, make in pipelines.items():
            try:
                trainer = work.trainer(device, hot, make)
                found[name], firsts[name] = _repeat(trainer, work, settings.repeats, reference)
            except Exception as error:  # ids read before they were copied fail in many ways
                failures[name] = f"{type(error).__name__}: {error}"
    ahead_equal = {}
    for num_micro in settings.micro_batches:
        off, on = f"interleaved K={num_micro}", f"interleaved K={num_micro}, lookahead"
        if off in firsts and on in firsts:
            ahead_equal[num_micro] = firsts[off].equals(firsts[on])
    return judge(found, failures, ahead_equal, settings.repeats)


def _run(
    trainer: Trainer,
    kept: Sequence[Tensor],
    work: Workload,
    delays: int | None,
) -> _Run:
    """Trains from the kept state."""
    put_back(trainer, kept)
    if trainer.device.type == "cuda":
        torch.cuda.synchronize()
    batches, mode = iter(work.batches), nullcontext()
    if delays is not None and trainer.device.type == "cuda":
        some = [torch.cuda.current_stream(), *streams_of(trainer.pipeline)]
        if delays % 2:
            batches = delayed_batches(work.batches, some, delays)
        else:
            mode = RandomDelays(some, delays)  # type: ignore[assignment]
    with mode:
        losses = trainer.train(batches)
    return _Run(losses.cpu(), weights_of(trainer))


def _repeat(
    trainer: Trainer, work: Workload, repeats: int, reference: _Run | None = None
) -> tuple[PipelineRuns, _Run]:
    """Runs again and again; gives what was found and the first run."""
    kept = keep_state(trainer)
    _run(trainer, kept, work, None)  # a pipeline's first step is whole, that of later runs is not
    first = _run(trainer, kept, work, None)
    reference = reference or first
    runs = itertools.chain([first], (_run(trainer, kept, work, seed) for seed in range(1, repeats)))
    loss_difference = weight_difference = 0.0
    unequal_runs = 0
    for run in runs:
        unequal_runs += not run.equals(first)
        loss_difference = max(loss_difference, _loss_difference(run.losses, reference.losses))
        weight_difference = max(
            weight_difference, largest_difference(run.weights, reference.weights)
        )
    found = PipelineRuns(
        loss_difference=loss_difference,
        weight_difference=weight_difference,
        unequal_runs=unequal_runs,
    )
    return found, first


def _loss_difference(found: Tensor, expected: Tensor) -> float:
    relative = float(((found - expected).abs() / expected.abs()).max())
    return relative if relative == relative else float("inf")


def judge(
    found: Mapping[str, PipelineRuns],
    failures: Mapping[str, str],
    ahead_equal: Mapping[int, bool],
    repeats: int,
) -> PartReport:
    """Says what is a problem: a difference too large, or bits that only our pipelines change."""
    problems = [f"{name} raised {error}" for name, error in failures.items()]
    problems += [
        f"{name}: losses differ by {runs.loss_difference:.0e}, weights by "
        f"{runs.weight_difference:.0e}"
        for name, runs in found.items()
        if runs.loss_difference > LOSS_TOLERANCE or runs.weight_difference > WEIGHT_TOLERANCE
    ]
    notes = []
    if found[_STOCK].unequal_runs:
        notes.append("the plain loop's own runs are not bit-equal, so bits prove nothing here")
    else:
        problems += [
            f"{name}: {runs.unequal_runs} of {repeats} runs are not equal to the first to the bit"
            for name, runs in found.items()
            if runs.unequal_runs
        ]
        problems += [
            f"K={num_micro}: lookahead on and off are not equal to the bit"
            for num_micro, equal in ahead_equal.items()
            if not equal
        ]
    rows = [
        {
            "pipeline": name,
            "loss diff.": f"{runs.loss_difference:.1e}",
            "weight diff.": f"{runs.weight_difference:.1e}",
            "bit-equal runs": f"{repeats - runs.unequal_runs} of {repeats}",
        }
        for name, runs in found.items()
    ]
    return PartReport(
        name="streams: interleaved pipeline against the plain loop, with random delays",
        rows=rows,
        notes=notes,
        problems=problems,
        facts={
            "repeats": repeats,
            "found": {name: vars(runs) for name, runs in found.items()},
            "lookahead_is_bit_equal": {str(k): equal for k, equal in ahead_equal.items()},
        },
    )
