"""Describes a decision: one line per table with the reason, and a summary of the step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

from torchrec_picasso.cost.forms import EXCHANGES, home_row_bytes, hot_cold_memory_bytes
from torchrec_picasso.cost.hot_cold import WIRE_BYTES, id_bytes
from torchrec_picasso.cost.stock import data_parallel_bytes, max_over_mean, over_mean, rank_loads
from torchrec_picasso.placement import FORMS
from torchrec_picasso.planner.choice import fastest_hot_cold, least_gain_ms
from torchrec_picasso.planner.decision import Decision

if TYPE_CHECKING:
    import pandas as pd


def explain(decision: Decision) -> pd.DataFrame:
    """Returns the placement of each table, and the reason: one line per table, in model order.

    Columns: ``table, rows, dim, placement, form`` (``rows``, ``bags`` or ``node_rows``) and
    ``wave`` (both missing for stock tables), ``hot_rows, coverage`` (share of lookups of hot rows),
    ``lookups, unique_rows, cold_rows`` (expected, per rank and step), ``row_wise_load`` (lookups of
    the busiest rank over the mean under stock row-wise sharding; missing without statistics),
    ``home_bytes, replica_bytes`` (mean per rank, if hot/cold), ``why``.

    Its ``attrs`` have the loads of ranks of :func:`summarize`: ``ranks``, ``busiest_over_mean``,
    ``stock_ranks``.
    """
    import pandas as pd

    lines = [_line(decision, index) for index in range(len(decision.works))]
    frame = pd.DataFrame(lines).astype({"wave": "Int64"})
    frame.attrs |= _loads(decision, _memory(decision))
    return frame


def summarize(decision: Decision) -> dict[str, Any]:
    """Returns the predicted step of a decision: numbers and strings for JSON.

    ``step_ms``: duration of the whole step under the schedule that runs it, with
    ``num_micro_batches`` (``None`` = nothing is interleaved). ``wire_ms`` and ``compute_ms``: lower
    bounds of ``step_ms``. ``dense_ms``: the dense part, 0 if not known. ``sent_bytes``: mean over
    ranks, for all tables; ``memory_bytes``: of hot/cold tables, by purpose. ``priced_ms``: the step
    of each priced plan without hot rows, empty if the caller gave ``hot_rows``.
    ``home_max_over_mean``, ``even_home_max_over_mean``: requests to the busiest home rank over the
    mean, with the plan's and with equal blocks, ``None`` without statistics or row-exchanged
    tables. ``stock_ms``, ``stock_sent_bytes`` and ``speedup`` are ``None`` if a table has no stock
    option. ``ranks``: by rank the lookups of all ranks' batches in its rows, of which it sends each
    distinct one once, and its bytes; stock tables and bags count as means. ``busiest_over_mean``:
    by quantity the busiest rank over the mean, of stock ``row_wise`` (lookups times dim, with
    statistics only), ``table_wise`` and ``column_wise`` (outputs) too. ``stock_ranks``: lookups
    served, bytes sent, stored and held at the peak of a step by each rank, if all tables had one of
    these types; it receives about as many bytes as it sends. Memory is that of tables and their
    buffers.
    """
    step, homes, curves = decision.step, decision.homes, decision.curves
    num_hot_cold, memory = sum(map(bool, decision.forms)), _memory(decision)
    summary: dict[str, Any] = {
        "world_size": decision.world_size,
        "batch_size": decision.batch_size,
        "hot_cold_tables": num_hot_cold,
        "stock_tables": len(decision.works) - num_hot_cold,
        "bag_tables": decision.forms.count("bags"),
        "tables_by_host": decision.forms.count("node_rows"),
        "hot_rows": sum(decision.num_hot),
        "num_micro_batches": step.num_micro_batches if num_hot_cold else None,
        "step_ms": step.step_ms,
        "wire_ms": step.wire_ms,
        "compute_ms": step.compute_ms,
        "dense_ms": decision.dense.total_ms,
        "sent_bytes": sum(decision.sent_bytes.values()),
        "priced_ms": dict(decision.priced_ms),
        **{"stock_ms": None, "stock_sent_bytes": None, "speedup": None},
        "memory_bytes": memory,
        "home_max_over_mean": homes.max_over_mean if homes is not None else None,
        "even_home_max_over_mean": homes.even_max_over_mean if homes is not None else None,
        **_loads(decision, memory),
        "curves": curves.mismatch(world_size=decision.world_size, device=curves.device)
        or "of this world size",
    }
    if (stock := decision.stock) is not None:
        summary["stock_ms"] = stock.step.step_ms
        summary["stock_sent_bytes"] = sum(stock.sent_bytes.values())
        summary["speedup"] = stock.step.step_ms / step.step_ms if step.step_ms else None
    return summary


def _memory(decision: Decision) -> dict[str, float]:
    """Predicts the mean memory per rank of the chosen step."""
    plan = zip(decision.works, decision.num_hot, decision.forms)
    chosen = [(work, num_hot, form) for work, num_hot, form in plan if form]
    return hot_cold_memory_bytes(chosen, decision.step.num_micro_batches)


def _loads(decision: Decision, memory: Mapping[str, float]) -> dict[str, Any]:
    """Predicts the loads of ranks, beside those of stock plans."""
    ranks, world_size = _ranks(decision, memory), decision.world_size
    loads = [work.load for work in decision.works]
    over = {name: over_mean(rank[name] for rank in ranks) for name in ranks[0]}
    by_rows = ["row_wise"] if any(load.row_wise_W for load in loads) else []
    kinds = [*by_rows, "table_wise", "column_wise"]
    return {
        "ranks": ranks,
        "busiest_over_mean": over | {k: max_over_mean(k, loads, world_size) for k in kinds},
        "stock_ranks": {k: rank_loads(k, loads, world_size) for k in kinds},
    }


def _ranks(decision: Decision, memory: Mapping[str, float]) -> list[dict[str, float]]:
    """Predicts what each rank serves, sends, receives and holds in one step; ``memory`` are the
    means over ranks of hot/cold tables, and so is what is held for stock tables."""
    world_size, homes = decision.world_size, decision.homes
    each = zip(decision.works, decision.num_hot, decision.forms)
    works = [(i, work, num_hot, form) for i, (work, num_hot, form) in enumerate(each) if form]
    in_rows = [(work, num_hot) for _, work, num_hot, form in works if not FORMS[form].sends_bags]
    cold = [(work.load, work.split(num_hot).cold_used) for work, num_hot in in_rows]
    even = sum(rows * load.dim for load, rows in cold)
    load_W = homes.load_W if homes is not None else (even / world_size,) * world_size
    stock_bytes = _stock_memory(decision)
    all_bytes = sum(load_W) * WIRE_BYTES  # of the rows that a rank requests, its own included
    number_bytes = id_bytes(sum(load.num_embeddings for load, _ in cold) / world_size)
    # bytes of row numbers per byte of rows
    numbers = number_bytes * sum(rows for _, rows in cold) / all_bytes if all_bytes else 0.0
    to_others = all_bytes * (world_size - 1) / world_size
    others = sum(decision.sent_bytes.values()) - (2 + numbers) * to_others
    lookups_W = [sum(lookups_T) for lookups_T in zip(*_lookups_by_home(decision))]
    found = []
    for rank, load in enumerate(load_W):
        served = load * WIRE_BYTES * (world_size - 1)  # rows to other ranks, their gradients back
        fetched = all_bytes - load * WIRE_BYTES  # rows from other ranks, their gradients back
        home = 0.0
        for i, work, num_hot, form in works:
            rows_W = decision.block_rows.get(i)
            num_rows = rows_W[rank] if rows_W else work.load.num_embeddings / world_size
            home += num_rows * home_row_bytes(work.load, num_hot, form)
        found.append(
            {
                "served_lookups": lookups_W[rank],
                "served_bytes": served,
                "sent_bytes": others + served + (1 + numbers) * fetched,
                "received_bytes": others + fetched + (1 + numbers) * served,
                "memory_bytes": home + memory["replica"] + memory["buffers"] + stock_bytes,
            }
        )
    return found


def _stock_memory(decision: Decision) -> float:
    """Predicts the mean memory of a rank for stock tables, those of each type by themselves."""
    found = 0.0
    for kind in filter(None, dict.fromkeys(decision.stock_types)):
        pairs = zip(decision.works, decision.stock_types)
        loads = [work.load for work, own_kind in pairs if own_kind == kind]
        if kind == "data_parallel":
            found += sum(map(data_parallel_bytes, loads))
        else:
            found += fmean(
                rank["memory_bytes"] for rank in rank_loads(kind, loads, decision.world_size)
            )
    return found


def _lookups_by_home(decision: Decision) -> list[Sequence[float]]:
    """Lookups of all ranks' batches that replicas do not serve, by table and home rank."""
    world_size = decision.world_size
    found: list[Sequence[float]] = []
    for i, work in enumerate(decision.works):
        mean = work.load.lookups * (1 - work.split(decision.num_hot[i]).coverage) / world_size
        lookups_W = decision.home_lookups.get(i, (mean,) * world_size)
        found.append([world_size * lookups for lookups in lookups_W])
    return found


