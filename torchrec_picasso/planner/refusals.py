"""Refuses, while planning, requests for hot rows that cannot be fulfilled.

A request by table name is fulfilled or refused, never ignored; a total number of hot rows, and the
choice of the cost model, apply to the tables that can be hot/cold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

from torchrec.distributed.planner.types import ShardingOption
from torchrec.modules.embedding_modules import EmbeddingCollection

from torchrec_picasso.errors import PlanError
from torchrec_picasso.placement import FORMS, Form
from torchrec_picasso.planner.choice import TableInfo
from torchrec_picasso.planner.hot_options import TablePath
from torchrec_picasso.planner.table_info import NOT_OFFERED
from torchrec_picasso.storage.exactness import HOT_COLD_KERNELS


def check_request(
    options_by_path: Mapping[TablePath, Sequence[ShardingOption]],
    tables: Mapping[TablePath, TableInfo],
    hot_rows: int | Mapping[str, int] | None,
    sharders: Sequence[Any],
) -> None:
    """Refuses requests for hot rows that cannot be placed.

    ``tables`` has the tables whose sharders support hot/cold, ``options_by_path`` all tables.
    Raises PlanError with the reason, and what to request instead.
    """
    named = set(hot_rows) if isinstance(hot_rows, Mapping) else None
    # hot_rows=0 selects no rows by name, so equal names are allowed
    by_name = hot_rows is None or bool(hot_rows)
    paths: dict[str, str] = {}
    for path, table in tables:
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
    for key, table_info in tables.items():
        _check_table(options_by_path[key], table_info, hot_rows)
    _check_modules(tables, hot_rows)
    if isinstance(hot_rows, Integral):
        _check_total(options_by_path, tables, int(hot_rows))


def _refuse_elsewhere(option: ShardingOption, sharders: Sequence[Any]) -> None:
    """Refuses hot rows of a table whose sharder does not support them."""
    path, module = option.module
    (sharder,) = (s for s in sharders if s.module_type is type(module))
    kind = "" if isinstance(module, EmbeddingCollection) else "Bag"
    able = f"HotColdEmbedding{kind}CollectionSharder"
    raise PlanError(
        f"hot_rows names table {option.name!r} of module {path!r} "
        f"({type(module).__name__}), whose sharder {type(sharder).__name__} cannot place "
        f"hot rows; leave the table out, or pass a sharder that can, such as {able}"
    )


def _check_table(
    options: Sequence[ShardingOption], table: TableInfo, hot_rows: int | Mapping[str, int] | None
) -> None:
    """Refuses a request by name for a table that cannot be hot/cold or have hot rows."""
    name = table.load.name
    if isinstance(hot_rows, Mapping):
        if name not in hot_rows:
            return
        source, num_hot_rows = "hot_rows names", hot_rows[name]
    elif table.required is not None:
        # a total replaces the hot rows of constraints
        num_hot_rows = table.required.num_hot_rows if hot_rows is None else 0
        source = "the constraints name"
    else:
        return
    if table.not_hot_cold is not None:
        _check_offered(options, table)
        raise PlanError(
            f"{source} table {name!r}, which cannot be hot/cold: {table.not_hot_cold.what}; "
            f"{table.not_hot_cold.advice('leave the table out')}"
        )
    if table.no_hot_rows is not None and num_hot_rows:
        raise PlanError(
            f"{source} table {name!r}, which cannot have hot rows: "
            f"{table.no_hot_rows.what}; {table.no_hot_rows.instead}, or request 0 rows of it"
        )


def _check_modules(
    tables: Mapping[TablePath, TableInfo], hot_rows: int | Mapping[str, int] | None
) -> None:
    """Refuses a form of whole modules for one table and another for a table of its module."""
    names: dict[str, dict[Form, str]] = {}
    for (path, name), table in tables.items():
        may_be = not isinstance(hot_rows, Mapping) or name in hot_rows
        if table.not_hot_cold is None and (may_be or table.required is not None):
            names.setdefault(path, {})[table.forms[0]] = name
    for own in names.values():
        form = next((form for form in own if FORMS[form].by_module), None)
        other = next((name for other, name in own.items() if other != form), None)
        if form is not None and other is not None:
            raise PlanError(
                f"the constraints of table {own[form]!r} request {form=}, those of table {other!r} "
                "of the same module do not; request it of all hot/cold tables of a module, or of "
                "none"
            )


def _check_total(
    options_by_path: Mapping[TablePath, Sequence[ShardingOption]],
    tables: Mapping[TablePath, TableInfo],
    hot_rows: int,
) -> None:
    """Refuses a total larger than the rows of all tables that can have hot rows."""
    if all(table.not_hot_cold is not None for table in tables.values()):
        for key, table in tables.items():
            _check_offered(options_by_path[key], table)
    num_able, left_out = 0, []
    for table in tables.values():
        if (reason := table.not_hot_cold or table.no_hot_rows) is not None:
            left_out.append((table.load.name, reason))
        else:
            num_able += table.load.num_embeddings
    # without left-out tables, select_hot_rows reports a total that is too large
    if hot_rows > num_able and left_out:
        name, refusal = left_out[0]
        raise PlanError(
            f"{hot_rows:,} hot rows were requested, but only {num_able:,} rows can be hot: "
            f"{len(left_out)} tables can have none, such as {name!r}: {refusal.what}; "
            f"{refusal.instead}, or request at most {num_able:,}"
        )


def _check_offered(options: Sequence[ShardingOption], table: TableInfo) -> None:
    """Refuses a table without a hot/cold option, and lists its options."""
    if table.not_hot_cold is not NOT_OFFERED:
        return
    sharding_type = FORMS[table.forms[0]].sharding_type
    offered = sorted({(option.sharding_type, option.compute_kernel) for option in options})
    raise PlanError(
        f"table {table.load.name!r} was chosen to be hot/cold, which needs {sharding_type} "
        f"sharding with kernel {' or '.join(HOT_COLD_KERNELS)}, but its options are {offered}; "
        f"either its constraints exclude it (allow {sharding_type} and fused), or its sharder "
        "does not offer it (TorchRec's own has no row_wise on CPU: pass "
        "HotColdEmbeddingBagCollectionSharder)"
    )
