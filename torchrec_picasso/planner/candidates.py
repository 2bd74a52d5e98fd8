"""Which tables may be hot/cold, and which wishes cannot be granted.

What is asked for by name is had or refused, never dropped: a table that cannot be hot/cold, or have
hot rows, is an error where somebody named it. A total, and the cost model's own choice, go to the
tables that can; the others are placed by TorchRec.
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
from torchrec_picasso.planner.refusals import TableRefusals, asked_form

__all__ = ["hot_cold_candidates"]

TablePath = tuple[str, str]
"""Path of the module, name of the table."""


def hot_cold_candidates(
    options_by_path: Mapping[TablePath, list[ShardingOption]],
    refusals: Mapping[TablePath, TableRefusals],
    hot_rows: int | Mapping[str, int] | None,
    sharders: Sequence[Any],
) -> dict[str, int]:
    """Number of rows of each table that may be hot/cold.

    Args:
        options_by_path: All options of each table.
        refusals: What its sharder would refuse, of the tables whose sharder can place hot rows.
        hot_rows: As for ``hot_cold_planner``.
        sharders: All sharders, for the message.

    Returns:
        Rows by name, in model order.

    Raises:
        PlanError: If hot rows are asked for that cannot be placed; the message says why.
    """
    named = set(hot_rows) if isinstance(hot_rows, Mapping) else None
    by_name = hot_rows is None or bool(hot_rows)
    paths: dict[str, str] = {}
    for path, table in refusals:
        if table in paths and (table in named if named is not None else by_name):
            raise PlanError(
                f"table {table!r} exists in module {paths[table]!r} and in module {path!r}, "
                "but hot rows are chosen by table name; give each table its own name"
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
    for key, of_table in refusals.items():
        _check_wish(options_by_path[key], of_table, hot_rows)
    able = {
        table: options_by_path[path, table][0].tensor.shape[0]
        for (path, table), of_table in refusals.items()
        if of_table.hot_cold is None
    }
    if isinstance(hot_rows, Integral):
        _check_total(options_by_path, refusals, int(hot_rows))
    return able


def _refuse_elsewhere(option: ShardingOption, sharders: Sequence[Any]) -> None:
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


def _check_wish(
    options: list[ShardingOption],
    refusals: TableRefusals,
    hot_rows: int | Mapping[str, int] | None,
) -> None:
    """Refuses to plan where one table is asked to be what it cannot be."""
    option = options[0]
    if isinstance(hot_rows, Mapping):
        if option.name not in hot_rows:
            return
        wish, num_hot_rows = "hot_rows names", hot_rows[option.name]
    elif isinstance(option.cache_params, HotColdParams):
        wish, num_hot_rows = "the constraints name", option.cache_params.num_hot_rows
        if hot_rows is not None:
            num_hot_rows = 0  # a total chooses the rows itself
    else:
        return
    if refusals.hot_cold is not None:
        _refuse_if_not_offered(options, refusals)
        raise PlanError(
            f"{wish} table {option.name!r}, which cannot be hot/cold: {refusals.hot_cold.what}; "
            f"{refusals.hot_cold.advice('leave the table out')}"
        )
    if refusals.hot_rows is not None and num_hot_rows:
        raise PlanError(
            f"{wish} table {option.name!r}, which cannot have hot rows: {refusals.hot_rows.what}; "
            f"{refusals.hot_rows.instead}, or ask for 0 rows of it"
        )


def _check_total(
    options_by_path: Mapping[TablePath, list[ShardingOption]],
    refusals: Mapping[TablePath, TableRefusals],
    hot_rows: int,
) -> None:
    """Refuses a total that the tables which can have hot rows cannot take."""
    if all(of_table.hot_cold is not None for of_table in refusals.values()):
        for key, of_table in refusals.items():
            _refuse_if_not_offered(options_by_path[key], of_table)
    room, left_out = 0, []
    for key, of_table in refusals.items():
        refusal = of_table.hot_cold or of_table.hot_rows
        if refusal is None:
            room += options_by_path[key][0].tensor.shape[0]
        else:
            left_out.append((key[1], refusal))
    if hot_rows > room and left_out:
        table, refusal = left_out[0]
        raise PlanError(
            f"{hot_rows:,} hot rows were asked for, but only {room:,} rows can be hot: "
            f"{len(left_out)} tables can have none, such as {table!r}: {refusal.what}; "
            f"{refusal.instead}, or ask for at most {room:,}"
        )


def _refuse_if_not_offered(options: list[ShardingOption], refusals: TableRefusals) -> None:
    """Raises the error that lists a table's options, if none of them could be hot/cold."""
    if not refusals.is_offered:
        form = asked_form(options) or "rows"
        hot_cold_options(options, torch.empty(0, dtype=torch.int64), form=form)
