"""Finds the tables that can be hot/cold, and refuses requests that cannot be fulfilled.

A request by table name is fulfilled or refused, never ignored: naming a table that cannot be
hot/cold, or cannot have hot rows, is an error. A total number of hot rows, and the choice of the
cost model, apply to the tables that can be hot/cold; TorchRec places the other tables.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

import torch
from torchrec.distributed.planner.types import ShardingOption
from torchrec.modules.embedding_modules import EmbeddingCollection

from torchrec_picasso.errors import PlanError
from torchrec_picasso.placement import HotColdParams
from torchrec_picasso.planner.hot_options import hot_cold_options
from torchrec_picasso.planner.refusals import TableRefusals, required_form

__all__ = ["hot_cold_candidates"]

TablePath = tuple[str, str]
"""Path of the module, name of the table."""


def hot_cold_candidates(
    options_by_path: Mapping[TablePath, list[ShardingOption]],
    refusals: Mapping[TablePath, TableRefusals],
    hot_rows: int | Mapping[str, int] | None,
    sharders: Sequence[Any],
) -> dict[str, int]:
    """Finds the tables that can be hot/cold.

    Args:
        options_by_path: All options of each table.
        refusals: Refusals of each table whose sharder supports hot/cold tables.
        hot_rows: Hot rows, as for ``hot_cold_planner``.
        sharders: All sharders, for the message.

    Returns:
        Number of rows by table name, in model order.

    Raises:
        PlanError: If requested hot rows cannot be placed, with the reason.
    """
    named = set(hot_rows) if isinstance(hot_rows, Mapping) else None
    # hot_rows=0 selects no rows by name, so equal names are allowed
    by_name = hot_rows is None or bool(hot_rows)
    paths: dict[str, str] = {}
    for path, table in refusals:
        if table in paths and (table in named if named is not None else by_name):
            raise PlanError(
                f"table {table!r} exists in module {paths[table]!r} and in module {path!r}, "
                "but hot rows are chosen by table name; rename one of the tables"
            )
        paths[table] = path
    elsewhere = {key[1]: options[0] for key, options in options_by_path.items()}
    for table in sorted((named or set()) & elsewhere.keys() - paths.keys()):
        _refuse_elsewhere(elsewhere[table], sharders)
    if options_by_path and not paths and named != set():
        raise PlanError(
            "no table can be hot/cold: none of the sharders "
            f"{sorted({type(sharder).__name__ for sharder in sharders})} supports it for "
            "a module of this model; pass HotColdEmbeddingBagCollectionSharder() or "
            "HotColdEmbeddingCollectionSharder() in sharders"
        )
    for key, table_refusals in refusals.items():
        _check_request(options_by_path[key], table_refusals, hot_rows)
    able = {
        table: options_by_path[path, table][0].tensor.shape[0]
        for (path, table), table_refusals in refusals.items()
        if table_refusals.hot_cold is None
    }
    if isinstance(hot_rows, Integral):
        _check_total(options_by_path, refusals, int(hot_rows))
    return able


def _refuse_elsewhere(option: ShardingOption, sharders: Sequence[Any]) -> None:
    """Refuses hot rows of a table whose sharder does not support them."""
    path, module = option.module
    (sharder,) = (s for s in sharders if s.module_type is type(module))
    able = "HotColdEmbeddingBagCollectionSharder"
    if isinstance(module, EmbeddingCollection):
        able = "HotColdEmbeddingCollectionSharder"
    raise PlanError(
        f"hot_rows names table {option.name!r} of module {path!r} "
        f"({type(module).__name__}), whose sharder {type(sharder).__name__} cannot place "
        f"hot rows; leave the table out, or pass a sharder that can, such as {able}"
    )


def _check_request(
    options: list[ShardingOption],
    refusals: TableRefusals,
    hot_rows: int | Mapping[str, int] | None,
) -> None:
    """Refuses a request by name for a table that cannot be hot/cold or have hot rows."""
    option = options[0]
    if isinstance(hot_rows, Mapping):
        if option.name not in hot_rows:
            return
        source, num_hot_rows = "hot_rows names", hot_rows[option.name]
    elif isinstance(option.cache_params, HotColdParams):
        source, num_hot_rows = "the constraints name", option.cache_params.num_hot_rows
        if hot_rows is not None:
            num_hot_rows = 0  # a total replaces the hot rows of constraints
    else:
        return
    if refusals.hot_cold is not None:
        _refuse_if_not_offered(options, refusals)
        raise PlanError(
            f"{source} table {option.name!r}, which cannot be hot/cold: {refusals.hot_cold.what}; "
            f"{refusals.hot_cold.advice('leave the table out')}"
        )
    if refusals.hot_rows is not None and num_hot_rows:
        raise PlanError(
            f"{source} table {option.name!r}, which cannot have hot rows: "
            f"{refusals.hot_rows.what}; {refusals.hot_rows.instead}, or request 0 rows of it"
        )


def _check_total(
    options_by_path: Mapping[TablePath, list[ShardingOption]],
    refusals: Mapping[TablePath, TableRefusals],
    hot_rows: int,
) -> None:
    """Refuses a total larger than the rows of all tables that can have hot rows."""
    if all(table_refusals.hot_cold is not None for table_refusals in refusals.values()):
        for key, table_refusals in refusals.items():
            _refuse_if_not_offered(options_by_path[key], table_refusals)
    num_able, left_out = 0, []
    for key, table_refusals in refusals.items():
        refusal = table_refusals.hot_cold or table_refusals.hot_rows
        if refusal is None:
            num_able += options_by_path[key][0].tensor.shape[0]
        else:
            left_out.append((key[1], refusal))
    # without left-out tables, select_hot_rows reports a total that is too large
    if hot_rows > num_able and left_out:
        table, refusal = left_out[0]
        raise PlanError(
            f"{hot_rows:,} hot rows were requested, but only {num_able:,} rows can be hot: "
            f"{len(left_out)} tables can have none, such as {table!r}: {refusal.what}; "
            f"{refusal.instead}, or request at most {num_able:,}"
        )


def _refuse_if_not_offered(options: list[ShardingOption], refusals: TableRefusals) -> None:
    """Raises the error of :func:`hot_cold_options`, which lists a table's options, if none can be
    hot/cold."""
    if not refusals.is_offered:
        form = required_form(options) or "rows"
        hot_cold_options(options, torch.empty(0, dtype=torch.int64), form=form)
