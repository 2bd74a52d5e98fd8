"""What a training step was like, for those who watch a run."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

import torch

from torchrec_picasso.exchange.tally import WireTally, tallied
from torchrec_picasso.refresh.refresher import Refreshed
from torchrec_picasso.rows.batch_rows import BatchRows
from torchrec_picasso.train_pipeline.flight import Flight

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["OnStep", "StepReport", "StepReports", "StepWatch"]

_KIB = 1024  # unit of ru_maxrss on Linux


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """One training step on this rank.

    Args:
        step: Training steps before it.
        seconds: Of the whole call of ``progress``. On an accelerator the host runs ahead: seconds
            of single steps then say little, their sum over many does.
        num_samples: Of this rank's batch.
        exposed_s: Of ``seconds``, those in which the host waited for exchanges of this package.
        sent_bytes: For other ranks, by exchanges of this package and the sums of dense gradients.
        coverage: Share of the distinct rows of this rank's batch that are hot; of tables whose rows
            travel. ``None`` where there are no such rows.
        peak_bytes: Most memory that the process has had so far; on CUDA, that its tensors had on
            the device.
        refreshed: What came of the last look at the hot set; ``None`` before the first.
    """

    step: int
    seconds: float
    num_samples: int
    exposed_s: float
    sent_bytes: int
    coverage: float | None
    peak_bytes: int
    refreshed: Refreshed | None

    @property
    def samples_per_s(self) -> float:
        """Of this rank."""
        return self.num_samples / self.seconds

    @property
    def exposed_share(self) -> float:
        """Part of the step in which the host waited for exchanges."""
        return self.exposed_s / self.seconds


OnStep = Callable[[StepReport], None] | Sequence[Callable[[StepReport], None]]
"""What takes reports: one callable, or several that are called in turn."""


class StepReports:
    """Keeps reports: ``InterleavedTrainPipeline(..., on_step=reports)``."""

    def __init__(self) -> None:
        self.reports: list[StepReport] = []

    def __call__(self, report: StepReport) -> None:
        """Keeps a report."""
        self.reports.append(report)

    def to_frame(self) -> pd.DataFrame:
        """A pandas DataFrame, a line per step: what a report has, and what came of a look in it.

        ``num_moved``, ``moved_bytes`` are 0 in steps without a look.
        """
        import pandas as pd

        lines, before = [], None
        for of in self.reports:
            looked = of.refreshed if of.refreshed is not before else None
            before = of.refreshed
            line = {name: value for name, value in vars(of).items() if name != "refreshed"}
            line |= {"samples_per_s": of.samples_per_s, "exposed_share": of.exposed_share}
            line["num_moved"] = 0 if looked is None else looked.num_moved
            line["moved_bytes"] = 0 if looked is None else looked.moved_bytes
            lines.append(line)
        return pd.DataFrame(lines)


class StepWatch:
    """Measures steps where somebody wants to know; else nothing.

    Args:
        on_step: Takes the report of each training step; ``None`` = nobody wants any.
        device: Where steps run.
    """

    def __init__(self, on_step: OnStep | None, device: torch.device) -> None:
        self._takers = [] if on_step is None else [on_step] if callable(on_step) else list(on_step)
        self._device = device
        self._num_steps = 0
        self._seconds = 0.0
        self._tally = WireTally()

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Around a step."""
        if not self._takers:
            yield
            return
        with tallied() as self._tally:
            start = perf_counter()
            yield
            self._seconds = perf_counter() - start

    def report(self, flight: Flight, refreshed: Refreshed | None) -> None:
        """Reports a training step that was measured.

        Args:
            flight: The batch that it trained.
            refreshed: What came of the last look at the hot set.
        """
        if not self._takers:
            return
        report = StepReport(
            step=self._num_steps,
            seconds=self._seconds,
            num_samples=flight.num_samples,
            exposed_s=self._tally.waited_s,
            sent_bytes=self._tally.sent_bytes,
            coverage=_coverage(flight.rows),
            peak_bytes=self._peak_bytes(),
            refreshed=refreshed,
        )
        self._num_steps += 1
        for take in self._takers:
            take(report)

    def _peak_bytes(self) -> int:
        if self._device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self._device))
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _KIB


def _coverage(rows_of: Sequence[BatchRows]) -> float | None:
    """Share of the distinct rows of a batch that are hot."""
    packs = [pack for rows in rows_of for pack in rows.layout.packs if not pack.is_of_bags]
    num_rows = sum(pack.num_rows for pack in packs)
    return sum(pack.hot_slots.numel() for pack in packs) / num_rows if num_rows else None
