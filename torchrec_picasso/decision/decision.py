"""One table's fate and why: what the cost model saw, what was chosen, in numbers that can be shown.

A decision is made from plain facts (loads, allowed types, statistics, curves), with no process
group, no TorchRec planner and no machine at hand: the planner makes one for the model it shards,
and a what-if makes one for a world size that does not exist.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchrec_picasso.cost.curves import CommCurves
from torchrec_picasso.cost.dense import DenseTimes
from torchrec_picasso.cost.step_price import StepPricer
from torchrec_picasso.cost.table_work import TableLoad, TableWork
from torchrec_picasso.decision.choice import Choice, TableQuestion, choose, given_choice
from torchrec_picasso.decision.home_blocks import HomeBlocks, RowLoads, balance_homes
from torchrec_picasso.decision.waves import TableVolume, balance_waves
from torchrec_picasso.frequency import FrequencyStats, select_hot_rows
from torchrec_picasso.placement import Form, pack_key
from torchrec_picasso.schedule.setting_choice import pieces_for

__all__ = ["Decision", "TableFacts", "decide", "given_hot_sets"]


@dataclass(frozen=True, kw_only=True)
class TableFacts:
    """One table of the model as the decision sees it.

    Args:
        load: Rows, columns and lookups per step.
        not_hot_cold: Why its sharder or its constraints do not allow hot/cold, or ``None``.
        no_hot_rows: Why none of its rows can be hot, or ``None``.
        no_bags: Why its bags cannot travel instead of its rows, or ``None``.
        asked_form: What of it travels if hot/cold, where somebody said so.
        stock_types: Stock sharding types they allow.
        module: Path of its module, whose tables share an exchange.
    """

    load: TableLoad
    not_hot_cold: str | None = None
    no_hot_rows: str | None = None
    no_bags: str | None = "it was not asked whether its bags may travel"
    asked_form: Form | None = None
    stock_types: tuple[str, ...] = ("table_wise", "row_wise")
    module: str = ""

    @property
    def may_be_hot_cold(self) -> bool:
        """Whether it may take the packed unique exchange."""
        return self.not_hot_cold is None

    @property
    def forms(self) -> tuple[Form, ...]:
        """What of it may travel."""
        if self.asked_form is not None:
            return (self.asked_form,)
        return ("rows", "bags") if self.no_bags is None else ("rows",)


@dataclass(frozen=True, kw_only=True, eq=False)
class Decision:
    """Where every table goes.

    Args:
        facts: The tables.
        works: Their expected rows, same order.
        choice: Which are hot/cold, with how many hot rows.
        hot_sets: Hot rows of each hot/cold table by name, ascending int64.
        forms: What of each hot/cold table travels, by name.
        homes: Cuts of the tables that travel as rows, in the order of ``hot_sets``.
        waves: Which wave each hot/cold table travels in, by name.
        curves: What the costs were computed from.
        world_size: Ranks.
        batch_size: Samples per rank and step.
        dense: The dense part that exchanges hide under; all 0 where nothing is known of it.
    """

    facts: tuple[TableFacts, ...]
    works: tuple[TableWork, ...]
    choice: Choice
    hot_sets: Mapping[str, Tensor]
    forms: Mapping[str, Form]
    homes: HomeBlocks | None
    waves: Mapping[str, int]
    curves: CommCurves
    world_size: int
    batch_size: int
    dense: DenseTimes

    @property
    def num_micro_batches(self) -> int | None:
        """Micro-batches that the plan was priced for; ``None`` where nothing is interleaved."""
        return self.choice.step.num_micro_batches if any(self.choice.hot_cold) else None

    @property
    def block_rows(self) -> dict[str, tuple[int, ...]]:
        """Home rows on each rank of each table that travels as rows."""
        if self.homes is None:
            return {}
        return dict(zip(self._as_rows, self.homes.block_rows_TW))

    @property
    def _as_rows(self) -> list[str]:
        return [name for name in self.hot_sets if self.forms[name] == "rows"]

    @property
    def home_max_over_mean(self) -> float:
        """Expected requests at the busiest home over the mean."""
        return self.homes.max_over_mean if self.homes is not None else 1.0


def decide(
    facts: Sequence[TableFacts],
    stats: FrequencyStats | None,
    curves: CommCurves,
    *,
    world_size: int,
    batch_size: int,
    hot_rows: int | Mapping[str, int] | None = None,
    replica_budget_bytes: float = float("inf"),
    num_waves: int = 1,
    dense: DenseTimes | None = None,
) -> Decision:
    """Decides for every table whether it is hot/cold, which rows are hot, and where homes are cut.

    Args:
        facts: The tables.
        stats: Lookup counts; ``None`` = every row is looked up equally often.
        curves: Measured communication and local work.
        world_size: Ranks.
        batch_size: Samples per rank and step.
        hot_rows: ``None`` = the cost model chooses; else as for ``hot_cold_planner``.
        replica_budget_bytes: Memory per rank that replicas may take, if the model chooses.
        num_waves: Waves of about equal volume that the hot/cold tables of a module travel in.
        dense: The dense part of a step; ``None`` = what the curves know of it.

    Raises:
        PlanError: If the statistics are of other tables, or hot rows cannot be had.
    """
    able = {fact.load.name: fact.load.num_embeddings for fact in facts if fact.may_be_hot_cold}
    without = {fact.load.name for fact in facts if fact.no_hot_rows is not None}
    if stats is not None:
        stats.check_model(able)
    works = tuple(TableWork(fact.load, world_size) for fact in facts)
    questions = [
        TableQuestion(
            work=work,
            may_be_hot_cold=fact.may_be_hot_cold,
            may_have_hot_rows=fact.no_hot_rows is None,
            forms=fact.forms,
            stock_types=fact.stock_types,
        )
        for fact, work in zip(facts, works)
    ]
    dense = (dense or curves.dense or DenseTimes()).at(batch_size)
    pricer = StepPricer(curves, world_size, dense, pieces_for(batch_size))
    if hot_rows is None:
        choice = choose(questions, pricer, replica_budget_bytes)
        counts = {
            fact.load.name: num_hot
            for fact, is_hot_cold, num_hot in zip(facts, choice.hot_cold, choice.num_hot)
            if is_hot_cold
        }
        hot_sets = select_hot_rows(able, counts, stats)
    else:
        hot_sets = given_hot_sets(able, without, hot_rows, stats)
        given = {
            position: hot_sets[fact.load.name].numel()
            for position, fact in enumerate(facts)
            if fact.load.name in hot_sets
        }
        choice = given_choice(questions, given, pricer)
    forms = {fact.load.name: form for fact, form in zip(facts, choice.forms) if form is not None}
    as_rows = {name: hot_H for name, hot_H in hot_sets.items() if forms[name] == "rows"}
    return Decision(
        facts=tuple(facts),
        works=works,
        choice=choice,
        hot_sets=hot_sets,
        forms=forms,
        homes=_homes(works, as_rows, stats, world_size),
        waves=_waves(facts, works, hot_sets, forms, num_waves),
        curves=curves,
        world_size=world_size,
        batch_size=batch_size,
        dense=dense,
    )


def given_hot_sets(
    able: Mapping[str, int],
    without: Collection[str],
    hot_rows: int | Mapping[str, int],
    stats: FrequencyStats | None,
) -> dict[str, Tensor]:
    """Hot rows where somebody else chose how many.

    Args:
        able: Number of rows of the tables that can be hot/cold, in model order.
        without: Those of them whose rows cannot be hot; a total goes to the others.
        hot_rows: A total, or a number by table.
        stats: Lookup counts; needed for a total above 0.

    Returns:
        Hot rows of each hot/cold table by name, in the order of ``able``.

    Raises:
        PlanError: If the hot rows cannot be had.
    """
    if isinstance(hot_rows, Mapping):
        return select_hot_rows(able, hot_rows, stats)
    others = {name: rows for name, rows in able.items() if name not in without}
    chosen = select_hot_rows(others, hot_rows, stats)
    return {name: chosen.get(name, torch.empty(0, dtype=torch.int64)) for name in able}


def _homes(
    works: Sequence[TableWork],
    hot_sets: Mapping[str, Tensor],
    stats: FrequencyStats | None,
    world_size: int,
) -> HomeBlocks | None:
    """Balanced cuts of the hot/cold tables; ``None`` without statistics."""
    if stats is None or not hot_sets:
        return None
    by_name = {work.load.name: work for work in works}
    return balance_homes(
        [_row_loads(by_name[name], hot, stats) for name, hot in hot_sets.items()], world_size
    )


def _waves(
    facts: Sequence[TableFacts],
    works: Sequence[TableWork],
    hot_sets: Mapping[str, Tensor],
    forms: Mapping[str, Form],
    num_waves: int,
) -> dict[str, int]:
    """The wave of each hot/cold table in its module: cold rows are fetched, hot ones reduced."""
    volumes: dict[str, dict[str, TableVolume]] = {}
    for fact, work in zip(facts, works):
        load = fact.load
        if load.name in hot_sets:
            split = work.split(hot_sets[load.name].numel())
            rows = split.cold_used + split.hot_touched
            volumes.setdefault(fact.module, {})[load.name] = TableVolume(
                group=pack_key(forms[load.name], 0, load.dim, load.element_bytes),
                elements=(rows if forms[load.name] == "rows" else load.bags) * load.dim,
            )
    return {
        name: wave
        for of_module in volumes.values()
        for name, wave in zip(of_module, balance_waves(list(of_module.values()), num_waves))
    }


def _row_loads(work: TableWork, hot_H: Tensor, stats: FrequencyStats) -> RowLoads:
    """Bytes that homes are asked for per step and rank, row by row.

    Rows seen once say where the sample happened to fall, not where the next batch will: their load
    is spread over the table, which is also the estimate for rows never seen (Good 1953).
    """
    counts = stats.tables[work.load.name]
    again_U = counts.counts_U > 1
    rows_U, counts_U = counts.rows_U[again_U], counts.counts_U[again_U]
    spectrum = work.load.spectrum
    assert spectrum is not None
    ascending = spectrum.counts_K.flip(0)
    used = torch.from_numpy(work.used_K[::-1].copy())
    place_U = torch.searchsorted(ascending, counts_U.double()).clamp(max=used.numel() - 1)
    load_U = used[place_U] if used.numel() else counts_U.double()
    load_U = load_U.masked_fill(_are_among(rows_U, hot_H), 0.0)
    cold = work.split(hot_H.numel()).cold_used
    dim = float(work.load.dim)
    return RowLoads(
        num_embeddings=work.load.num_embeddings,
        rows_U=rows_U.numpy(),
        load_U=load_U.numpy() * dim,
        spread_load=max(0.0, cold - float(load_U.sum())) * dim,
    )


def _are_among(rows_U: Tensor, others_H: Tensor) -> Tensor:
    """Which of some rows are among others; both ascend, which saves sorting."""
    if not others_H.numel():
        return torch.zeros_like(rows_U, dtype=torch.bool)
    place_U = torch.searchsorted(others_H, rows_U).clamp_(max=others_H.numel() - 1)
    return others_H.index_select(0, place_U) == rows_U
