"""Reports of training steps as curves in TensorBoard.

Of a process group rank 0 writes what it measured itself, so that watching sends nothing.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from torchrec_picasso.errors import ConfigError, PicassoError
from torchrec_picasso.refresh.refresher import Refreshed
from torchrec_picasso.train_pipeline.step_report import StepReport

__all__ = ["TensorBoardReports", "check_tensorboard", "figures_of"]

_FLUSH_S = 10
"""What a run that is ended from outside may lose."""


def check_tensorboard(folder: str | Path) -> None:
    """Refuses to write where nothing could be written.

    Args:
        folder: Of the event files.

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
    ``/peak_bytes`` and, of looks at the hot set, ``/rows_moved`` and ``/busiest_home``
    (:func:`figures_of`). Their steps count those trained, so the first has number
    ``first_step + 1``.

    Ranks other than 0 of the default process group write nothing.

    Args:
        folder: Of the event files; made if it is not there.
        first_step: Steps trained before, as by the run that this one continues. What is in the
            folder of later steps is no longer shown.
        every_steps: Steps between two points; a point is of all steps since the last.

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
        self._looked: Refreshed | None = None
        self._writer: Any = None
        if not dist.is_initialized() or dist.get_rank() == 0:
            from torch.utils.tensorboard import SummaryWriter  # an optional package

            self._writer = SummaryWriter(
                str(folder), purge_step=first_step + 1, flush_secs=_FLUSH_S
            )

    def __call__(self, report: StepReport) -> None:
        """Takes the report of a step; writes if a point is due."""
        if self._writer is None:
            return
        self._window.append(report)
        step = self._first_step + report.step + 1
        if self.is_due(step):
            self.write(step, figures_of(self._window, self._looked))
            self._window, self._looked = [], report.refreshed

    def is_due(self, step: int) -> bool:
        """Whether curves have a point after so many steps."""
        return step % self._every_steps == 0

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """Writes points of any curves.

        Args:
            step: Steps trained, those before ``first_step`` included.
            figures: By the curve's name.
        """
        if self._writer is not None:
            for name, value in figures.items():
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Brings all points to the disk and closes the file."""
        if self._writer is not None:
            self._writer.close()


def figures_of(reports: Sequence[StepReport], looked: Refreshed | None = None) -> dict[str, float]:
    """What is drawn of some steps of one rank, by the curve's name.

    ``sent_bytes`` is a mean per step, ``coverage`` one over the steps that have any.
    ``rows_moved`` and ``busiest_home`` are there where a look at the hot set was among the steps:
    the hot rows that changed, and what the home that was used most gave, by the mean of all homes.

    Args:
        reports: Of steps in a row, at least one.
        looked: What came of the last look before them.
    """
    seconds = sum(of.seconds for of in reports)
    figures = {
        "samples_per_s": sum(of.num_samples for of in reports) / seconds,
        "exposed_share": sum(of.exposed_s for of in reports) / seconds,
        "sent_bytes": sum(of.sent_bytes for of in reports) / len(reports),
        "peak_bytes": float(reports[-1].peak_bytes),
    }
    coverages = [of.coverage for of in reports if of.coverage is not None]
    if coverages:
        figures["coverage"] = sum(coverages) / len(coverages)
    return {f"pipeline/{name}": of for name, of in (figures | _of_looks(reports, looked)).items()}


def _of_looks(reports: Sequence[StepReport], looked: Refreshed | None) -> dict[str, float]:
    looks: list[Refreshed] = []
    for report in reports:
        if report.refreshed is not None and report.refreshed is not looked:
            looked = report.refreshed
            looks.append(looked)
    if not looks:
        return {}
    figures = {"rows_moved": float(sum(look.num_moved for look in looks))}
    uses_W = looks[-1].home_uses_W
    if sum(uses_W):
        figures["busiest_home"] = max(uses_W) * len(uses_W) / sum(uses_W)
    return figures
