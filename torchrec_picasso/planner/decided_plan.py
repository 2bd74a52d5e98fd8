"""A proposer for TorchRec's planner: the decided plan, then TorchRec's own proposals.

The decision determines the sharding type of each table; each table left to TorchRec takes the
option with TorchRec's best rating, as in the first proposal of ``GreedyProposer``. TorchRec's
partitioner places this proposal.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from torchrec.distributed.planner.types import Enumerator, Proposer, ShardingOption, Topology

from torchrec_picasso.planner.enumerator import HotColdEnumerator

__all__ = ["DecidedPlan"]

_LOGGER = logging.getLogger("torchrec_picasso.planner")


class DecidedPlan(Proposer):
    """Proposes the decided plan; other proposers follow only if it does not fit.

    Args:
        others: The other proposers, in order.
    """

    def __init__(self, others: Sequence[Proposer]) -> None:
        self._others = list(others)
        self._decided: list[ShardingOption] | None = None
        self._left: list[Proposer] = []

    def load(
        self, search_space: list[ShardingOption], enumerator: Enumerator | None = None
    ) -> None:
        """Loads all options, and the decided ones from the enumerator."""
        self._decided = None
        if isinstance(enumerator, HotColdEnumerator):
            self._decided = enumerator.decided_options(search_space)
        for proposer in self._others:
            proposer.load(search_space, enumerator)
        self._left = list(self._others)

    def propose(self) -> list[ShardingOption] | None:
        """Returns the decided plan, or the next proposal of the other proposers."""
        if self._decided is not None:
            return self._decided
        # an exhausted proposer returns None
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
        """Ends the search if the decided plan was placed; else passes on to the other proposers."""
        if self._decided is None:
            self._left[0].feedback(partitionable, plan, perf_rating, storage_constraint)
            return
        self._decided = None
        if partitionable:
            self._left = []
        else:
            _LOGGER.warning(
                "the plan with the shortest predicted step does not fit into memory; TorchRec's "
                "proposers search for another plan"
            )