def why_nothing_is_hot_cold(decision: Decision) -> str | None:
    """Explains a plan without hot/cold tables; ``None`` if a table is hot/cold."""
    if any(decision.forms):
        return None
    reasons = [table.not_hot_cold.what for table in decision.tables if table.not_hot_cold]
    if len(reasons) == len(decision.tables):
        return f"no table can be: {min(reasons)}"
    return _comparison(decision) if decision.priced_ms else "hot_rows names no table"


def _line(decision: Decision, index: int) -> dict[str, Any]:
    work, form, num_hot = decision.works[index], decision.forms[index], decision.num_hot[index]
    load, split = work.load, work.split(num_hot)
    memory = hot_cold_memory_bytes([(work, num_hot, form or "rows")])
    placement = decision.placements[index]
    return {
        "table": load.name,
        "rows": load.num_embeddings,
        "dim": load.dim,
        "placement": "hot_cold" if form else decision.stock_types[index],
        "form": form,
        "wave": placement.wave if placement is not None else None,
        "hot_rows": num_hot,
        "coverage": split.coverage,
        "lookups": load.lookups,
        "unique_rows": work.unique,
        "cold_rows": split.cold_used,
        "row_wise_load": over_mean(load.row_wise_W) if load.row_wise_W else None,
        "home_bytes": memory["home"],
        "replica_bytes": memory["replica"],
        "why": _why(decision, index),
    }


