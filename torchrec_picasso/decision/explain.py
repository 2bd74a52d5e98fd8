"""A decision as a table that can be read: numbers per table, and one sentence why."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torchrec_picasso.cost.hot_cold import hot_cold_memory_bytes
from torchrec_picasso.cost.marginal import marginal_hot_cold_costs, marginal_stock_costs
from torchrec_picasso.cost.step_cost import StepCost
from torchrec_picasso.cost.stock import STOCK_TYPES, stock_memory_bytes
from torchrec_picasso.decision.decision import Decision

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["explain", "summarize"]


def explain(decision: Decision) -> pd.DataFrame:
    """What was chosen for each table, what it costs, and what every alternative would cost.

    Costs of a table are what it adds to a step in which all tables are of one kind, because those
    share their exchanges; the latencies they share belong to none of them.

    Args:
        decision: The decision.

    Returns:
        One line per table, in model order: ``table, rows, dim, placement, form`` (``rows`` or
        ``bags``) and ``wave`` (both missing for stock tables), ``hot_rows, coverage`` (share of
        lookups that replicas serve), ``lookups, unique_rows, cold_rows`` (expected, per rank and
        step); ``<kind>_ms, <kind>_bytes`` per rank and step for ``hot_cold`` in its form and each
        stock sharding type, nothing hidden; ``home_bytes, replica_bytes, optimizer_bytes,
        buffer_bytes, stock_bytes`` per rank; ``why``.
    """
    import pandas as pd

    works = decision.works
    num_hot, forms = decision.choice.num_hot, decision.choice.forms
    curves, world_size = decision.curves, decision.world_size
    costs = {"hot_cold": marginal_hot_cold_costs(works, num_hot, curves, world_size, forms)}
    for kind in STOCK_TYPES:
        costs[kind] = marginal_stock_costs(kind, works, curves, world_size)
    lines = [
        _line(decision, i, {kind: of[i] for kind, of in costs.items()}) for i in range(len(works))
    ]
    return pd.DataFrame(lines).astype({"wave": "Int64"})


def summarize(decision: Decision) -> dict[str, Any]:
    """The whole step of a decision: predicted milliseconds, bytes, memory and balance.

    Args:
        decision: The decision.

    Returns:
        Plain numbers, ready for JSON. ``step_ms`` is the whole step under the schedule that will
        run, with ``num_micro_batches`` (``None`` = nothing is interleaved); ``wire_ms`` and
        ``compute_ms`` are what no schedule gets below; ``dense_ms`` is the part of it without
        tables, 0 where nothing is known of it; ``embedding_ms`` is the rest with nothing hidden.
        ``stock_ms`` and ``speedup`` are ``None`` where some table has no stock option.
    """
    choice, homes = decision.choice, decision.homes
    chosen = [work for work, form in zip(decision.works, choice.forms) if form]
    hot_counts = [count for count, form in zip(choice.num_hot, choice.forms) if form]
    stock = choice.stock_step
    return {
        "world_size": decision.world_size,
        "batch_size": decision.batch_size,
        "hot_cold_tables": len(chosen),
        "stock_tables": len(decision.works) - len(chosen),
        "bag_tables": sum(form == "bags" for form in choice.forms),
        "hot_rows": sum(choice.num_hot),
        "num_micro_batches": decision.num_micro_batches,
        "step_ms": choice.step.step_ms,
        "wire_ms": choice.step.wire_ms,
        "compute_ms": choice.step.compute_ms,
        "dense_ms": decision.dense.total_ms,
        "embedding_ms": choice.cost.total_ms,
        "sent_bytes": choice.cost.total_bytes,
        "stock_ms": stock.step_ms if stock is not None else None,
        "stock_sent_bytes": choice.stock_cost.total_bytes if choice.stock_cost else None,
        "speedup": stock.step_ms / choice.step.step_ms
        if stock is not None and choice.step.step_ms
        else None,
        "memory_bytes": hot_cold_memory_bytes(chosen, hot_counts),
        "home_max_over_mean": homes.max_over_mean if homes is not None else None,
        "even_home_max_over_mean": homes.even_max_over_mean if homes is not None else None,
        "curves": decision.curves.mismatch(
            world_size=decision.world_size, device=decision.curves.device
        )
        or "of this world size",
    }


def _line(decision: Decision, index: int, costs: dict[str, StepCost]) -> dict[str, Any]:
    work, choice = decision.works[index], decision.choice
    load, num_hot = work.load, choice.num_hot[index]
    split = work.split(num_hot)
    memory = hot_cold_memory_bytes([work], [num_hot])
    line: dict[str, Any] = {
        "table": load.name,
        "rows": load.num_embeddings,
        "dim": load.dim,
        "placement": "hot_cold" if choice.hot_cold[index] else choice.stock_types[index],
        "form": choice.forms[index],
        "wave": decision.waves.get(load.name),
        "hot_rows": num_hot,
        "coverage": split.coverage,
        "lookups": load.lookups,
        "unique_rows": work.unique,
        "cold_rows": split.cold_used,
    }
    for kind, cost in costs.items():
        line[f"{kind}_ms"] = cost.total_ms
        line[f"{kind}_bytes"] = cost.total_bytes
    line |= {
        "home_bytes": memory["home"],
        "replica_bytes": memory["replica"],
        "optimizer_bytes": memory["optimizer"],
        "buffer_bytes": memory["buffers"],
        "stock_bytes": stock_memory_bytes("table_wise", load, decision.world_size),
        "why": _why(decision, index, costs),
    }
    return line


def _why(decision: Decision, index: int, costs: dict[str, StepCost]) -> str:
    work, choice, fact = decision.works[index], decision.choice, decision.facts[index]
    stock_type, num_hot = choice.stock_types[index], choice.num_hot[index]
    ours_ms, ours_wire_ms = costs["hot_cold"].total_ms, costs["hot_cold"].wire_ms
    stock_ms = costs[stock_type].total_ms if stock_type is not None else None
    distinct = work.unique / max(1.0, work.load.lookups)
    if not choice.hot_cold[index]:
        if fact.not_hot_cold is not None:
            return f"stock: {fact.not_hot_cold}"
        return (
            f"stock {stock_type}: {distinct:.0%} of its lookups are distinct rows, so the packed "
            f"exchange ({ours_ms:.2f} ms, {ours_wire_ms:.2f} of them on the wire) does not beat it "
            f"({stock_ms:.2f} ms)"
        )
    if stock_ms is None:
        against = f"{ours_ms:.2f} ms; no stock type is allowed"
    else:
        against = f"{ours_ms:.2f} ms against {stock_ms:.2f} ms for {stock_type}"
        if ours_ms > stock_ms:
            against += f", but {ours_wire_ms:.2f} ms of it can be hidden, and stock waits"
    if choice.forms[index] == "bags":
        return (
            f"hot/cold as bags: {work.load.bags:,.0f} pooled vectors travel instead of "
            f"{work.unique:,.0f} distinct rows ({against})"
        )
    split = work.split(num_hot)
    if not num_hot:
        reason = fact.no_hot_rows or (
            "an update on every rank would cost more than fetching a row where that is hidden"
        )
        return (
            f"hot/cold without replicas: {work.unique:,.0f} distinct rows travel for "
            f"{work.load.lookups:,.0f} lookups ({against}); {reason}"
        )
    return (
        f"hot/cold: {num_hot:,} replicas serve {split.coverage:.0%} of lookups, "
        f"{split.cold_used:,.0f} cold rows travel for {work.load.lookups:,.0f} lookups ({against})"
    )
