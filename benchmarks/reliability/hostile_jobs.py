"""What ranks do of a hostile case: train under our plan and under stock's, and compare."""

from __future__ import annotations

import dataclasses
import json
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

from benchmarks.reliability.hostile_cases import NUM_STEPS, Case, draw_case
from benchmarks.reliability.hostile_data import HostileBatch, make_batch
from benchmarks.reliability.hostile_model import HostileTrainer
from benchmarks.reliability.whole_state import join_state
from torchrec_picasso import InterleavedTrainPipeline
from torchrec_picasso.app.launch.quiet import quiet_upstream
from torchrec_picasso.errors import InputError
from torchrec_picasso.options.refresh import Refresh

__all__ = ["HANG_S", "LOSS_RTOL", "Outcome", "run_on_rank"]

LOSS_RTOL = 1e-5
"""Losses of float32 whose sums have another order."""
WEIGHT_RTOL, WEIGHT_ATOL = 1e-4, 2e-5
"""A term near 0 keeps its sum's absolute error."""
MILLION_ATOL = 1e-3
"""Where a row's gradient is a sum of 250,000 terms, one after the other, in stock."""
HANG_S = 60.0
"""No case takes a tenth of it."""

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Outcome:
    """How a case went.

    Args:
        name: The case's.
        verdict: ``right``, ``refused`` or ``failed``.
        detail: The refusal, or what went wrong.
        losses_apart: Largest relative difference of a loss from stock's.
        case: What was drawn, of a case that failed.
    """

    name: str
    verdict: str
    detail: str = ""
    losses_apart: float | None = None
    case: str = ""

    def write(self, path: Path) -> None:
        """Appends a line."""
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(dataclasses.asdict(self)) + "\n")


class WrongError(Exception):
    """What a case should not have done."""


def run_on_rank(
    rank: int, world_size: int, results: str, seed: int, numbers: Sequence[int]
) -> None:
    """Runs cases, and appends each outcome to a file on rank 0; ends the process in one that hangs.

    Args:
        rank: This rank.
        world_size: How many there are.
        results: The file.
        seed: Of all cases.
        numbers: Which cases.
    """
    quiet_upstream()
    for number in numbers:
        case = draw_case(seed, world_size, number)
        with _ends_after(HANG_S):
            outcome = _outcome_of_ranks(case, _try(case, rank))
        if rank == 0:
            outcome.write(Path(results))


@contextmanager
def _ends_after(seconds: float) -> Iterator[None]:
    """Ends this process if what is inside lasts longer; a collective cannot be interrupted."""
    timer = threading.Timer(seconds, os._exit, [3])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _try(case: Case, rank: int) -> tuple[str, str, float | None]:
    """Verdict, detail and losses apart, as this rank sees them."""
    try:
        if case.fault is None:
            return "right", "", _train_and_compare(case, rank)
        return "refused", *_refuse_and_go_on(case, rank)
    except WrongError as error:
        return "failed", str(error), None


def _outcome_of_ranks(case: Case, mine: tuple[str, str, float | None]) -> Outcome:
    of_ranks: list[Any] = [None] * case.world_size
    dist.all_gather_object(of_ranks, mine)
    wrong = [f"rank {r}: {what[1]}" for r, what in enumerate(of_ranks) if what[0] == "failed"]
    if wrong:
        return Outcome(case.name, "failed", "; ".join(wrong), None, str(case))
    apart = max((of_rank[2] for of_rank in of_ranks if of_rank[2] is not None), default=None)
    rank = case.fault.ranks[0] if case.fault else 0
    return Outcome(case.name, of_ranks[0][0], of_ranks[rank][1], apart)