def _why(decision: Decision, index: int) -> str:
    work, form, num_hot = decision.works[index], decision.forms[index], decision.num_hot[index]
    table, kind = decision.tables[index], decision.stock_types[index]
    if form is None:
        if table.not_hot_cold is not None:
            return f"stock: {table.not_hot_cold.what}"
        reason = _comparison(decision) if decision.priced_ms else "hot_rows does not name it"
        return f"stock {kind}: {reason}"
    split = work.split(num_hot)
    rows = f"{split.cold_used:,.0f} distinct rows are sent for {work.load.lookups:,.0f} lookups"
    if FORMS[form].sends_bags:
        why = (
            f"hot/cold, owner-pooled: {work.load.bags:,.0f} pooled vectors are sent instead of "
            f"{work.unique:,.0f} distinct rows"
        )
    elif num_hot:
        why = f"hot/cold: {num_hot:,} replicas serve {split.coverage:.0%} of lookups, {rows}"
    else:
        reason = "replicas are not predicted to shorten the step"
        if table.no_hot_rows is not None:
            reason = table.no_hot_rows.what
        why = f"hot/cold without replicas: {rows}; {reason}"
    if not FORMS[form].sends_bags:
        why += _way(decision, index)
    return why if table.stock_types else f"{why}; no stock type is allowed"


def _way(decision: Decision, index: int) -> str:
    """Compares the ways in which rows of a table could be sent, if the plan had several."""
    priced_ms, own = decision.priced_ms, decision.forms[index]
    forms = [name for name in EXCHANGES if name in priced_ms and not FORMS[name].sends_bags]
    if own is None or len(forms) < 2:
        return ""
    others = [f"{priced_ms[name]:.1f} {EXCHANGES[name].way}" for name in forms if name != own]
    saved = EXCHANGES[own].describe(decision.works[index], decision.num_hot[index])
    return (
        f"; sent {EXCHANGES[own].way}: {saved}a step is predicted to take {priced_ms[own]:.1f} ms, "
    ) + ", ".join(others)


def _comparison(decision: Decision) -> str:
    """Compares the predicted steps of the stock plan and of the hot/cold plan that it was chosen
    over."""
    stock_ms, local = decision.priced_ms["stock"], decision.curves.local
    hot_cold_ms = decision.priced_ms[fastest_hot_cold(decision.priced_ms)]
    assumed = (
        ", on a fast core too: costs of local work are assumed, here those of a slow core; measure "
        "them with `torchrec-picasso calibrate`"
    )
    return (
        f"a step is predicted to take {stock_ms:.1f} ms with stock tables and {hot_cold_ms:.1f} ms "
        f"with hot/cold ones, which must save {least_gain_ms(stock_ms, local):.1f} ms"
    ) + ("" if local.measured else assumed)
