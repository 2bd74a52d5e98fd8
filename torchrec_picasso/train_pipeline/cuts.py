"""Into how many micro-batches batches are cut, and whether they may be.

Where the number is left to the pipeline, batches are cut only if it is proved that micro-batches
train what the batch trains (:mod:`torchrec_picasso.proof`); until then, and else, every batch is
whole. A number that was asked for is refused where something is known to speak against it, and
compared with the whole batch where nothing is proved (:mod:`.cut_check`). Ranks decide together.
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
"""Proofs of one model; a model whose state changes more often is trained in whole batches."""

_OFTEN_UNTIL = 16
"""Steps in which data that differ from the first batch are likely to be new."""


def is_due(step: int) -> bool:
    """Whether a training step, counted from 1, begins with a comparison.

    Steps 1, 2, 4, 8, 16, then 64, 256, 1024, ...
    """
    is_power_of_2 = step & (step - 1) == 0
    return is_power_of_2 and (step <= _OFTEN_UNTIL or step.bit_length() % 2 == 1)


class Evidence(Protocol):
    """What speaks for micro-batches of a model, and against them, on this rank."""

    def objection(self) -> str | None:
        """What is known to speak against them, with advice; ``None`` = nothing."""

    def news(self) -> str | None:
        """What of it may come between two steps outside the model; cheap, asked every step."""

    def prove(self, flight: Flight) -> Proof:
        """Tries to prove that they train what the batch trains. Collective."""

    def compare(self, flight: Flight) -> str | None:
        """What is wrong with those of a batch, on any rank; ``None`` = nothing. Collective."""


class Cuts:
    """Decides for one model.

    Args:
        num_micro_batches: The number that was asked for; ``None`` = the fastest.
        lookahead: Whether clean rows are fetched early; ``None`` = what is faster.
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
        """Gives every batch its setting."""
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
        """Begins with a model, or anew with one that came back. Ranks give the same.

        Args:
            evidence: Speaks for and against micro-batches.
            why_whole: Why its batches cannot be cut; ``None`` = they can.
            planned: Micro-batches that its plan was priced for.
            num_samples: Samples of the largest batch of a rank.
            is_interleaved: Whether any module is; else there is nothing to hide.

        Raises:
            CompatError: If batches cannot be cut and shall be.
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
        """Whether all further batches have one setting; not before it is known if they are cut."""
        return self.choice.is_settled and (self._asked is not None or self._num_steps > 0)

    @property
    def chosen(self) -> Setting | None:
        """The setting of all further batches; ``None`` before there is one."""
        return self.choice.current if self._num_steps and self.choice.is_settled else None

    def settle_on(self, setting: Setting) -> None:
        """Takes what an earlier run chose wherever it is allowed."""
        self._known = setting
        self.choice.settle_on(setting)

    @property
    def _may_pay(self) -> bool:
        return self._is_interleaved and len(pieces_for(self._num_samples)) > 1

    @property
    def is_whole(self) -> bool:
        """Whether batches that were cut are trained whole all the same."""
        return self._asked is None and self._proof is None

    def has_changed(self, batch: Any) -> bool:
        """Whether the model or the form of its batches is another one than was looked at.

        This rank's own opinion: what follows from it waits for an agreement of all ranks.

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
            self._change = "the first batch of a rank had no samples"
        return self._change is not None

    def look(
        self, flight: Flight, has_changed: bool, pg: dist.ProcessGroup, device: torch.device
    ) -> bool:
        """Decides before a training step, where there is something to decide. Collective.

        Args:
            flight: The batch of the step.
            has_changed: Whether the model of any rank has changed since the last look.
            pg: Process group.
            device: Where collectives of ``pg`` run.

        Returns:
            Whether the model was followed or run for it; the same on all ranks.

        Raises:
            CompatError: On all ranks, if micro-batches were asked for that do not train what the
                batch trains. The step has not begun.
        """
        self._num_steps += 1
        if self._asked == 1 or self._why_whole is not None:
            return False
        assert self._evidence is not None
        has_looked = self._num_steps == 1 or has_changed
        if has_looked:
            self._prove(flight, pg, device)
        if self._asked is None or self._proof is not None:
            return has_looked
        if has_changed or is_due(self._num_steps):
            has_looked = True
            reason = agree_on(pg, device, self._evidence.objection())
            reason = reason or self._evidence.compare(flight)
            if reason is not None:
                raise CompatError(reason)
            if self._guard is not None:
                self._guard = self._guard.again(flight.batch)
        return has_looked

    def _prove(self, flight: Flight, pg: dist.ProcessGroup, device: torch.device) -> None:
        """Proves that batches may be cut, or finds what stands in the way."""
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
            self._guard = proof.guard or self._guard
            reason = agree_on(pg, device, proof.reason)
        if reason is None:
            self._proof = proof
        if self._asked is not None:
            return
        if reason is not None:
            self._settle_whole(reason)
        elif not self._is_open:
            self._open()

    def _open(self) -> None:
        self._is_open = True
        self._choose_among(candidates(None, self._lookahead))

    def _settle_whole(self, why_whole: str | None) -> None:
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
