"""Decides whether batches are cut into micro-batches, and into how many.

If the pipeline chooses the number, batches are cut only after a proof that micro-batches train
the same as the batch (:mod:`torchrec_picasso.proof`); before and without it every batch is trained
whole. A number that the user requested is refused if a known fact contradicts it, and compared with
the whole batch if there is no proof (:mod:`.cut_check`). All ranks decide together.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from torchrec_picasso.batches.split import num_samples
from torchrec_picasso.errors import CompatError
from torchrec_picasso.exchange.agreement import agree_on
from torchrec_picasso.proof.guard import Guard
from torchrec_picasso.proof.proof import Proof
from torchrec_picasso.schedule.schedule import NUM_BATCHES, Setting
from torchrec_picasso.schedule.setting_choice import (
    SettingChoice,
    StepClock,
    candidates,
    pieces_for,
)
from torchrec_picasso.train_pipeline.cut_check import CutEvidence
from torchrec_picasso.train_pipeline.in_flight_batch import InFlightBatch

_log = logging.getLogger(__name__)

_MOST_PROOFS = 3
"""Proofs per model; a model whose state changes more often is trained in whole batches."""

_OFTEN_UNTIL = 16
"""Steps in which data of another form than the first batch are most likely to appear."""


def is_due(step: int) -> bool:
    """Whether a training step, counted from 1, starts with a comparison. Steps 1, 2, 4, 8, 16, then
    64, 256, 1024, ..."""
    is_power_of_2 = step & (step - 1) == 0
    return is_power_of_2 and (step <= _OFTEN_UNTIL or step.bit_length() % 2 == 1)


class MicroBatchPolicy:
    """Decides whether batches are trained whole or in micro-batches, and times the steps. ``None``
    for a number of micro-batches or for lookahead = the fastest."""

    def __init__(
        self, num_micro_batches: int | None, lookahead: bool | None, device: torch.device
    ) -> None:
        self._asked, self._lookahead = num_micro_batches, lookahead
        self._device, self._clock = device, StepClock(device)
        self._counts = False
        """Whether this step is one that its setting makes: without a proof, and not whole in place
        of micro-batches."""
        # the first training step is whole, and so is one after forwards without backwards, which
        # leave DistributedDataParallel waiting
        self._is_next_whole = True
        self._evidence: CutEvidence
        """Set by :meth:`begin`."""
        self._known: Setting | None = None
        self._proof: Proof | None = None
        self._guard: Guard | None = None
        self._num_proofs = self._num_steps = 0
        self._why_whole: str | None = None
        self._change: str | None = None
        self._choice = SettingChoice([Setting(1, lookahead is not False)])
        if num_micro_batches is not None:
            self._choice = SettingChoice(candidates(num_micro_batches, lookahead))

    def begin(self, evidence: CutEvidence) -> None:
        """Starts with a model, or starts again with a model that was attached again.

        All ranks have the same facts about their first batches, and raise CompatError if the user
        requested micro-batches and batches cannot be cut.
        """
        self._evidence, self._proof, self._guard = evidence, None, None
        self._num_proofs = self._num_steps = 0
        self._why_whole = None
        pipelined, why_whole = evidence.pipelined, evidence.pipelined.why_whole_batches()
        if self._asked is not None:
            if self._asked > 1 and why_whole is not None:
                raise CompatError(why_whole)
            self._choose_among(self._asked)
            return
        # with a few samples, or nothing to hide, micro-batches cannot be faster
        may_pay = (
            bool(pipelined.interleaved) and len(pieces_for(pipelined.first_batch.num_samples)) > 1
        )
        if why_whole is not None or not may_pay:
            self._settle_whole(why_whole)

    @property
    def current(self) -> Setting:
        """The setting of the next batch."""
        return self._choice.current

    @property
    def is_settled(self) -> bool:
        """Whether all further batches have one setting; ``False`` before the first decision."""
        return self._choice.is_settled and (self._asked is not None or self._num_steps > 0)

    @property
    def is_proved(self) -> bool:
        """Whether a proof shows that micro-batches train the same as the batch."""
        return self._proof is not None

    @property
    def equal_rows(self) -> Sequence[Sequence[str]]:
        """Groups of rows to be counted in each batch, see :attr:`.Proof.equal_rows`."""
        return () if self._proof is None else self._proof.equal_rows

    @property
    def chosen(self) -> Setting | None:
        """The setting of all further batches; ``None`` before it is chosen, or while batches are
        whole for a reason that a later run may not have."""
        return self._choice.chosen if self._num_steps and self._why_whole is None else None

    def settle_on(self, setting: Setting) -> None:
        """Sets the choice of an earlier run, which applies wherever it is allowed."""
        self._known = setting
        self._choice.settle_on(setting)

    def has_changed(self, batch: Any) -> bool:
        """Whether the model or the form of the next batch differs from what was examined. This
        rank's result only: its consequences wait until all ranks agree."""
        self._change = None
        if self._why_whole is not None:
            return False
        if self._guard is not None:
            self._change = self._guard.changed(batch) or self._evidence.hook_on_wrappers()
        elif self._proof is not None and num_samples(batch):
            # a proof without a guard: this rank's first batch was empty, so it saw nothing
            self._change = "the first batch of a rank had no samples"
        return self._change is not None

    def train_whole_next(self) -> None:
        """Makes the next training step run on a whole batch; it follows no training step."""
        self._is_next_whole = True
        self.forget_step()

    def forget_step(self) -> None:
        """Notes that the next training step follows none, so that its time does not count."""
        self._clock.forget_step()

    def decide_whether_whole(self, inflight: InFlightBatch, has_changed: bool) -> None:
        """Decides before a training step whether its batch is trained whole. Collective.

        ``has_changed`` tells whether the model of any rank has changed since the last decision.
        Raises CompatError on all ranks, if the user requested micro-batches that do not train the
        same as the batch. The step has not begun.
        """
        # before a proof or comparison: these compute the outputs of the batch that the step uses
        inflight.is_whole |= self._is_next_whole
        has_examined = self._examine(inflight, has_changed)
        inflight.is_whole |= self._asked is None and self._proof is None
        if has_examined and self._proof is not None:
            # rows that have to be equal were not counted yet; only ranks with samples know of any
            uncounted = "rows are not counted" if self.equal_rows else None
            inflight.is_whole |= self._agree_on(uncounted) is not None
        self._is_next_whole = False
        is_cut = not inflight.is_whole or inflight.setting.num_micro_batches == 1
        self._counts = is_cut and not has_examined

    def end_step(self, settings: Sequence[Setting], num_samples: int) -> None:
        """Gives the autotuner the time of a step that worked on batches with these settings, the
        first one of so many samples. Collective at some steps."""
        span = self._clock.end_step()
        if len(settings) < NUM_BATCHES:
            self.forget_step()  # data ends: the next step is of other data
            return
        counted, pg = span if self._counts else None, self._evidence.pipelined.pg
        self._choice.note_step(settings, counted, num_samples, self._clock, pg)

    def _examine(self, inflight: InFlightBatch, has_changed: bool) -> bool:
        """Runs a proof or a comparison if one is due; returns whether any ran. Collective."""
        self._num_steps += 1
        if self._asked == 1 or self._why_whole is not None:
            return False  # whole batches, for good
        has_examined = self._num_steps == 1 or has_changed
        if has_examined:
            self._prove(inflight)
        if self._asked is None or self._proof is not None:
            return has_examined  # proved, or trained whole without a proof
        if has_changed or is_due(self._num_steps):
            has_examined = True
            reason = self._agree_on(self._evidence.objection())
            reason = reason or self._evidence.compare(inflight)
            if reason is not None:
                raise CompatError(reason)
            if self._guard is not None:
                # the comparison examined the current model
                self._guard = self._guard.again(inflight.batch)
        return has_examined

    def _agree_on(self, reason: str | None) -> str | None:
        return agree_on(self._evidence.pipelined.pg, self._device, reason)

    def _prove(self, inflight: InFlightBatch) -> None:
        """Runs a proof on all ranks, and settles the number of micro-batches by its result."""
        self._proof = None
        reason = self._agree_on(self._evidence.objection())
        if reason is not None and self._asked is not None:
            raise CompatError(reason)
        self._num_proofs += 1
        if reason is None and self._num_proofs > _MOST_PROOFS:
            reason = f"the model changes while it trains: {self._agree_on(self._change)}"
        if reason is None:
            proof = self._evidence.prove(inflight)
            # a failed proof keeps the earlier guard, which still watches for the next change
            self._guard = proof.guard or self._guard
            reason = self._agree_on(proof.reason)
            self._proof = proof if reason is None else None
        if self._asked is not None:
            return  # the number stays, proved or not; unproved it is compared by _examine()
        if reason is not None:
            self._settle_whole(reason)
        else:
            self._choose_among(None)

    def _settle_whole(self, why_whole: str | None) -> None:
        """Lets the autotuner choose among the settings without micro-batches."""
        self._why_whole = why_whole
        if why_whole is not None:
            _log.info("batches are trained whole: %s", why_whole)
        self._choose_among(1)

    def _choose_among(self, num_micro_batches: int | None) -> None:
        """Lets the autotuner choose among the settings that may be fastest; ``None`` = any."""
        pipelined, asked = self._evidence.pipelined, (num_micro_batches, self._lookahead)
        num_samples, is_any = pipelined.first_batch.num_samples, bool(pipelined.interleaved)
        allowed = candidates(*asked, num_samples, is_any)
        if allowed != self._choice.allowed:
            self._choice = SettingChoice(allowed, pipelined.planned_micro_batches, self._known)

    def __str__(self) -> str:
        why = f"; batches are whole: {self._why_whole}" if self._why_whole else ""
        unproved = self._asked is not None and self._asked > 1 and self._proof is None
        compared = "; not proved, compared with whole batches now and then" if unproved else ""
        return f"{self._choice}{why}{compared}"
