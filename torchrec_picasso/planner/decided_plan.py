"""Proposes to TorchRec's planner the plan that the decision chose.

The decision names a sharding type for every table, and a table that it leaves to TorchRec takes the
option that TorchRec rates fastest, as in the first proposal of TorchRec's ``GreedyProposer``. So
there is one proposal, which TorchRec's partitioner places. TorchRec's own proposers follow where
that proposal does not fit into memory.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from torchrec.distributed.planner.types import Enumerator, Proposer, ShardingOption, Topology

from torchrec_picasso.planner.enumerator import HotColdEnumerator

__all__ = ["DecidedPlan"]

_LOGGER = logging.getLogger("torchrec_picasso.planner")


class DecidedPlan(Proposer):
    """The decided plan first; other proposers only if it does not fit.

    Args:
        others: What proposes then, in this order.
    """

    def __init__(self, others: Sequence[Proposer]) -> None:
        self._others = list(others)
        self._decided: list[ShardingOption] | None = None
        self._left: list[Proposer] = []

    def load(
        self, search_space: list[ShardingOption], enumerator: Enumerator | None = None
    ) -> None:
        """Takes all options, and from the enumerator those that were decided."""
        self._decided = None
        if isinstance(enumerator, HotColdEnumerator):
            self._decided = enumerator.decided_options(search_space)
        for proposer in self._others:
            proposer.load(search_space, enumerator)
        self._left = list(self._others)

    def propose(self) -> list[ShardingOption] | None:
        """The decided plan, or the next proposal of the others."""
        if self._decided is not None:
            return self._decided
        while self._left:
            proposal = self._left[0].propose()
            if proposal:
                return proposal
            self._left.pop(0)
        return None

    def feedback(
        self,
        partitionable: bool,
        plan: list[ShardingOption] | None = None,
        perf_rating: float | None = None,
        storage_constraint: Topology | None = None,
    ) -> None:
        """Ends with the decided plan if it could be placed."""
        if self._decided is None:
            self._left[0].feedback(partitionable, plan, perf_rating, storage_constraint)
            return
        self._decided = None
        if partitionable:
            self._left = []
        else:
            _LOGGER.warning(
                "the plan with the least predicted step does not fit into memory; TorchRec's "
                "proposers look for another one"
            )
