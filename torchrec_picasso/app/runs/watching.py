"""TensorBoard curves of a run: loss, speed, and reports of the pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter

from torchrec_picasso.app.config import WatchConfig
from torchrec_picasso.app.runs.tensorboard_reports import TensorBoardReports, check_tensorboard
from torchrec_picasso.train_pipeline.step_report import StepReport


def check_watch(config: WatchConfig) -> None:
    """Raises PicassoError if TensorBoard is configured and missing, or its folder is a file."""
    if config.tensorboard is not None:
        check_tensorboard(config.tensorboard)


class RunWatch:
    """Writes the configured curves, if any.

    These are ``train/loss``, ``train/samples_per_s`` (all ranks, wall time, checkpoints included),
    at the end ``heldout/auc``, and those of :class:`TensorBoardReports` if interleaved.

    Args:
        config: Folder and interval.
        num_samples: Samples of a step over all ranks.
    """

    def __init__(self, config: WatchConfig, num_samples: int) -> None:
        self._config = config
        self._num_samples = num_samples
        self._board: TensorBoardReports | None = None
        self._losses: list[float] = []
        self._since_s = perf_counter()

    @property
    def on_step(self) -> Callable[[StepReport], None] | None:
        """Callback for the pipeline, if curves are configured."""
        return None if self._config.tensorboard is None else self._report

    def begin(self, first_step: int) -> None:
        """Opens the file; ``first_step`` is the number of steps trained before."""
        if self._config.tensorboard is not None:
            self._board = TensorBoardReports(
                self._config.tensorboard,
                first_step=first_step,
                every_steps=self._config.every_steps,
            )
        self._since_s = perf_counter()

    def after_step(self, step: int, loss: float) -> None:
        """Records the loss of a global batch; ``step`` is the number of trained steps."""
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
        """Writes the held-out AUC of each task, one curve per task, and closes the file."""
        if self._board is None:
            return
        names = ["heldout/auc", *(f"heldout/auc_{task}" for task in range(1, len(aucs)))]
        self._board.write(step, dict(zip(names, aucs)))
        self._board.close()

    def _report(self, report: StepReport) -> None:
        if self._board is not None:
            self._board(report)
