"""Cost of rows that travel by host: in an exchange of two parts, inside hosts and across them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torchrec_picasso.cost.curves import LEVELS, CommCurves
from torchrec_picasso.cost.hot_cold import (
    FLAGS_BYTES,
    WIRE_BYTES,
    Exchange,
    ExchangeTimes,
    HotColdTable,
    HotColdTotals,
    Way,
    id_bytes,
)
from torchrec_picasso.cost.local import LocalCosts, LocalWork
from torchrec_picasso.cost.table_work import TableWork

_RELAYED, _RELAYED_BYTES = 1.125, 100
"""Of relays: vectors held per row that one asks home ranks for, and per gradient that it sums, both
in buffers with their slack; bytes of positions per row that it is asked for."""


@dataclass(frozen=True, kw_only=True)
class ByHost(Exchange):
    """The tables whose rows travel by host."""

    way = "by host"
    # On two hosts of two ranks they were predicted to take 0.93 to 1.1 of flat rows, and took 1.05
    # to 1.15; on two of four 0.81 to 0.86, and took 0.83 to 0.94; on four of two 0.85 to 0.98, and
    # took 0.93 to 1.07.
    margin = 0.1

    crossing: HotColdTotals
    """The cold rows that a relay asks home ranks for, each once, and those of them that are dirty:
    distinct rows of the batches of a host's ranks, over the number of these."""
    ranks_per_host: int

    @classmethod
    def from_tables(cls, tables: Sequence[HotColdTable], num_packs: int) -> ByHost:
        """Computes the work of tables, and what crosses hosts of them."""
        own = Exchange.from_tables(tables, num_packs)
        crossing = HotColdTotals.sum(_crossing(work, num_hot) for work, num_hot, _ in tables)
        places = tables[0][0].ranks_per_host
        return cls(**vars(own), crossing=crossing, ranks_per_host=places)

    @staticmethod
    def has_price(curves: CommCurves, world_size: int) -> bool:
        """Whether exchanges of levels were measured, on fewer ranks of a host than these."""
        return curves.has_levels and curves.ranks_per_host < world_size

    @staticmethod
    def held(work: TableWork, num_hot: float) -> tuple[float, float]:
        """Returns what relays hold."""
        cold = work.split(num_hot).cold_used
        return _RELAYED * (_crossing(work, num_hot).cold + cold), cold * _RELAYED_BYTES

    @staticmethod
    def describe(work: TableWork, num_hot: float) -> str:
        """Compares the rows that cross hosts with those that ranks ask for."""
        cold, crossing = work.split(num_hot).cold_used, _crossing(work, num_hot).cold
        return f"{crossing:,.0f} rows are sent instead of {cold:,.0f} between hosts, "

    def ways(self, world_size: int) -> list[Way]:
        """Predicts what travels inside hosts and across them: row numbers cross with repeats, rows
        and their gradients once per host."""
        totals, places = self.totals, self.ranks_per_host
        hot = totals.touched_elements * WIRE_BYTES
        header, united = self._pair_bytes(world_size)
        found = []
        for level, num, carried, summed, uniting in (
            (LEVELS[0], places, totals, hot, places),
            # each place sums a piece over hosts, and unites the bits of its host
            (LEVELS[1], world_size // places, self.crossing, hot / places, world_size),
        ):
            rows = carried.cold_elements * WIRE_BYTES
            sent = {
                "flags": num * FLAGS_BYTES,
                # each peer gets those of the ranks behind it
                "header": world_size * header,
                "ids": totals.cold * id_bytes(totals.rows / world_size) + uniting * united,
                "rows": rows,
                "gradients": rows,
                "hot": 2 * summed,
            }
            sent = {name: (num - 1) / num * num_bytes for name, num_bytes in sent.items()}
            found.append(Way(level, level, carried, sent))
        return found

    def with_own_work(self, times: ExchangeTimes, costs: LocalCosts) -> ExchangeTimes:
        """Adds the work of relays: row numbers are sorted there, and once more at home; each asked
        row is copied, and its gradient is summed, once more."""
        totals, ours = self.totals, costs.hot_cold
        relayed = LocalWork(calls=0, rows=totals.cold, row_elements=totals.cold_elements)
        return replace(
            times,
            ids_ms=times.ids_ms + 2 * ours.input_dist.lookup_ns * totals.cold * 1e-6,
            gather_ms=times.gather_ms + ours.forward.ms(relayed),
            update_ms=times.update_ms + ours.backward.ms(relayed),
        )


def _crossing(work: TableWork, num_hot: float) -> HotColdTotals:
    """Returns the rows of a table that a relay asks home ranks for."""
    split, places, dim = work.split(num_hot), work.ranks_per_host, work.load.dim
    cold, dirty = split.cold_on_host / places, split.dirty_on_host / places
    return HotColdTotals(cold=cold, cold_elements=cold * dim, dirty_elements=dirty * dim)