class _Driver:
    """Trains a case's model of ours batch after batch."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self.trainer = HostileTrainer(case, is_ours=True)
        self._pipeline: Any = None
        if case.driver == "pipeline":
            options = dict(case.options)
            every = options.pop("refresh_every", None)
            if every is not None:
                options["refresh"] = Refresh(every_steps=every, deviations=0.0, check_steps=1)
            self._pipeline = InterleavedTrainPipeline(
                self.trainer.model, self.trainer.optimizer, _CPU, **options
            )
        elif case.driver == "sparse_dist":
            self._pipeline = TrainPipelineSparseDist(
                self.trainer.model, self.trainer.optimizer, _CPU
            )

    def train(self, batches: Sequence[HostileBatch]) -> Iterator[Tensor]:
        """Gives predictions batch by batch."""
        if self._pipeline is None:
            yield from map(self.trainer.step, batches)
            return
        waiting = iter(batches)
        while True:
            try:
                yield self._pipeline.progress(waiting)
            except StopIteration:
                return

    def start_anew(self) -> None:
        """Forgets batches in flight, all ranks together."""
        if self._pipeline is not None:
            self._pipeline.reset()


def _train_and_compare(case: Case, rank: int) -> float:
    """Trains both; gives how far losses are apart.

    Raises:
        WrongError: If too far, or weights are other ones.
    """
    steps = range(len(case.kinds_SW))
    ours, stock = _Driver(case), HostileTrainer(case, is_ours=False)
    outputs = list(ours.train([make_batch(case, s, rank) for s in steps if s < case.ends_W[rank]]))
    expected = [stock.step(make_batch(case, s, rank, as_stock=True)) for s in steps]
    apart = _losses_apart(case, rank, steps, outputs, expected)
    _compare_weights(ours.trainer, stock)
    return apart


def _losses_apart(
    case: Case,
    rank: int,
    steps: Sequence[int],
    outputs: Sequence[Tensor],
    expected: Sequence[Tensor],
) -> float:
    """The largest relative difference of losses; ranks may have stopped before the last step."""
    most = 0.0
    if len(outputs) != len(steps):
        raise WrongError(f"{len(outputs)} outputs of {len(steps)} steps")
    for step, output, right in zip(steps, outputs, expected, strict=True):
        labels = make_batch(case, step, rank).labels
        right = right[: labels.numel()]
        if output.shape != labels.shape:
            raise WrongError(
                f"step {step}: {tuple(output.shape)} outputs, {tuple(labels.shape)} labels"
            )
        if not labels.numel():
            continue
        loss, other = (float(((out - labels) ** 2).mean()) for out in (output, right))
        apart = abs(loss - other) / max(abs(other), 1e-3)
        if not apart <= LOSS_RTOL:
            raise WrongError(f"step {step}: loss {loss} is {apart:.1e} from stock's {other}")
        most = max(most, apart)
    return most


def _compare_weights(ours: HostileTrainer, stock: HostileTrainer) -> None:
    is_long = any("million" in of_step for of_step in ours.case.kinds_SW)
    atol = MILLION_ATOL if is_long else WEIGHT_ATOL
    wrong = _other_weights(_weights(ours), _weights(stock), atol)
    if wrong:
        raise WrongError(f"other weights than stock's: {wrong}")


def _weights(trainer: HostileTrainer) -> dict[str, Tensor]:
    """Weights and optimizer state, joined; on rank 0 only. Collective."""
    state = {"model": trainer.model.state_dict(), "optim": trainer.optimizer.state_dict()}
    return join_state(state)


def _other_weights(
    found: dict[str, Tensor], expected: dict[str, Tensor], atol: float = WEIGHT_ATOL
) -> str:
    """Names of tensors that are apart, with the largest difference; empty if there are none."""
    wrong = sorted(found.keys() ^ expected.keys())
    for name in sorted(found.keys() & expected.keys()):
        a, b = found[name], expected[name]
        if a.shape != b.shape:
            wrong.append(f"{name} of shape {tuple(a.shape)}, not {tuple(b.shape)}")
        elif not torch.allclose(a, b, rtol=WEIGHT_RTOL, atol=atol):
            wrong.append(f"{name} by {float((a - b).abs().max()):.1e}")
    return ", ".join(wrong)


def _refuse_and_go_on(case: Case, rank: int) -> tuple[str, float]:
    """Trains up to a bad batch, sees it refused, and goes on with good ones.

    Returns:
        The refusal, and how far the losses after it are apart.

    Raises:
        WrongError: If a rank raised nothing, no weights of stock are those left, or the training
            after it went otherwise.
    """
    fault = case.fault
    assert fault is not None
    ours = _Driver(case)
    batches = [
        make_batch(case, s, rank, fault if s == fault.step and rank in fault.ranks else None)
        for s in range(NUM_STEPS)
    ]
    refusal: InputError | None = None
    try:
        for _ in ours.train(batches):
            pass
    except InputError as error:
        refusal = error
    _check_refusals(case, rank, refusal)
    ours.start_anew()
    trained = _steps_trained(case, rank, ours.trainer)
    stock = HostileTrainer(case, is_ours=False)
    for step in range(trained):
        stock.step(make_batch(case, step, rank, as_stock=True))
    steps = range(NUM_STEPS, len(case.kinds_SW))
    outputs = list(ours.train([make_batch(case, s, rank) for s in steps]))
    expected = [stock.step(make_batch(case, s, rank, as_stock=True)) for s in steps]
    apart = _losses_apart(case, rank, steps, outputs, expected)
    _compare_weights(ours.trainer, stock)
    return str(refusal), apart


def _check_refusals(case: Case, rank: int, refusal: InputError | None) -> None:
    """Holds that all ranks refused, and those at fault say what they have."""
    fault = case.fault
    assert fault is not None
    of_ranks: list[Any] = [None] * case.world_size
    dist.all_gather_object(of_ranks, None if refusal is None else str(refusal))
    if None in of_ranks:
        silent = [rank for rank, text in enumerate(of_ranks) if text is None]
        raise WrongError(f"no error on ranks {silent} of {fault}")
    if rank in fault.ranks and fault.feature not in of_ranks[rank]:
        raise WrongError(f"the error does not name {fault.feature!r}: {of_ranks[rank]}")


def _steps_trained(case: Case, rank: int, ours: HostileTrainer) -> int:
    """After how many of stock's steps the weights are ours; at most those before the bad one.

    Raises:
        WrongError: If after none: half a step was taken, or a bad one.
    """
    fault = case.fault
    assert fault is not None
    left = _weights(ours)
    stock = HostileTrainer(case, is_ours=False)
    answers = []
    for step in range(fault.step + 1):
        answers.append(_other_weights(left, _weights(stock)))
        if step < fault.step:
            stock.step(make_batch(case, step, rank, as_stock=True))
    told: list[Any] = [answers]
    dist.broadcast_object_list(told, src=0)
    found = [step for step, wrong in enumerate(told[0]) if not wrong]
    if not found:
        raise WrongError(f"weights after the refusal are of no whole step: {told[0][-1]}")
    return found[-1]
