"""Decides whether batches are split into micro-batches, and into how many.

If the pipeline chooses the number, batches are split only after a proof that micro-batches train
the same as the batch (:mod:`torchrec_picasso.proof`); before and without it every batch is trained
whole. A number that the user requested is refused if a known fact contradicts it, and compared with
the whole batch if there is no proof (:mod:`.cut_check`). All ranks decide together.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from torchrec_picasso.batches.split import num_samples
from torchrec_picasso.errors import CompatError
from torchrec_picasso.exchange.consensus import agree_on
from torchrec_picasso.proof.guard import Guard
from torchrec_picasso.proof.proof import Proof
from torchrec_picasso.schedule.schedule import Setting
from torchrec_picasso.schedule.setting_choice import SettingChoice, candidates, pieces_for
from torchrec_picasso.train_pipeline.flight import Flight

__all__ = ["Cuts", "Evidence", "is_due"]

_log = logging.getLogger(__name__)

_MOST_PROOFS = 3
"""Proofs per model; a model whose state changes more often is trained in whole batches."""

_OFTEN_UNTIL = 16
"""Steps in which data of another form than the first batch are likely to come up first."""


def is_due(step: int) -> bool:
    """Whether a training step, counted from 1, starts with a comparison.

    Steps 1, 2, 4, 8, 16, then 64, 256, 1024, ...
    """
    is_power_of_2 = step & (step - 1) == 0
    return is_power_of_2 and (step <= _OFTEN_UNTIL or step.bit_length() % 2 == 1)


class Evidence(Protocol):
    """The facts for and against micro-batches of a model, on this rank."""

    def objection(self) -> str | None:
        """The known fact against micro-batches, with advice; ``None`` = none."""

    def news(self) -> str | None:
        """An objection outside the model, which may arise between two steps; cheap, every step."""

    def prove(self, flight: Flight) -> Proof:
        """Tries to prove that micro-batches train the same as the batch. Collective."""

    def compare(self, flight: Flight) -> str | None:
        """Compares micro-batches of a batch with the batch; a difference on any rank, or ``None``.

        Collective: every rank calls this at the same step.
        """


class Cuts:
    """Decides between micro-batches and whole batches, for one model.

    Args:
        num_micro_batches: Number that the user requested; ``None`` = the fastest.
        lookahead: Whether clean rows are fetched early; ``None`` = the faster choice.
    """

    def __init__(self, num_micro_batches: int | None, lookahead: bool | None) -> None:
        self._asked, self._lookahead = num_micro_batches, lookahead
        self._evidence: Evidence | None = None
        self._planned: int | None = None
        self._known: Setting | None = None
        self._num_samples = 0
        self._is_interleaved = False
        self._proof: Proof | None = None
        self._guard: Guard | None = None
        self._num_proofs = self._num_steps = 0
        self._is_open = False
        self._why_whole: str | None = None
        self._change: str | None = None
        self.choice = SettingChoice([Setting(1, lookahead is not False)])
        """Chooses the setting of each batch."""
        if num_micro_batches is not None:
            self.choice = SettingChoice(candidates(num_micro_batches, lookahead))

    def begin(
        self,
        evidence: Evidence,
        why_whole: str | None,
        *,
        planned: int | None,
        num_samples: int,
        is_interleaved: bool,
    ) -> None:
        """Starts with a model, or starts again with a model that was attached again.

        All ranks pass equal arguments, except ``evidence``.

        Args:
            evidence: The facts for and against micro-batches.
            why_whole: Reason why its batches cannot be split; ``None`` = they can.
            planned: Number of micro-batches that the plan was priced for.
            num_samples: Samples of the largest batch of a rank.
            is_interleaved: Whether any module is; without one there is no exchange to overlap.

        Raises:
            CompatError: If the user requested micro-batches and batches cannot be split.
        """
        self._evidence, self._proof, self._guard = evidence, None, None
        self._num_proofs = self._num_steps = 0
        self._planned, self._num_samples = planned, num_samples
        self._is_interleaved = is_interleaved
        if self._asked is not None:
            if self._asked > 1 and why_whole is not None:
                raise CompatError(why_whole)
            self.choice.narrow(num_samples, is_interleaved)
        elif why_whole is not None or not self._may_pay:
            self._settle_whole(why_whole)

    @property
    def is_settled(self) -> bool:
        """Whether all further batches have one setting; ``False`` before the first decision."""
        return self.choice.is_settled and (self._asked is not None or self._num_steps > 0)

    @property
    def chosen(self) -> Setting | None:
        """The setting of all further batches; ``None`` before it is chosen."""
        return self.choice.current if self._num_steps and self.choice.is_settled else None

    def settle_on(self, setting: Setting) -> None:
        """Sets the choice of an earlier run, which applies wherever it is allowed."""
        self._known = setting
        self.choice.settle_on(setting)

    @property
    def _may_pay(self) -> bool:
        """Whether micro-batches could be faster at all."""
        return self._is_interleaved and len(pieces_for(self._num_samples)) > 1

    @property
    def is_whole(self) -> bool:
        """Whether a batch is trained whole even if it was split for the exchange of its rows."""
        return self._asked is None and self._proof is None

    def has_changed(self, batch: Any) -> bool:
        """Whether the model or the form of its batches differs from what was examined.

        This rank's result only: its consequences wait until all ranks agree.

        Args:
            batch: The next batch.
        """
        self._change = None
        if self._why_whole is not None:
            return False
        if self._guard is not None:
            assert self._evidence is not None
            self._change = self._guard.changed(batch) or self._evidence.news()
        elif self._proof is not None and num_samples(batch):
            # a proof without a guard: this rank's first batch was empty, so it saw nothing
            self._change = "the first batch of a rank had no samples"
        return self._change is not None

    def look(
        self, flight: Flight, has_changed: bool, pg: dist.ProcessGroup, device: torch.device
    ) -> bool:
        """Decides before a training step, if a decision is due. Collective.

        Args:
            flight: The in-flight batch of the step.
            has_changed: Whether the model of any rank has changed since the last decision.
            pg: Process group.
            device: Device of the collectives of ``pg``.

        Returns:
            Whether the model was followed or run for it; the same on all ranks.

        Raises:
            CompatError: On all ranks, if the user requested micro-batches that do not train the
                same as the batch. The step has not begun.
        """
        self._num_steps += 1
        if self._asked == 1 or self._why_whole is not None:
            return False  # whole batches, for good
        assert self._evidence is not None
        has_looked = self._num_steps == 1 or has_changed
        if has_looked:
            self._prove(flight, pg, device)
        if self._asked is None or self._proof is not None:
            return has_looked  # proved, or trained whole without a proof
        if has_changed or is_due(self._num_steps):
            has_looked = True
            reason = agree_on(pg, device, self._evidence.objection())
            reason = reason or self._evidence.compare(flight)
            if reason is not None:
                raise CompatError(reason)
            if self._guard is not None:
                # the comparison examined the current model
                self._guard = self._guard.again(flight.batch)
        return has_looked

    def _prove(self, flight: Flight, pg: dist.ProcessGroup, device: torch.device) -> None:
        """Runs a proof on all ranks, and settles the number of micro-batches by its result."""
        assert self._evidence is not None
        self._proof = None
        reason, proof = agree_on(pg, device, self._evidence.objection()), None
        if reason is not None and self._asked is not None:
            raise CompatError(reason)
        self._num_proofs += 1
        if reason is None and self._num_proofs > _MOST_PROOFS:
            reason = agree_on(pg, device, self._change)
            reason = f"the model changes while it trains: {reason}"
        if reason is None:
            proof = self._evidence.prove(flight)
            # a failed proof keeps the earlier guard, which still watches for the next change
            self._guard = proof.guard or self._guard
            reason = agree_on(pg, device, proof.reason)
        if reason is None:
            self._proof = proof
        if self._asked is not None:
            # a requested number stays, proved or not; unproved it is compared by look()
            return
        if reason is not None:
            self._settle_whole(reason)
        elif not self._is_open:
            self._open()

    def _open(self) -> None:
        """Lets the autotuner choose among all settings."""
        self._is_open = True
        self._choose_among(candidates(None, self._lookahead))

    def _settle_whole(self, why_whole: str | None) -> None:
        """Lets the autotuner choose among the settings without micro-batches."""
        self._why_whole, self._is_open = why_whole, False
        if why_whole is not None:
            _log.info("batches are trained whole: %s", why_whole)
        self._choose_among(candidates(1, self._lookahead))

    def _choose_among(self, allowed: Sequence[Setting]) -> None:
        self.choice = SettingChoice(allowed, self._planned)
        self.choice.settle_on(self._known)
        self.choice.narrow(self._num_samples, self._is_interleaved)

    def __str__(self) -> str:
        why = f"; batches are whole: {self._why_whole}" if self._why_whole else ""
        unproved = self._asked is not None and self._asked > 1 and self._proof is None
        compared = "; not proved, compared with whole batches now and then" if unproved else ""
        return f"{self.choice}{why}{compared}"
