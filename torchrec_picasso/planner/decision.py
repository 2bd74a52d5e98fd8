"""Placement of each table, with the inputs of the cost model that explain it.

A decision is computed from table information, statistics and curves, without a process group or a
TorchRec planner. The planner decides for the model that it shards; other callers may decide for any
world size.

Shape letters: H hot rows, K distinct counts, U counted rows, T tables, W ranks.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from torchrec_picasso.cost.curves import CommCurves
from torchrec_picasso.cost.local import DenseTimes
from torchrec_picasso.cost.step_price import StepPricer
from torchrec_picasso.cost.table_work import TableLoad, TableWork
from torchrec_picasso.frequency import FrequencyStats, select_hot_rows
from torchrec_picasso.placement import FORMS, HotColdParams, pack_key
from torchrec_picasso.planner.choice import Choice, TableInfo, choose
from torchrec_picasso.planner.home_blocks import HomeBlocks, RowLoads, balance_homes, even_blocks
from torchrec_picasso.schedule.setting_choice import pieces_for


@dataclass(frozen=True, kw_only=True, eq=False)
class Decision(Choice):
    """The chosen plan with the placement of all tables."""

    tables: tuple[TableInfo, ...]
    placements: tuple[HotColdParams | None, ...]
    """Placement of each table; ``None`` = stock."""
    homes: HomeBlocks | None
    """Home blocks of the row-exchanged tables; ``None`` = no statistics or no such tables."""
    block_rows: Mapping[int, tuple[int, ...]]
    """Number of home rows on each rank, by position of each table in ``homes``."""
    home_lookups: Mapping[int, tuple[float, ...]]
    """Lookups of a rank's batch in the home rows of each rank that have no replica, by position."""
    curves: CommCurves
    world_size: int
    batch_size: int  # samples per rank and step
    dense: DenseTimes  # for this batch size; 0 if not known


