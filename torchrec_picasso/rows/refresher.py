"""Counts accesses during training, and refreshes the hot set at intervals.

A hot set changes between two steps and equally on all ranks; the number of hot rows is constant.
Leaving rows return to their home ranks with their optimizer state, entering rows come with theirs,
so every row has the same weights and state as without the change.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from torchrec_picasso.exchange.agreement import Agreement
from torchrec_picasso.rows.group import RowGroup
from torchrec_picasso.rows.hot_rows import CountedRoute, SavedUses
from torchrec_picasso.rows.refresh_policy import Refresh

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Refreshed:
    """The result of a refresh evaluation, equal on all ranks.

    Args:
        step: Number of steps trained before it.
        num_hot: Hot rows over all tables.
        num_moved: Hot rows that were not hot before.
        moved_bytes: Weights and optimizer state of these rows, as each rank receives them.
        coverage: Share of accesses since the last evaluation or check that hit hot rows; an access
            is a batch of one rank that looks the row up. 0 without any access.
        home_uses_W: Accesses to cold rows of each home rank in that time.
    """

    step: int
    num_hot: int
    num_moved: int
    moved_bytes: int
    coverage: float
    home_uses_W: tuple[int, ...]


class Refresher:
    """Counts the accesses to some tables' rows, and refreshes their hot sets. There is one group
    per module; all are over the same ranks."""

    def __init__(self, groups: Sequence[RowGroup], policy: Refresh) -> None:
        self.policy = policy
        self._groups = groups
        counted = [CountedRoute(route) for group in groups for route in group.routes]
        self._counted = [each for each in counted if each.uses_P]
        self._uses = [uses for each in counted for uses in each.uses_P]
        self._step = 0
        self._evaluated_at = 0
        self._num_batches = 0.0  # of all ranks, decayed like the counts
        self._best_coverage = 0.0
        self._is_first_check = True

    def is_of(self, groups: Sequence[RowGroup]) -> bool:
        """Whether this refresher was made for these groups."""
        return list(map(id, groups)) == list(map(id, self._groups))

    def saved_uses(self) -> SavedUses:
        """Collects the access counts so far. Collective."""
        self._rescale()
        uses = {name: uses for each in self._counted for name, uses in each.collect().items()}
        return SavedUses(num_batches=self._num_batches, uses_by_table=uses)

    def restore_uses(self, saved: SavedUses) -> None:
        """Continues from another run's counts; all ranks call it, before the first step."""
        self._rescale()
        self._num_batches = saved.num_batches
        for each in self._counted:
            each.give(saved.uses_by_table)

    def step(self) -> Refreshed | None:
        """Ends a training step. Collective in steps with an evaluation or a check.

        Returns the result of an evaluation, ``None`` in other steps.
        """
        if not self._counted:
            return None
        self._step += 1
        self._decay()
        since = self._step - self._evaluated_at
        if since >= self.policy.every_steps:
            return self._evaluate(*self._coverage())
        if self.policy.check_steps is None or since % self.policy.check_steps:
            return None
        # A check only measures the coverage; an early evaluation follows if it fell.
        coverage, home_uses_W = self._coverage()
        self._begin_window()
        least = self.policy.coverage_kept * self._best_coverage
        # The best coverage follows the first check after an evaluation down: if the evaluation
        # found no better rows, a fall below the old best must not trigger one after another.
        if self._is_first_check:
            self._best_coverage = max(coverage, least)
            self._is_first_check = False
        elif coverage < least and 2 * since >= self.policy.every_steps:
            return self._evaluate(coverage, home_uses_W)
        return None

    def _evaluate(self, coverage: float, home_uses_W: tuple[int, ...]) -> Refreshed:
        """Evaluates the hot sets now, and changes them where counts justify it. Collective.
        ``coverage`` and ``home_uses_W`` are those since the last evaluation or check."""
        self._rescale()
        moved = [each.refresh(self.policy, self._num_batches) for each in self._counted]
        num_moved, moved_bytes = map(sum, zip(*moved))
        self._begin_window()
        self._evaluated_at, self._is_first_check = self._step, True
        refreshed = Refreshed(
            step=self._step,
            num_hot=sum(each.route.hot.num_rows for each in self._counted),
            num_moved=num_moved,
            moved_bytes=moved_bytes,
            coverage=coverage,
            home_uses_W=home_uses_W,
        )
        _log.info("hot set refreshed: %s", refreshed)
        return refreshed

    def _coverage(self) -> tuple[float, tuple[int, ...]]:
        """Share of accesses to hot rows, and accesses by home rank. Collective."""
        route = self._counted[0].route
        own = [sum(u.num_hot for u in self._uses), sum(u.num_cold for u in self._uses)]
        # host to host: the device is not waited for
        hot_W, cold_W = zip(*Agreement(route.ranks.pg, route.device, own).wait())
        total = sum(hot_W) + sum(cold_W)
        return (sum(hot_W) / total if total else 0.0), cold_W

    def _decay(self) -> None:
        """Decays all counts, so that later steps weigh more."""
        num_ranks = self._counted[0].route.ranks.size
        self._num_batches = self._num_batches * self.policy.decay + num_ranks
        for uses in self._uses:
            uses.decay(self.policy.decay)

    def _rescale(self) -> None:
        """Rescales all counts so that the latest access counts 1."""
        for uses in self._uses:
            uses.rescale()

    def _begin_window(self) -> None:
        for uses in self._uses:
            uses.begin_window()
