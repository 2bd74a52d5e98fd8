"""Reports of training steps, for monitoring a run."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchrec_picasso.exchange.waiting import WireTally, tallied
from torchrec_picasso.rows.refresher import Refreshed
from torchrec_picasso.rows.route import PackLayout
from torchrec_picasso.train_pipeline.in_flight_batch import GroupBatch

if TYPE_CHECKING:
    import pandas as pd

_KIB = 1024  # unit of ru_maxrss on Linux
_OVER_STEPS = {
    "served_rows": "mean",
    "sent_bytes": "mean",
    "received_bytes": "mean",
    "exposed_s": "mean",
    "peak_bytes": "max",
}
"""Figures that ranks are compared by."""
_NO_COLUMN = ("refreshed", "lookups_by_home")


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """One training step on this rank.

    Args:
        step: Number of training steps before it.
        seconds: Time of the whole call of ``progress``. On an accelerator the host runs ahead: the
            time of a single step then says little, the sum over many steps is right.
        num_samples: Samples of this rank's batch.
        exposed_s: Part of ``seconds`` in which the host waited for exchanges of this package.
        sent_bytes: Bytes sent to other ranks by exchanges of this package and by the reduction of
            dense gradients.
        received_bytes: Bytes received from other ranks by the same.
        served_rows: Home rows that ranks asked of this rank, each counted once per rank that asked,
            by host once per host. Compared over ranks, they show the busiest one.
        lookups_by_home: Lookups of this rank's batch by the home rank that serves them, int64,
            ``(W,)``, on the device; replicas serve those of hot rows. :meth:`StepReports.by_rank`
            sums them over ranks. ``None`` if no table is hot/cold.
        coverage: Share of hot rows among the distinct rows of this rank's batch; tables that travel
            as rows only. ``None`` if there are no such rows.
        peak_bytes: Largest memory of the process so far; on CUDA, of its tensors on the device.
        refreshed: Result of the last refresh evaluation; ``None`` before the first.
    """

    step: int
    seconds: float
    num_samples: int
    exposed_s: float
    sent_bytes: int
    received_bytes: int
    served_rows: int
    lookups_by_home: Tensor | None
    coverage: float | None
    peak_bytes: int
    refreshed: Refreshed | None

    @property
    def samples_per_s(self) -> float:
        """Samples of this rank per second."""
        return self.num_samples / self.seconds

    @property
    def exposed_share(self) -> float:
        """Share of the step in which the host waited for exchanges."""
        return self.exposed_s / self.seconds


OnStep = Callable[[StepReport], None] | Sequence[Callable[[StepReport], None]]
"""A function that receives reports, or several, which are called in order."""


class StepReports:
    """Collects reports: ``InterleavedTrainPipeline(..., on_step=reports)``."""

    def __init__(self) -> None:
        self.reports: list[StepReport] = []

    def __call__(self, report: StepReport) -> None:
        """Appends a report."""
        self.reports.append(report)

    def to_frame(self) -> pd.DataFrame:
        """Converts the reports to a pandas DataFrame, one line per step.

        ``num_moved`` and ``moved_bytes`` describe the refresh of the step; 0 in steps without a
        refresh evaluation.
        """
        import pandas as pd

        lines, before = [], None
        for report in self.reports:
            # a report repeats the last evaluation; a new object means one in this step
            refreshed = report.refreshed if report.refreshed is not before else None
            before = report.refreshed
            line = {name: value for name, value in vars(report).items() if name not in _NO_COLUMN}
            line |= {"samples_per_s": report.samples_per_s, "exposed_share": report.exposed_share}
            line["num_moved"] = 0 if refreshed is None else refreshed.num_moved
            line["moved_bytes"] = 0 if refreshed is None else refreshed.moved_bytes
            lines.append(line)
        return pd.DataFrame(lines)

    def by_rank(self, pg: dist.ProcessGroup | None = None) -> pd.DataFrame:
        """Gathers the ranks' means of ``served_rows``, ``sent_bytes``, ``received_bytes`` and
        ``exposed_s`` over steps, their largest ``peak_bytes``, and ``served_lookups``, the mean of
        the lookups of all ranks' batches that each serves as home rank; one line per rank.
        Collective over ``pg``, ``None`` = all ranks; ``frame.max() / frame.mean()`` is the busiest
        rank over the mean."""
        import pandas as pd

        own = pd.DataFrame(map(vars, self.reports), columns=[*_OVER_STEPS]).agg(_OVER_STEPS)
        counted = [r.lookups_by_home for r in self.reports if r.lookups_by_home is not None]
        gathered: list[Any] = [None] * (num_ranks := dist.get_world_size(pg))
        lookups_W = torch.stack(counted).double().mean(0).tolist() if counted else [0.0] * num_ranks
        dist.all_gather_object(gathered, (own.to_dict(), lookups_W), group=pg)
        lines, lookups_WW = zip(*gathered)
        # by rank that looks up, then by home rank
        return pd.DataFrame(lines).assign(served_lookups=list(map(sum, zip(*lookups_WW))))


class StepWatch:
    """Measures steps if there is a receiver of reports, ``on_step``; else it does nothing."""

    def __init__(self, on_step: OnStep | None, device: torch.device) -> None:
        self._takers = [] if on_step is None else [on_step] if callable(on_step) else list(on_step)
        self._device = device
        self._num_steps = 0
        self._seconds = 0.0
        self._tally = WireTally()

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Measures the time and the traffic of a step, which runs in this context."""
        if not self._takers:
            yield
            return
        with tallied() as self._tally:
            start = perf_counter()
            yield
            self._seconds = perf_counter() - start

    def report(
        self, num_samples: int, groups: Sequence[GroupBatch], refreshed: Refreshed | None
    ) -> None:
        """Reports a training step that was measured, and the last refresh evaluation."""
        if not self._takers:
            return
        packs = [pack for each in groups for pack in each.rows.layout.packs]
        packs = [pack for pack in packs if pack.requests.sends_rows]
        report = StepReport(
            step=self._num_steps,
            seconds=self._seconds,
            num_samples=num_samples,
            exposed_s=self._tally.waited_s,
            sent_bytes=self._tally.sent_bytes,
            received_bytes=self._tally.received_bytes,
            served_rows=sum(pack.served.num_rows for pack in packs),
            lookups_by_home=_lookups_by_home(groups),
            coverage=_coverage(packs),
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


def _lookups_by_home(groups: Sequence[GroupBatch]) -> Tensor | None:
    counts = [each.request.lookups_by_home() for each in groups]
    return torch.stack(counts).sum(0) if counts else None


def _coverage(packs: Sequence[PackLayout]) -> float | None:
    """Share of hot rows among the distinct rows of a batch; ``None`` = no table has rows."""
    num_rows = sum(pack.num_rows for pack in packs)
    return sum(pack.used.slots_h.numel() for pack in packs) / num_rows if num_rows else None