def decide(
    tables: Sequence[TableInfo],
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
    """Chooses the placement of each table, its hot rows, and its home blocks.

    Arguments as for ``hot_cold_planner``; ``replica_budget_bytes``, per rank: chosen hot rows and
    unequal home blocks take no more. PlanError if statistics are of other tables, or hot rows do
    not exist.
    """
    able = {t.load.name: t.load.num_embeddings for t in tables if t.not_hot_cold is None}
    if stats is not None:
        for table in tables:  # one by one: names may repeat
            stats.check_model({table.load.name: table.load.num_embeddings})
        loads = [_with_row_wise(table.load, stats, world_size) for table in tables]
        tables = [replace(table, load=load) for table, load in zip(tables, loads)]
    dense = (dense or curves.dense or DenseTimes()).at(batch_size)
    pricer = StepPricer(curves, world_size, dense, pieces_for(batch_size))
    if hot_rows is None:
        choice = choose(tables, pricer, replica_budget_bytes)
        each = zip(tables, choice.forms, choice.num_hot)
        counts = {t.load.name: num_hot for t, form, num_hot in each if form is not None}
        # hot rows in the user's constraints replace chosen ones
        hot_sets = select_hot_rows(able, counts, stats)
        hot_sets |= {t.load.name: t.required.hot_rows for t in tables if t.required is not None}
    else:  # the caller has chosen: the plan is only priced
        without = {table.load.name for table in tables if table.no_hot_rows is not None}
        hot_sets = select_hot_rows(able, hot_rows, stats, without=without)
        names = enumerate(table.load.name for table in tables)
        given = {i: hot_sets[name].numel() for i, name in names if name in hot_sets}
        choice = choose(tables, pricer, given_hot=given)
    in_rows = [i for i, form in enumerate(choice.forms) if form and not FORMS[form].sends_bags]
    homes = None
    block_rows: dict[int, tuple[int, ...]] = {}
    home_lookups: dict[int, tuple[float, ...]] = {}
    if stats is not None:
        works = [choice.works[i] for i in in_rows]
        homes = _homes(works, hot_sets, stats, world_size, replica_budget_bytes)
        block_rows |= zip(in_rows, homes.block_rows_TW if homes is not None else ())
        for i, rows_W in block_rows.items():
            load = tables[i].load
            home_lookups[i] = _lookups_by_home(load, stats, rows_W, hot_sets[load.name])
    return Decision(
        **vars(choice),
        tables=tuple(tables),
        placements=_placements(tables, choice, hot_sets, num_waves),
        homes=homes,
        block_rows=block_rows,
        home_lookups=home_lookups,
        curves=curves,
        world_size=world_size,
        batch_size=batch_size,
        dense=dense,
    )


def _homes(
    works: Sequence[TableWork],
    hot_sets: Mapping[str, Tensor],
    stats: FrequencyStats,
    world_size: int,
    budget_bytes: float,
) -> HomeBlocks | None:
    """Cuts row-exchanged tables into home blocks, in what hot rows leave of the budget."""
    if not works:
        return None
    loads = [_row_loads(work, hot_sets, stats) for work in works]
    replicas = sum(hot_sets[work.load.name].numel() * work.load.replica_bytes for work in works)
    return balance_homes(loads, world_size, max(0.0, budget_bytes - replicas))


def _placements(
    tables: Sequence[TableInfo], choice: Choice, hot_sets: Mapping[str, Tensor], num_waves: int
) -> tuple[HotColdParams | None, ...]:
    """Returns the placement of each table; ``None`` = stock."""
    count, waves = choice.step.num_micro_batches, _waves(tables, choice, num_waves)
    return tuple(
        HotColdParams(
            hot_rows=hot_sets[table.load.name], wave=wave, form=form, num_micro_batches=count
        )
        if form is not None
        else None
        for table, form, wave in zip(tables, choice.forms, waves)
    )


def _waves(tables: Sequence[TableInfo], choice: Choice, num_waves: int) -> list[int]:
    """Assigns each hot/cold table to a wave of its module, by volume."""
    volumes: dict[str, dict[int, tuple[Hashable, float]]] = {}
    each_table = zip(choice.works, choice.forms, choice.num_hot)
    for position, (work, form, num_hot) in enumerate(each_table):
        if form is not None:
            load, split = work.load, work.split(num_hot)
            # cold rows are fetched, gradients of touched hot rows are reduced
            sent = split.cold_used + split.hot_touched
            number = load.bags if FORMS[form].sends_bags else sent
            key = pack_key(form, 0, load.dim, load.element_bytes)
            volumes.setdefault(load.module, {})[position] = (key, number * load.dim)
    waves: dict[int, int] = {}
    for by_position in volumes.values():
        waves |= zip(by_position, balance_waves(list(by_position.values()), num_waves))
    return [waves.get(position, 0) for position in range(len(tables))]


def balance_waves(tables: Sequence[tuple[Hashable, float]], num_waves: int) -> list[int]:
    """Distributes tables over waves of about equal volume; an interleaved pipeline staggers waves.

    Tables that can share a pack stay together unless they exceed the mean volume of a wave, because
    each additional pack costs an update and some copies. Descending units go to the wave with the
    smallest volume; the largest wave is at most 4/3 of that of an optimal assignment (Graham 1969).

    Each table of one exchange has a key that is equal for tables that can share a pack, and the
    expected elements that a rank sends per step. Returns the wave of each table; a wave may be
    empty.

    Source:
        PICASSO (arXiv 2204.04903), K-Interleaving: packs in groups of balanced volume.
    """
    elements = [number for _, number in tables]
    members: dict[Hashable, list[int]] = {}
    for position, (key, _) in enumerate(tables):
        members.setdefault(key, []).append(position)

    def volume(unit: list[int]) -> float:
        return sum(elements[i] for i in unit)

    # a unit is assigned as a whole: tables that share a pack, or one table of a large pack
    units: list[list[int]] = []
    for unit in members.values():
        units += [[i] for i in unit] if volume(unit) > sum(elements) / num_waves else [unit]
    filled, waves = [0.0] * num_waves, [0] * len(tables)
    for unit in sorted(units, key=volume, reverse=True):
        wave = filled.index(min(filled))
        filled[wave] += volume(unit)
        for position in unit:
            waves[position] = wave
    return waves


def _row_loads(work: TableWork, hot_sets: Mapping[str, Tensor], stats: FrequencyStats) -> RowLoads:
    """Estimates the elements that one rank requests per step, by row of a table.

    Rows seen once do not predict the rows of the next batch, but where those are: near them are as
    many rows that were not seen (Good 1953, in each part of the table). So each gives an equal
    share of their load to the next rows without a count, as far as these can take it, wherever the
    frequent ids are.
    """
    counts, hot_H = stats.tables[work.load.name], hot_sets[work.load.name]
    rows_U, counts_U, spectrum = counts.rows_U.numpy(), counts.counts_U, work.load.spectrum
    assert spectrum is not None
    # load of a row = probability that one rank's batch uses it, looked up by its count
    likely_U = counts.likely_counts.double()
    place_U = torch.searchsorted(spectrum.counts_K.flip(0), likely_U).numpy()
    load_U = work.used_K[::-1][place_U.clip(max=work.used_K.size - 1)]
    is_hot_U = torch.isin(counts.rows_U, hot_H).numpy()
    is_once_U = (counts_U == 1).numpy() & ~is_hot_U
    load_U[is_once_U | is_hot_U] = 0.0  # hot rows are not requested
    dim, cold = float(work.load.dim), work.split(hot_H.numel()).cold_used
    rest, gap_load_U1 = max(0.0, cold - float(load_U.sum())), np.zeros(rows_U.size + 1)
    if is_once_U.any():
        # rows seen once up to a gap without counts, or up to the end, and what they leave to it
        gap_rows_U1 = np.diff(rows_U, prepend=-1, append=work.load.num_embeddings) - 1
        gaps = np.append(np.flatnonzero(gap_rows_U1[:-1]), rows_U.size)
        gap_of_once = np.searchsorted(gaps, np.flatnonzero(is_once_U) + 1)
        num_once = np.bincount(gap_of_once, minlength=gaps.size)
        shares = rest / num_once.sum() * num_once
        gap_load_U1[gaps] = np.minimum(shares, gap_rows_U1[gaps])  # a row is requested once
        kept = (shares - gap_load_U1[gaps]) / np.maximum(num_once, 1)
        load_U[is_once_U], rest = kept[gap_of_once], 0.0
    return RowLoads(
        num_embeddings=work.load.num_embeddings,
        rows_U=rows_U,
        load_U=load_U * dim,
        gap_load_U1=gap_load_U1 * dim,
        spread_load=rest * dim,
        row_bytes=work.load.row_bytes,
        halves=counts.halves,
    )


def _with_row_wise(load: TableLoad, stats: FrequencyStats, world_size: int) -> TableLoad:
    """Adds the lookups that stock row-wise sharding puts on each rank."""
    blocks = even_blocks(load.num_embeddings, world_size)
    return replace(load, row_wise_W=_lookups_by_home(load, stats, blocks, torch.empty(0)))


def _lookups_by_home(
    load: TableLoad, stats: FrequencyStats, block_rows_W: Sequence[int], hot_H: Tensor
) -> tuple[float, ...]:
    """Splits a rank's lookups of rows without a replica by home rank, shape ``(W,)``."""
    counts = stats.tables[load.name]
    cold_counts_U = counts.likely_counts * ~torch.isin(counts.rows_U, hot_H)
    home_U = np.searchsorted(np.cumsum(block_rows_W), counts.rows_U.numpy(), side="right")
    seen_W = np.bincount(home_U, cold_counts_U.numpy(), minlength=len(block_rows_W))
    # lookups of rows without a count, and of a table without any, are even over rows
    total = max(counts.num_lookups, 1)
    others = total - float(counts.likely_counts.sum())
    lookups_W = seen_W + others / load.num_embeddings * np.array(block_rows_W)
    return tuple((lookups_W / total * load.lookups).tolist())
