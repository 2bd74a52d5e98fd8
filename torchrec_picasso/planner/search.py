"""TorchRec's proposals, without trying those that cannot be best: the same plan, sooner.

TorchRec's greedy proposers start from every table's fastest option and step, table by table, to
options that take less memory. That makes as many proposals as there are options, each placed table
by table. What comes next does not depend on how a proposal did, so all of them are known
beforehand, and a bound for each: no rank does less than its share. They are rated from the lowest
bound on until no other can be better, and only the winner is given to TorchRec to place.

Should TorchRec rate the winner otherwise, or the options be of kinds that are not known here, it is
given all proposals in turn, as by its own proposers.

Source: TorchRec ``planner/proposers.py`` ``GreedyProposer`` and ``UniformProposer``.

Shape letters: P proposals of one proposer, T tables, O options of all tables.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from torchrec.distributed.planner.proposers import GreedyProposer, UniformProposer
from torchrec.distributed.planner.types import Enumerator, Proposer, ShardingOption, Topology

from torchrec_picasso.planner.rating import Devices, OptionFacts, rate

__all__ = ["PlanSearch", "find_best"]

_ROUNDING = 1e-9
"""Bounds add up in another order than ratings."""


@dataclass(frozen=True)
class _Outcome:
    """How TorchRec placed a proposal; no rating where it could not."""

    rating: float | None
    topology: Topology | None


class PlanSearch(Proposer):
    """Proposes what TorchRec would choose among the proposals of its greedy and uniform proposers.

    It holds for TorchRec's own partitioner and performance model.
    """

    def __init__(self) -> None:
        self._space: list[ShardingOption] = []
        self._proposals: Iterator[list[ShardingOption]] = iter(())
        self._current: list[ShardingOption] | None = None
        self._outcome = _Outcome(None, None)

    def load(
        self, search_space: list[ShardingOption], enumerator: Enumerator | None = None
    ) -> None:
        """Takes all options; nothing is rated before TorchRec tells the memory that is left."""
        self._space = list(search_space)
        self._proposals = self._search()
        self._current = next(self._proposals, None)

    def propose(self) -> list[ShardingOption] | None:
        """TorchRec's first proposal, then the best of all if that is another."""
        return self._current

    def feedback(
        self,
        partitionable: bool,
        plan: list[ShardingOption] | None = None,
        perf_rating: float | None = None,
        storage_constraint: Topology | None = None,
    ) -> None:
        """Goes on to the next proposal, knowing how this one did."""
        self._outcome = _Outcome(perf_rating if partitionable else None, storage_constraint)
        self._current = next(self._proposals, None)

    def _search(self) -> Iterator[list[ShardingOption]]:
        """Two proposals at most; all of them where TorchRec does not rate the best as foreseen."""
        first = next(self._in_turn(), None)
        if first is None:
            return
        yield first
        found = None
        if self._outcome.topology is not None:
            found = find_best(self._space, self._outcome.topology)
        if found is not None:
            positions, rating = found
            best = [self._space[position] for position in positions]
            if any(option is not other for option, other in zip(best, first)):
                yield best
            if self._outcome.rating == rating:
                return
        yield from self._in_turn()

    def _in_turn(self) -> Iterator[list[ShardingOption]]:
        """All proposals, as TorchRec's planner asks for them."""
        for proposer in (GreedyProposer(), GreedyProposer(use_depth=False), UniformProposer()):
            proposer.load(self._space)
            while (proposal := proposer.propose()) is not None:
                yield proposal
                proposer.feedback(partitionable=True)


@dataclass(frozen=True)
class _Steps:
    """The proposals of one proposer: the first, and the one option that each other one changes.

    Args:
        start_T: Option of each table, as a position among all options.
        tables_P: Which table each step changes.
        options_P: To which option.
    """

    start_T: np.ndarray
    tables_P: np.ndarray
    options_P: np.ndarray

    def after(self, num_steps: int) -> np.ndarray:
        """Options of all tables after some steps, shape ``(T,)``."""
        options_T = self.start_T.copy()
        options_T[self.tables_P[:num_steps]] = self.options_P[:num_steps]  # the last one stays
        return options_T

    def sums(self, of_O: np.ndarray) -> np.ndarray:
        """Sum over the tables of a number per option, after 0 to P steps, shape ``(P + 1,)``."""
        options_T, changes = self.start_T.copy(), [float(of_O[self.start_T].sum())]
        for table, option in zip(self.tables_P.tolist(), self.options_P.tolist()):
            changes.append(float(of_O[option] - of_O[options_T[table]]))
            options_T[table] = option
        return np.cumsum(changes)


