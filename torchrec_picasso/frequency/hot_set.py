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
    follow, by table order and ascending row. Raises PlanError if a number is not an integer between
    0 and the number of rows, a table is unknown, or the statistics are missing or of another model.
    """
    if isinstance(hot_rows, Mapping):
        for name, count in hot_rows.items():
            if name not in tables:
                raise PlanError(
                    f"hot_rows names table {name!r}, but the tables are {list(tables)}; check the "
                    "name"
                )
            _check_number(f"table {name!r}", tables[name], count)
        parts = [({name: tables[name]}, hot_rows[name]) for name in tables if name in hot_rows]
    else:
        able = {name: num_rows for name, num_rows in tables.items() if name not in without}
        _check_number("the tables together", sum(able.values()), hot_rows)
        if stats is None and hot_rows:
            raise PlanError(
                f"hot_rows={hot_rows} requires the most frequent rows of all tables, but there are "
                "no statistics; pass stats=FrequencyStats.collect(batches, model), or hot_rows as "
                "a dict {table: count}"
            )
        parts = [(able, hot_rows), ({name: tables[name] for name in tables if name in without}, 0)]
    chosen: dict[str, Tensor] = {}
    for part, count in parts:
        if stats is not None:
            stats.check_model(part)
        chosen |= _most_frequent(part, int(count), stats)
    return {name: chosen[name] for name in tables if name in chosen}


def _most_frequent(
    tables: Mapping[str, int], count: int, stats: FrequencyStats | None
) -> dict[str, Tensor]:
    """Returns the ``count`` most frequent rows of some tables together; unseen rows follow."""
    empty = torch.empty(0, dtype=torch.int64)
    seen = [empty if stats is None else stats.tables[name].rows_U for name in tables]
    counts = [empty if stats is None else stats.tables[name].counts_U for name in tables]
    # counts of all tables in table order; a stable sort takes equal counts in order
    first_U = torch.cat([empty, *counts]).argsort(descending=True, stable=True)[:count]
    is_first_U = torch.zeros(sum(map(len, seen)), dtype=torch.bool)
    is_first_U[first_U] = True
    missing = count - first_U.numel()
    chosen, by_table = {}, is_first_U.split(list(map(len, seen)))
    for (name, num_rows), rows_U, is_hot_U in zip(tables.items(), seen, by_table):
        unseen = _first_unseen(rows_U, num_rows, missing)
        missing -= unseen.numel()
        chosen[name] = torch.cat([rows_U[is_hot_U], unseen]).sort().values
    return chosen


def _first_unseen(seen: Tensor, num_rows: int, count: int) -> Tensor:
    """Returns the first ``count`` row ids outside ``seen``, or all of them if there are fewer."""
    # the first count + len(seen) rows contain at least count unseen rows
    is_candidate = torch.ones(min(num_rows, count + seen.numel()), dtype=torch.bool)
    is_candidate[seen[seen < is_candidate.numel()]] = False
    return is_candidate.nonzero().flatten()[:count]


def _check_number(where: str, num_rows: int, count: object) -> None:
    is_number = isinstance(count, Integral) and not isinstance(count, bool)
    if not is_number or count not in range(num_rows + 1):
        raise PlanError(
            f"hot_rows is {count!r} for {where}, expected an integer between 0 and {num_rows}, the "
            "number of rows"
        )
