"""How a batch is interleaved, chosen by trying on the first training steps.

Every setting trains the same model, so a trial costs no step: the first ones simply run under one
setting after another. Ranks agree on the slowest rank's times, hence on the choice. Times are
measured, so another run may choose differently; give the numbers to repeat a run bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import torch
import torch.distributed as dist

from torchrec_picasso.errors import CompatError
from torchrec_picasso.train_pipeline.schedule import NUM_BATCHES, Setting

__all__ = ["SettingChoice", "candidates"]

_NUM_MICRO_BATCHES = (1, 2, 4, 8, 16)
_STEPS_OF_TURN, _TURNS = 2, 2
_WARMUP_STEPS = 3
_EQUAL = 1.02
"""Times up to this factor are the same; then the earlier candidate is chosen."""


def candidates(num_micro_batches: int | None, lookahead: bool | None) -> list[Setting]:
    """The settings that are allowed, the plainest first; ``None`` = any."""
    pieces = _NUM_MICRO_BATCHES if num_micro_batches is None else (num_micro_batches,)
    looks = (True, False) if lookahead is None else (lookahead,)
    return [Setting(k, look) for k in pieces for look in looks]


class SettingChoice:
    """Gives every batch its setting, and settles on the fastest one.

    Candidates take turns of a few training steps, the second time in the opposite order. A step
    counts when all its batches have the same setting.

    Args:
        allowed: Candidates, the plainest first.
    """

    def __init__(self, allowed: Sequence[Setting]) -> None:
        self._allowed = list(allowed)
        self._start()

    def _start(self) -> None:
        self._turns = [*self._allowed, *reversed(self._allowed)] * (_TURNS // 2)
        self._steps_s: dict[Setting, list[float]] = {setting: [] for setting in self._allowed}
        self._times_ms: dict[Setting, float] = {}
        self._skip = _WARMUP_STEPS
        self._steps_left = _STEPS_OF_TURN
        self._chosen = self._allowed[0] if len(self._allowed) == 1 else None

    @property
    def current(self) -> Setting:
        """The setting of the next batch."""
        return self._chosen or self._turns[0]

    @property
    def is_settled(self) -> bool:
        """Whether all further batches have the current setting."""
        return self._chosen is not None

    def __str__(self) -> str:
        if not self.is_settled:
            return f"{self.current}; trying {len(self._allowed)} settings"
        if not self._times_ms:
            return str(self.current)
        times = ", ".join(f"{setting}: {ms:.0f} ms" for setting, ms in self._times_ms.items())
        return f"{self.current}; the fastest of {times}"

    def restrict(self, why_whole: str | None) -> None:
        """Allows only whole batches, if there is a reason to.

        Args:
            why_whole: Why batches cannot be cut; ``None`` = they can.

        Raises:
            CompatError: The reason, if no candidate is left.
        """
        whole = [setting for setting in self._allowed if setting.num_micro_batches == 1]
        if why_whole is None or whole == self._allowed:
            return
        if not whole:
            raise CompatError(why_whole)
        self._allowed = whole
        self._start()

    def note_step(
        self,
        settings: Sequence[Setting],
        step_s: float,
        pg: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        """Takes the time of a training step; the last one settles the choice. Collective then.

        Args:
            settings: Of the batches that the step worked on.
            step_s: Seconds that it took here.
            pg: Process group.
            device: Where collectives of ``pg`` run.
        """
        if self.is_settled or list(settings) != [self.current] * NUM_BATCHES:
            return
        if self._skip:
            self._skip -= 1
            return
        self._steps_s[self.current].append(step_s)
        self._steps_left -= 1
        if not self._steps_left:
            self._steps_left = _STEPS_OF_TURN
            self._turns.pop(0)
            if not self._turns:
                self._settle(pg, device)

    def _settle(self, pg: dist.ProcessGroup, device: torch.device) -> None:
        times_s = torch.tensor([median(self._steps_s[setting]) for setting in self._allowed])
        times_s = times_s.to(device)
        if pg.size() > 1:
            dist.all_reduce(times_s, dist.ReduceOp.MAX, group=pg)
        slowest_s = times_s.tolist()
        self._times_ms = {s: time_s * 1e3 for s, time_s in zip(self._allowed, slowest_s)}
        limit = _EQUAL * min(self._times_ms.values())
        self._chosen = next(s for s, time_ms in self._times_ms.items() if time_ms <= limit)
