"""Writes reports of training steps as curves for TensorBoard.

Rank 0 of the process group writes its own measurements, so the curves cost no communication.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from torchrec_picasso.errors import ConfigError, PicassoError
from torchrec_picasso.rows.refresher import Refreshed
from torchrec_picasso.train_pipeline.step_report import StepReport

_FLUSH_S = 10
"""Seconds of curves that a killed run may lose."""


def check_tensorboard(folder: str | Path) -> None:
    """Checks that curves can be written.

    Args:
        folder: Folder of the event files.

    Raises:
        PicassoError: If the package ``tensorboard`` is missing.
        ConfigError: If the folder is a file.
    """
    if importlib.util.find_spec("tensorboard") is None:
        raise PicassoError(
            f"curves in {folder} need the package tensorboard, which is not installed; "
            "pip install tensorboard"
        )
    if Path(folder).exists() and not Path(folder).is_dir():
        raise ConfigError(f"{folder}: TensorBoard needs a folder, and this is a file; name another")


class TensorBoardReports:
    """Writes reports: ``InterleavedTrainPipeline(..., on_step=TensorBoardReports("runs/1"))``.

    Curves are ``pipeline/samples_per_s``, ``/exposed_share``, ``/sent_bytes``, ``/coverage``,
    ``/peak_bytes`` and, for refresh evaluations, ``/rows_moved`` and ``/busiest_home``
    (:func:`figures_of`). Steps are numbered by the steps trained, so the first has number
    ``first_step + 1``.

    Ranks other than 0 of the default process group write nothing.

    Args:
        folder: Folder of the event files; created if missing.
        first_step: Steps trained before, as by the run that this one continues. Points of later
            steps that are already in the folder are no longer shown.
        every_steps: Steps between two points; a point covers all steps since the last one.

    Raises:
        PicassoError: If the package ``tensorboard`` is missing; on all ranks.
        ConfigError: If the folder is a file, or a number is out of range.
    """

    def __init__(self, folder: str | Path, *, first_step: int = 0, every_steps: int = 1) -> None:
        if first_step < 0 or every_steps < 1:
            raise ConfigError(
                "first_step must be at least 0 and every_steps at least 1, got "
                f"{first_step} and {every_steps}"
            )
        check_tensorboard(folder)
        self._first_step = first_step
        self._every_steps = every_steps
        self._window: list[StepReport] = []
        self._evaluated: Refreshed | None = None
        self._writer: Any = None
        if not dist.is_initialized() or dist.get_rank() == 0:
            from torch.utils.tensorboard import SummaryWriter  # an optional package

            self._writer = SummaryWriter(
                str(folder), purge_step=first_step + 1, flush_secs=_FLUSH_S
            )

    def __call__(self, report: StepReport) -> None:
        """Receives the report of a step; writes a point if one is due."""
        if self._writer is None:
            return
        self._window.append(report)
        step = self._first_step + report.step + 1
        if self.is_due(step):
            self.write(step, figures_of(self._window, self._evaluated))
            self._window, self._evaluated = [], report.refreshed

    def is_due(self, step: int) -> bool:
        """Whether curves have a point after this many steps.

        Args:
            step: Steps trained, including those before ``first_step``.
        """
        return step % self._every_steps == 0

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """Writes points of any curves.

        Args:
            step: Steps trained, including those before ``first_step``.
            figures: Value by name of the curve.
        """
        if self._writer is not None:
            for name, value in figures.items():
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flushes all points to the disk and closes the file."""
        if self._writer is not None:
            self._writer.close()


def figures_of(
    reports: Sequence[StepReport], evaluated: Refreshed | None = None
) -> dict[str, float]:
    """Computes the points of some steps of one rank, by name of the curve.

    ``sent_bytes`` is a mean per step, ``coverage`` a mean over the steps that have one.
    ``rows_moved`` and ``busiest_home`` exist if a refresh evaluation was among the steps: the
    number of hot rows that changed, and the accesses to the busiest owner rank divided by the mean
    over all owner ranks.

    Args:
        reports: Reports of consecutive steps, at least one.
        evaluated: Result of the last refresh evaluation before them.
    """
    seconds = sum(report.seconds for report in reports)
    figures = {
        "samples_per_s": sum(report.num_samples for report in reports) / seconds,
        "exposed_share": sum(report.exposed_s for report in reports) / seconds,
        "sent_bytes": sum(report.sent_bytes for report in reports) / len(reports),
        "peak_bytes": float(reports[-1].peak_bytes),
    }
    coverages = [report.coverage for report in reports if report.coverage is not None]
    if coverages:
        figures["coverage"] = sum(coverages) / len(coverages)
    return {
        f"pipeline/{name}": value
        for name, value in (figures | _refresh_curves(reports, evaluated)).items()
    }


def _refresh_curves(reports: Sequence[StepReport], evaluated: Refreshed | None) -> dict[str, float]:
    """Computes the points of the refresh evaluations among some steps; empty if there were none."""
    evaluations: list[Refreshed] = []
    for report in reports:
        # a report repeats the last evaluation; a new object means one in this step
        if report.refreshed is not None and report.refreshed is not evaluated:
            evaluated = report.refreshed
            evaluations.append(evaluated)
    if not evaluations:
        return {}
    figures = {"rows_moved": float(sum(each.num_moved for each in evaluations))}
    uses_W = evaluations[-1].home_uses_W
    if sum(uses_W):
        figures["busiest_home"] = max(uses_W) * len(uses_W) / sum(uses_W)
    return figures
