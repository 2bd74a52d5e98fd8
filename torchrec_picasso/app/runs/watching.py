"""What a run writes for those who watch it: its loss, its speed, what its pipeline reports."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter

from torchrec_picasso.app.config import WatchConfig
from torchrec_picasso.app.runs.tensorboard_reports import (
    TensorBoardReports,
    check_tensorboard,
)
from torchrec_picasso.train_pipeline.step_report import StepReport

__all__ = ["RunWatch", "check_watch"]


def check_watch(config: WatchConfig) -> None:
    """Refuses what could not be written.

    Raises:
        PicassoError: If TensorBoard is asked for and missing, or its folder is a file.
    """
    if config.tensorboard is not None:
        check_tensorboard(config.tensorboard)


class RunWatch:
    """Writes the curves that a configuration asks for; does nothing where it asks for none.

    Under any pipeline these are ``train/loss``, ``train/samples_per_s`` (of all ranks, by the clock
    on the wall, checkpoints included) and at the end ``heldout/auc``; under an interleaved one also
    those of :class:`TensorBoardReports`.

    Args:
        config: What is asked for.
        num_samples: Of a step, on all ranks together.
    """

    def __init__(self, config: WatchConfig, num_samples: int) -> None:
        self._config = config
        self._num_samples = num_samples
        self._board: TensorBoardReports | None = None
        self._losses: list[float] = []
        self._since_s = perf_counter()

    @property
    def on_step(self) -> Callable[[StepReport], None] | None:
        """What the pipeline is to call after each step; ``None`` = nothing."""
        return None if self._config.tensorboard is None else self._take

    def begin(self, first_step: int) -> None:
        """Opens the file.

        Args:
            first_step: Steps trained before.
        """
        if self._config.tensorboard is not None:
            self._board = TensorBoardReports(
                self._config.tensorboard,
                first_step=first_step,
                every_steps=self._config.every_steps,
            )
        self._since_s = perf_counter()

    def after_step(self, step: int, loss: float) -> None:
        """Notes a step.

        Args:
            step: Steps trained.
            loss: Of the global batch.
        """
        if self._board is None:
            return
        self._losses.append(loss)
        if not self._board.is_due(step):
            return
        now_s, num_steps = perf_counter(), len(self._losses)
        figures = {
            "train/loss": sum(self._losses) / num_steps,
            "train/samples_per_s": num_steps * self._num_samples / (now_s - self._since_s),
        }
        self._board.write(step, figures)
        self._losses, self._since_s = [], now_s

    def end(self, step: int, aucs: Sequence[float]) -> None:
        """Notes the held-out AUC of each task, and closes the file.

        Args:
            step: Steps trained.
            aucs: Of the tasks; of several each has a curve with its number.
        """
        if self._board is None:
            return
        names = ["heldout/auc", *(f"heldout/auc_{task}" for task in range(1, len(aucs)))]
        self._board.write(step, dict(zip(names, aucs)))
        self._board.close()

    def _take(self, report: StepReport) -> None:
        if self._board is not None:
            self._board(report)