def find_best(
    space: Sequence[ShardingOption], topology: Topology
) -> tuple[list[int], float] | None:
    """The best of the proposals that TorchRec's greedy and uniform proposers would make.

    Args:
        space: Estimated options of all tables.
        topology: Devices, with the memory that is left on them.

    Returns:
        Positions of its options in ``space`` and its rating; of equal ratings the one that TorchRec
        would try first. ``None`` if no proposal fits, or there are options of other kinds.
    """
    devices = Devices.of(topology)
    facts: list[OptionFacts] = []
    for option in space:
        known = OptionFacts.of(option, topology.world_size)
        if known is None:
            return None
        facts.append(known)
    total_O = np.array([sum(of.total_ms) for of in facts])
    spread_O = np.array([min(of.total_ms) if of.is_uniform else 0.0 for of in facts])
    largest_O = np.array([0.0 if of.is_uniform else max(of.total_ms) for of in facts])
    sequences = _sequences(space, facts)
    ordered = sorted(
        (bound, number, step)
        for number, steps in enumerate(sequences)
        for step, bound in enumerate((steps.sums(total_O) / topology.world_size).tolist())
    )
    best: tuple[float, int, int] | None = None
    for bound, number, step in ordered:
        if best is not None and bound * (1 - _ROUNDING) > best[0]:
            break
        options_T = sequences[number].after(step)
        # a rank with the largest shard has its share of the spread tables too
        bound = float(spread_O[options_T].sum() + largest_O[options_T].max())
        if best is not None and bound * (1 - _ROUNDING) > best[0]:
            continue
        rating = rate([facts[option] for option in options_T.tolist()], devices)
        if rating is not None and (best is None or (rating, number, step) < best):
            best = (rating, number, step)
    if best is None:
        return None
    return sequences[best[1]].after(best[2]).tolist(), best[0]


def _sequences(space: Sequence[ShardingOption], facts: Sequence[OptionFacts]) -> list[_Steps]:
    """Proposals of the two greedy proposers, then of the uniform one, each alone."""
    by_table: dict[str, list[int]] = {}
    by_type: dict[str, dict[str, list[int]]] = {}
    for position, option in enumerate(space):
        by_table.setdefault(option.fqn, []).append(position)
        by_type.setdefault(option.sharding_type, {}).setdefault(option.fqn, []).append(position)

    def slowest_shard(position: int) -> float:
        return max(facts[position].total_ms)

    def all_shards(position: int) -> float:
        return sum(facts[position].total_ms)

    sequences = [
        _greedy([sorted(options, key=key) for options in by_table.values()], facts)
        for key in (slowest_shard, all_shards)
    ]
    for tables in by_type.values():
        if tables.keys() == by_table.keys():
            fastest = [min(options, key=slowest_shard) for options in tables.values()]
            sequences.append(_greedy([[option] for option in fastest], facts))
    return sequences


def _greedy(options_T: Sequence[Sequence[int]], facts: Sequence[OptionFacts]) -> _Steps:
    """Steps from every table's first option: always the table that takes most memory, while it has
    another option."""
    index_T = [0] * len(options_T)
    largest: list[tuple[tuple[int, ...], int]] = []

    def offer(table: int) -> None:
        options, index = options_T[table], index_T[table]
        if index + 1 < len(options):
            storages = facts[options[index]].storages
            memory = [[storage[kind] for storage in storages] for kind in (0, 1)]
            key = tuple(size for of in memory for size in (max(of), sum(of)))
            if any(key):  # TorchRec leaves tables without memory as they are
                heapq.heappush(largest, (tuple(-size for size in key), table))

    for table in range(len(options_T)):
        offer(table)
    tables, options = [], []
    while largest:
        _, table = heapq.heappop(largest)
        index_T[table] += 1
        tables.append(table)
        options.append(options_T[table][index_T[table]])
        offer(table)
    return _Steps(
        start_T=np.array([of[0] for of in options_T], dtype=np.int64),
        tables_P=np.array(tables, dtype=np.int64),
        options_P=np.array(options, dtype=np.int64),
    )
