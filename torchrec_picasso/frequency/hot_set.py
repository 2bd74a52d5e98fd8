"""Selects the most frequent rows as hot rows: a total over all tables, or a number per table.

A total uses memory better, because the count of a row shows the savings of its replica in any
table. Ties are broken by table order, then by row, so equal statistics give equal hot sets.

Shape letters: U counted rows.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from numbers import Integral

import torch
from torch import Tensor

from torchrec_picasso.errors import PlanError
from torchrec_picasso.frequency.stats import FrequencyStats

__all__ = ["select_hot_rows"]


def select_hot_rows(
    tables: Mapping[str, int],
    hot_rows: int | Mapping[str, int],
    stats: FrequencyStats | None = None,
    *,
    without: Collection[str] = (),
) -> dict[str, Tensor]:
    """Selects the rows that get a replica on every rank: ids by table, ascending, int64.

    ``tables`` has the number of rows by table name, in model order. ``hot_rows`` is a total over
    all tables but those in ``without``, which requires statistics, or a number by table name;
    tables that the mapping lacks are left out. If the number exceeds that of seen rows, unseen rows
    follow, by table order and ascending row.

    Raises:
        PlanError: If a number is not an integer between 0 and the number of rows, a table is
            unknown, or the statistics are missing or of another model.
    """
    if isinstance(hot_rows, Mapping):
        return _per_table(tables, hot_rows, stats)
    able = {name: num_rows for name, num_rows in tables.items() if name not in without}
    _check_number("the tables together", sum(able.values()), hot_rows)
    if stats is None and hot_rows:
        raise PlanError(
            f"hot_rows={hot_rows} requires the most frequent rows of all tables, but there are no "
            "statistics; pass stats=FrequencyStats.collect(batches, model), or hot_rows as a dict "
            "{table: count}"
        )
    counts = dict.fromkeys(tables, 0)
    if stats is not None and hot_rows:
        stats.check_model(able)
        counts |= _most_frequent(able, int(hot_rows), stats)
    return _per_table(tables, counts, stats)


def _per_table(
    tables: Mapping[str, int], hot_rows: Mapping[str, int], stats: FrequencyStats | None
) -> dict[str, Tensor]:
    for name, count in hot_rows.items():
        if name not in tables:
            raise PlanError(
                f"hot_rows names table {name!r}, but the tables are {list(tables)}; check the name"
            )
        _check_number(f"table {name!r}", tables[name], count)
    named = {name: num_rows for name, num_rows in tables.items() if name in hot_rows}
    if stats is not None:
        stats.check_model(named)
    chosen = {}
    for name, num_rows in named.items():
        count = int(hot_rows[name])
        seen = frequent = torch.empty(0, dtype=torch.int64)
        if stats is not None:
            seen = stats.tables[name].rows_U
            frequent = stats.tables[name].most_frequent_first()[0][:count]
        unseen = _first_unseen(seen, num_rows, count - frequent.numel())
        chosen[name] = torch.cat([frequent, unseen]).sort().values
    return chosen


def _most_frequent(tables: Mapping[str, int], total: int, stats: FrequencyStats) -> dict[str, int]:
    """Counts each table's rows among the most frequent ones of all tables; unseen rows follow."""
    seen = [stats.tables[name].counts_U for name in tables]
    table_U = torch.arange(len(seen)).repeat_interleave(torch.tensor([c.numel() for c in seen]))
    # counts of all tables in table order; a stable sort takes equal counts in order
    first_U = torch.cat(seen).argsort(descending=True, stable=True)[:total]
    counts = dict(zip(tables, table_U[first_U].bincount(minlength=len(seen)).tolist()))
    missing = total - first_U.numel()
    for name, counts_U in zip(tables, seen):
        added = min(missing, tables[name] - counts_U.numel())
        counts[name] += added
        missing -= added
    return counts


def _first_unseen(seen: Tensor, num_rows: int, count: int) -> Tensor:
    """Returns the first ``count`` row ids outside ``seen``, or all of them if there are fewer."""
    # the first count + len(seen) rows contain at least count unseen rows
    is_candidate = torch.ones(min(num_rows, count + seen.numel()), dtype=torch.bool)
    is_candidate[seen[seen < is_candidate.numel()]] = False
    return is_candidate.nonzero().flatten()[:count]


def _check_number(where: str, num_rows: int, count: object) -> None:
    if isinstance(count, bool) or not isinstance(count, Integral):
        raise PlanError(
            f"hot_rows is {count!r} for {where}, expected an integer between 0 and {num_rows}"
        )
    if not 0 <= int(count) <= num_rows:
        raise PlanError(
            f"{int(count)} hot rows were requested for {where}, expected between 0 and {num_rows}, "
            "the number of rows"
        )
