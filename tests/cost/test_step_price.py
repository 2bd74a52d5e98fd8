"""Expected rows and bytes of a step, against counting them on generated batches; what a step is
priced at: chunks of first use, dirty rows, and what hides what.

``test_bytes_on_the_wire.py`` compares the traffic of sharded modules; here the arithmetic is
checked where every number can be known."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from torchrec_picasso.cost import CommCurves, step_price
from torchrec_picasso.cost.by_host import ByHost
from torchrec_picasso.cost.curves import COLLECTIVES, Curve
from torchrec_picasso.cost.forms import hot_cold_memory_bytes
from torchrec_picasso.cost.hot_cold import Exchange, HotColdTotals, exchange_times
from torchrec_picasso.cost.local import PHASES, DenseTimes, LocalCosts, PhaseCost, SideCosts
from torchrec_picasso.cost.schedule_time import Message, StepPrice
from torchrec_picasso.cost.step_price import StepPricer, chunk_shares, micro_batch_shares
from torchrec_picasso.cost.stock import (
    STOCK_TYPES,
    StockCost,
    StockTotals,
    cost_of_totals,
    data_parallel_bytes,
    deal_out,
    marginal_stock_costs,
    max_over_mean,
    rank_loads,
    stock_cost,
)
from torchrec_picasso.cost.table_work import HOT_ROW_BYTES, TableLoad, TableWork
from torchrec_picasso.frequency.spectrum import CountSpectrum
from torchrec_picasso.placement import Form
from torchrec_picasso.schedule.setting_choice import NUM_MICRO_BATCHES

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
FREE = LocalCosts(hot_cold=SideCosts(), stock=SideCosts())
WIRE = CommCurves.assumed(2, gbytes_per_s=1.0, latency_ms=0.0, local=FREE)


def in_all_phases(**terms: float) -> SideCosts:
    return SideCosts(**{phase: PhaseCost(**terms) for phase in PHASES})  # type: ignore[arg-type]


def load(name: str = "t", **changes: object) -> TableLoad:
    """Rows 0, 1, 2 with counts 600, 300, 100."""
    usual = TableLoad(
        name=name,
        num_embeddings=100,
        dim=16,
        lookups=50.0,
        bags=50.0,
        spectrum=CountSpectrum.from_counts(torch.tensor([600, 300, 100]), 100),
    )
    return dataclasses.replace(usual, **changes)  # type: ignore[arg-type]


def in_modules(load: TableLoad, number: int) -> list[TableWork]:
    """A table like it in each of some modules, on two ranks."""
    return [TableWork(dataclasses.replace(load, module=str(i)), 2) for i in range(number)]


def test_without_statistics_every_row_counts_alike() -> None:
    work = TableWork(load(spectrum=None, num_embeddings=50), world_size=2)
    assert work.unique == pytest.approx(50 * (1 - (1 - 1 / 50) ** 50))
    assert work.unique_anywhere == pytest.approx(50 * (1 - (1 - 1 / 50) ** 100))


def test_bytes_of_stock_types() -> None:
    work = TableWork(load(lookups=100.0), world_size=2)  # 50 bags of 2
    pooled = 50 * 16 * 4
    expected = {
        "table_wise": {"ids": (100 * 8 + 50 * 4) / 2, "rows": pooled / 2},
        "row_wise": {"ids": (100 * 8 + 2 * 50 * 4) / 2, "rows": pooled},
        "column_wise": {"ids": (200 * 8 + 100 * 4) / 2, "rows": pooled / 2},
    }
    for kind, sent in expected.items():
        cost = stock_cost(kind, [work], WIRE, 2)
        assert cost.sent_bytes == pytest.approx({**sent, "gradients": sent["rows"]}), kind
    whole = stock_cost("data_parallel", [work], WIRE, 2)
    assert whole.sent_bytes == pytest.approx({"gradients": 100 * 16 * 4})


def test_exchanges_of_stock_types_are_timed_by_their_collectives() -> None:
    slopes = {
        "all_to_all": 1,
        "row_exchange": 0,
        "reduce_scatter": 2,
        "all_gather": 3,
        "all_reduce": 4,
    }
    lines = {name: Curve.line(0.0, 1 / x if x else float("inf")) for name, x in slopes.items()}
    curves = dataclasses.replace(WIRE, collectives=lines)
    alone = TableWork(
        load(), world_size=2
    )  # the other rank has no table: half more in one direction
    for kind, both_ways, rows, gradients in (
        ("table_wise", 1.5, 1.5, 1.5),
        ("column_wise", 1, 1, 1),
        ("row_wise", 1, 2, 3),
        ("data_parallel", 0, 0, 4),
    ):
        cost = stock_cost(kind, [alone], curves, 2)
        sent = {"ids": 0.0, "rows": 0.0, **cost.sent_bytes}
        found = cost.ids_wire_ms, cost.forward_wire_ms, cost.backward_wire_ms
        expected = both_ways * sent["ids"], rows * sent["rows"], gradients * sent["gradients"]
        assert found == pytest.approx([1e-6 * each for each in expected]), kind


def test_each_work_on_stock_tables_has_its_price_once() -> None:
    work = TableWork(load(lookups=100.0, row_wise_W=(75.0, 25.0)), world_size=2)  # 50 bags of 2
    rows, own = work.unique_anywhere / 2, work.unique
    terms = ("lookup_ns", "lookup_element_ns", "bag_element_ns", "row_ns", "row_element_ns")
    for kind, counts in {
        # twice the mean; row-wise 1.5 times, and a sum of each bag of both ranks
        "table_wise": (200, 16 * 200, 16 * 100, 2 * rows, 16 * 2 * rows, 2 * rows),
        "row_wise": (150, 16 * 150, 16 * 100, 1.5 * rows, 16 * 1.5 * rows, 1.5 * rows),
        "column_wise": (200, 16 * 100, 16 * 50, 2 * rows, 16 * rows, 2 * rows),
        "data_parallel": (100, 16 * 100, 16 * 50, own, 16 * own, 0),
    }.items():
        priced = {"fixed_ms": 1, "feature_us": 1e-3, "paged_element_ns": 0}
        priced |= {t: n * 1e-6 for t, n in zip((*terms, "update_ns"), counts)}
        for term, ms in priced.items():
            side = in_all_phases(**{term: 1.0})
            local = LocalCosts(stock=side)
            cost = stock_cost(kind, [work], dataclasses.replace(WIRE, local=local), 2)
            is_dense = kind == "data_parallel"
            # a dense update passes three times over the table, and ids need no work
            update_ms = 3 * 100 * 16 * 1e-6 if is_dense and term == "bag_element_ns" else 0.0
            found = cost.ids_ms, cost.forward_ms, cost.backward_ms
            assert found == pytest.approx((0 if is_dense else ms, ms, ms + update_ms)), (kind, term)


def test_stock_output_its_gradient_and_a_dense_gradient_are_paged() -> None:
    local = LocalCosts(stock=SideCosts(forward=PhaseCost(paged_element_ns=1.0)))
    curves, kept = dataclasses.replace(WIRE, local=local), (32 << 20) / 4
    totals = StockTotals(features=1, vector_elements=1e8, summed_elements=1e7, table_elements=1e9)
    for kind, backward_ms in (("table_wise", 0.0), ("data_parallel", (1e9 - kept) * 1e-6)):
        cost = cost_of_totals(kind, totals, 1.5, curves, 4)
        assert cost.forward_ms == pytest.approx((2 * (1.5 * 1e8 + 4 * 1e7) - kept) * 1e-6)
        assert cost.backward_ms == pytest.approx(backward_ms)


def test_a_link_has_one_burst_for_the_exchanges_of_all_modules() -> None:
    works = in_modules(load(), 2)
    sent = stock_cost("table_wise", works, WIRE, 2).sent_bytes["rows"]
    for ms, expected_ms in ((10.0, 10.0), (1.5, 2.0)):  # of all bytes at once, half of them in 1 ms
        burst = Curve.fit([round(sent / 2), round(sent)], [1.0, ms])
        curves = dataclasses.replace(WIRE, collectives=dict.fromkeys(WIRE.collectives, burst))
        cost = stock_cost("table_wise", works, curves, 2)
        assert cost.forward_wire_ms == cost.backward_wire_ms == pytest.approx(expected_ms)
    ids = stock_cost("table_wise", works, WIRE, 2).sent_bytes["ids"] / 2
    burst = Curve.fit([round(ids / 2), round(ids)], [1.0, 10.0])
    curves = dataclasses.replace(WIRE, collectives=dict.fromkeys(WIRE.collectives, burst))
    cost = stock_cost("table_wise", works, curves, 2)
    assert cost.ids_wire_ms == pytest.approx(2 * 10.0 + 2 * curves.ms("all_to_all", 0, 2))


def test_a_module_has_its_own_collective() -> None:
    lines = {name: Curve.line(1.0, float("inf")) for name in WIRE.collectives}
    lines |= {"reduce_scatter": Curve.line(10.0, float("inf"))}
    curves = dataclasses.replace(WIRE, collectives=lines)
    sequences = [TableWork(load(module=name, is_sequence=True), 2) for name in ("c", "d")]
    cost = stock_cost("row_wise", [*in_modules(load(), 3), *sequences], curves, 2)
    assert cost.forward_wire_ms == pytest.approx(3 * 10.0 + 2 * 1.0)


def test_a_map_of_more_rows_takes_longer_for_each_row_of_sequences() -> None:
    slow = dataclasses.replace(WIRE, local=LocalCosts(stock=in_all_phases(hash_ns=100.0)))
    for lookups in (9000.0, 900.0):  # maps of a few rows take as long as one of 4,000
        sequences = load(spectrum=None, is_sequence=True, num_embeddings=10**6, lookups=lookups)
        for world_size in (2, 4):
            works = [TableWork(sequences, world_size)] * world_size  # a table on each rank
            rows = works[0].unique_anywhere
            on_rank = {"row_wise": rows / world_size, "data_parallel": 0.0}  # a dense update: none
            for kind in STOCK_TYPES:
                ms = stock_cost(kind, works, slow, world_size).compute_ms  # of backward alone
                updated = rows * world_size if kind == "column_wise" else rows
                root = max(on_rank.get(kind, rows), 4000) ** 0.5 * (kind != "data_parallel")
                assert ms == pytest.approx(100 * updated * root * 1e-6), kind
            # a step waits for the rank that has the only table
            alone_ms = stock_cost("table_wise", works[:1], slow, world_size).backward_ms
            assert alone_ms == pytest.approx(100 * rows * max(rows, 4000) ** 0.5 * 1e-6)
            bags = TableWork(dataclasses.replace(sequences, is_sequence=False), world_size)
            assert stock_cost("table_wise", [bags], slow, world_size).backward_ms == 0


def test_the_busiest_rank_of_few_tables() -> None:
    tables = [load(str(i)) for i in range(3)]
    assert max_over_mean("table_wise", tables, 2) == pytest.approx(2 / 1.5)
    assert max_over_mean("table_wise", tables, 6) == pytest.approx(2.0)
    assert max_over_mean("column_wise", tables, 2) == pytest.approx(1.0)
    assert max_over_mean("row_wise", tables, 6) == 1.0
    blocks = load("first rows", dim=48, row_wise_W=(45.0, 5.0))
    assert max_over_mean("row_wise", [*tables, blocks], 2) == pytest.approx((75 + 135) / 150)
    assert max_over_mean("table_wise", [*tables, load(dim=48)], 2) == 1.0
    sequence = load(lookups=150.0, is_sequence=True)
    assert max_over_mean("table_wise", [sequence, tables[0]], 2) == pytest.approx(150 / 100)
    # 16 columns on 3 ranks: the width divides them, and is a multiple of 4
    assert list(map(sorted, deal_out("column_wise", tables[:1], 3))) == [[0, 0, 1, 2]]
    assert deal_out("column_wise", [load(dim=28)], 2) == [[0]]  # none of up to 14 columns is one


def test_ranks_send_in_the_mean_what_is_priced() -> None:
    skewed = [
        load(lookups=100.0, is_sequence=s, row_wise_W=(70.0, 20.0, 10.0)) for s in (True, False)
    ]
    loads = [*skewed, load("c", num_embeddings=400, optimizer_share=0.5)]
    for kind in ("row_wise", "table_wise", "column_wise"):
        ranks = rank_loads(kind, loads, 3)
        priced = stock_cost(kind, [TableWork(each, 3) for each in loads], WIRE, 3).sent_bytes
        mean = sum(rank["sent_bytes"] for rank in ranks) / 3
        assert mean == pytest.approx(sum(priced.values())), kind
        stored = sum(rank["home_bytes"] for rank in ranks)
        assert stored == pytest.approx(sum(each.num_embeddings * each.row_bytes for each in loads))
    # 100 lookups in a rank's 50 sequences: ids and lengths to others, rows to two, gradients
    first, *_, last = rank_loads("row_wise", skewed[:1], 3)
    ids, row = 8, 16 * 4
    assert first["sent_bytes"] == pytest.approx(30 * ids + 100 * 4 + (2 * 70 + 30) * row)
    assert last["sent_bytes"] == pytest.approx(90 * ids + 100 * 4 + (2 * 10 + 90) * row)
    on_one = [rank["sent_bytes"] for rank in rank_loads("table_wise", skewed[:1], 3)]
    assert on_one == pytest.approx([200 * row, *[100 * ids + 50 * 4 + 100 * row] * 2])


def test_memory_of_a_table_of_sequences_is_what_was_measured() -> None:
    measured = json.loads((RESULTS / "sequence_memory.json").read_text())
    sizes, world_size = measured["question"], measured["question"]["ranks"]
    rows, lookups = sizes["rows"], sizes["samples"] * sizes["history"]
    chance = np.arange(1.0, rows + 1) ** -1.1
    by_row = np.zeros(rows)
    by_row[np.arange(rows) * 7919 % rows] = lookups * chance / chance.sum()
    histories = TableLoad(
        name="t",
        num_embeddings=rows,
        dim=sizes["dim"],
        lookups=lookups,
        bags=sizes["samples"],
        is_sequence=True,
        row_wise_W=tuple(by_row.reshape(world_size, -1).sum(1).tolist()),
        optimizer_share=1 / sizes["dim"],
    )
    for kind in ("row_wise", "table_wise", "column_wise"):
        found = [rank["memory_bytes"] for rank in rank_loads(kind, [histories], world_size)]
        expected = [rank["peak_bytes"] for rank in measured["found"][kind]]
        assert found == pytest.approx(expected, rel=0.02), kind
    spectrum = CountSpectrum.from_counts(torch.from_numpy(by_row * 1e3).ceil().long(), rows)
    work = TableWork(dataclasses.replace(histories, spectrum=spectrum), world_size)
    for num_parts, kind in ((1, "ours:1"), (1, "ours:1:ahead"), (4, "ours:4:ahead")):
        memory = hot_cold_memory_bytes([(work, 0, "rows")], num_parts)
        ahead = 0.0 if "ahead" in kind else memory["lookahead"]
        expected = [rank["peak_bytes"] for rank in measured["found"][kind]]
        found, most = memory["home"] + memory["buffers"] - ahead, 1.005 if num_parts == 1 else 1.07
        assert all(0.999 * each <= found <= most * each for each in expected), kind


@pytest.mark.parametrize(
    ("world_size", "num_ids", "row_wise", "others"),
    [(2, 1, 84.9, 67.7), (2, 8, 88.6, 71.4), (4, 1, 98.8, 47.0)],
)
def test_memory_of_stock_bags_is_what_was_measured(
    world_size: int, num_ids: int, row_wise: float, others: float
) -> None:
    """Megabytes of a rank: 8 tables of 20,000 rows of 128 columns, 2,048 samples."""
    bags = {"lookups": 2048.0 * num_ids, "bags": 2048.0, "optimizer_share": 1 / 128}
    loads = [load(str(i), num_embeddings=20_000, dim=128, **bags) for i in range(8)]
    for kind, expected in {
        "row_wise": row_wise,
        "table_wise": others,
        "column_wise": others,
    }.items():
        found = [rank["memory_bytes"] / 1e6 for rank in rank_loads(kind, loads, world_size)]
        assert found == pytest.approx([expected] * world_size, rel=0.04), kind


def test_marginal_costs_are_what_leaving_a_table_out_saves() -> None:
    works = [TableWork(load(str(i), dim=8 * (i + 1)), world_size=2) for i in range(3)]
    curves = CommCurves.assumed(2, gbytes_per_s=0.1, latency_ms=0.2)
    for kind in STOCK_TYPES:
        uneven = max_over_mean(kind, [work.load for work in works], 2)
        totals = [
            StockTotals.sum(StockTotals.from_table(kind, work) for work in some)
            for some in (works, works[1:])
        ]
        added = [costs[kind] for costs in marginal_stock_costs(works, curves, 2)]
        steps = [cost_of_totals(kind, some, uneven, curves, 2).exposed_ms for some in totals]
        assert added[0].exposed_ms == pytest.approx(steps[0] - steps[1])
        assert all(cost.exposed_ms > 0 for cost in added)


def test_no_table_saves_time_where_a_measured_curve_falls() -> None:
    works = [TableWork(load(str(i)), world_size=2) for i in range(2)]
    sent = stock_cost("table_wise", works, WIRE, 2).sent_bytes["rows"]
    falling = Curve.fit([round(sent / 2), round(sent)], [1e3, 1.0])
    curves = dataclasses.replace(WIRE, collectives=dict.fromkeys(WIRE.collectives, falling))
    for cost in marginal_stock_costs(works, curves, 2):
        assert cost["table_wise"].forward_wire_ms == cost["table_wise"].backward_wire_ms == 0
        assert all(each.exposed_ms >= 0 for each in cost.values())


def test_ranks_get_as_many_lookups_whatever_rows_they_repeat() -> None:
    one_row = CountSpectrum.from_counts(torch.tensor([1000]), 100)
    local = LocalCosts(stock=SideCosts(backward=PhaseCost(update_ns=1e3, hash_ns=1e3)))
    curves = CommCurves.assumed(2, gbytes_per_s=0.1, latency_ms=0.2, local=local)
    for is_sequence in (False, True):
        loads = [load("a"), load("b", spectrum=one_row)]
        works = [TableWork(dataclasses.replace(own, is_sequence=is_sequence), 2) for own in loads]
        assert works[0].unique_anywhere > 2 * works[1].unique_anywhere
        for first, second in zip(*(c.values() for c in marginal_stock_costs(works, curves, 2))):
            assert first.exposed_ms == pytest.approx(second.exposed_ms)


def test_bags_have_no_share_in_the_maps_of_sequences() -> None:
    local = LocalCosts(stock=SideCosts(backward=PhaseCost(hash_ns=1e6)))
    curves = dataclasses.replace(WIRE, local=local)
    works = [TableWork(load(str(s), is_sequence=s), world_size=2) for s in (False, True)]
    bags, sequences = marginal_stock_costs(works, curves, 2)
    for kind in ("table_wise", "row_wise", "column_wise"):
        assert bags[kind].backward_ms == 0 < sequences[kind].backward_ms


def test_a_sequence_table_without_lookups_has_a_price() -> None:
    nothing = load(num_embeddings=1, lookups=0.0, spectrum=None, is_sequence=True)
    (costs,) = marginal_stock_costs([TableWork(nothing, world_size=2)], WIRE, 2)
    assert all(cost.backward_ms == 0 for cost in costs.values())


def test_memory_counts_homes_replicas_and_state() -> None:
    work = TableWork(load(optimizer_share=0.5), world_size=2)
    memory = hot_cold_memory_bytes([(work, 3, "rows")])
    assert memory["home"] == pytest.approx(50 * (16 * 4 * 1.5 + 1 + 4))  # a mark, a count
    assert memory["replica"] == pytest.approx(3 * (16 * 4 * 1.5 + HOT_ROW_BYTES))
    assert memory["optimizer"] == pytest.approx(53 * 16 * 4 * 0.5)
    for form, beside in (("rows", 1), ("bags", 0)):
        home = hot_cold_memory_bytes([(work, 0, form)])["home"]  # type: ignore[list-item]
        assert home == pytest.approx(50 * (16 * 4 * 1.5 + beside))
    # rows with their gradient, the output with its own
    everywhere = 100 * 16 * 4 * (1.5 + 1) + 2 * 50 * 16 * 4
    assert data_parallel_bytes(work.load) == pytest.approx(everywhere)
    wide = TableWork(load(dim=256), world_size=2)
    whole, cut = (hot_cold_memory_bytes([(wide, 0, "rows")], k)["buffers"] for k in (1, 4))
    assert 0 < cut < whole  # gradients of outputs are those of one micro-batch


ROWS, BATCH, DIM = 2000, 512, 64


def zipf_counts(exponent: float) -> torch.Tensor:
    return (1e5 * torch.arange(1, ROWS + 1, dtype=torch.float64) ** -exponent).ceil()


def work(exponent: float = 1.0, *, pooling: int = 1, rows: int = ROWS) -> TableWork:
    load = TableLoad(
        name="t",
        num_embeddings=rows,
        dim=DIM,
        lookups=float(BATCH * pooling),
        bags=float(BATCH),
        spectrum=CountSpectrum.from_counts(zipf_counts(exponent)[:rows], rows),
    )
    return TableWork(load, world_size=2)


def network(gbytes_per_s: float = 0.1, *, core_ns: float = 0.0, **others: object) -> CommCurves:
    curves = CommCurves.assumed(2, gbytes_per_s=gbytes_per_s, latency_ms=0.3)
    return dataclasses.replace(curves, wire_core_ns=core_ns, **others)  # type: ignore[arg-type]


@pytest.mark.parametrize("num_hot", [0, 100])
def test_rows_agree_with_drawn_batches(num_hot: int) -> None:
    """Of two ranks on one host."""
    generator = torch.Generator().manual_seed(0)
    chance = zipf_counts(1.0)
    trials, touched, found = 60, 0.0, np.zeros((2, 2))
    for _ in range(trials):
        drawn = torch.multinomial(chance, 4 * BATCH, replacement=True, generator=generator)
        before, on_host = drawn[: 2 * BATCH].unique(), drawn[2 * BATCH :]
        touched += float((before < num_hot).sum()) / trials
        for sums, lookups in zip(found, (on_host[:BATCH], on_host)):
            rows = lookups.unique()
            rows = rows[rows >= num_hot]
            sums += np.array([rows.numel(), float(torch.isin(rows, before).sum())]) / trials
    split = TableWork(work().load, 2, ranks_per_host=2).split(num_hot)
    assert [split.cold_used, split.dirty] == pytest.approx(found[0].tolist(), rel=0.04)
    on_host_sums = [split.cold_on_host, split.dirty_on_host]
    assert on_host_sums == pytest.approx(found[1].tolist(), rel=0.04)
    assert split.hot_touched == pytest.approx(touched, rel=0.04)
    assert split.coverage == pytest.approx(float(chance[:num_hot].sum() / chance.sum()))


def test_rows_that_the_sample_had_not_are_expected_in_batches() -> None:
    generator, rows = torch.Generator().manual_seed(0), 2000
    counts = torch.randint(rows, (BATCH // 2,), generator=generator).bincount()
    spectrum = CountSpectrum.from_counts(counts[counts > 0], rows)
    load = dataclasses.replace(work().load, num_embeddings=rows, spectrum=spectrum)
    item = TableWork(load, 4, ranks_per_host=2)
    on_rank, on_host, anywhere = (
        rows * -np.expm1(BATCH * ranks * np.log1p(-1 / rows)) for ranks in (1, 2, 4)
    )
    split = item.split(0)
    assert [item.unique, split.cold_used] == pytest.approx([on_rank] * 2, rel=0.05)
    assert [item.unique_anywhere, split.cold_touched] == pytest.approx([anywhere] * 2, rel=0.05)
    assert split.cold_on_host == pytest.approx(on_host, rel=0.05)


@pytest.mark.parametrize("num_parts", NUM_MICRO_BATCHES)
def test_chunks_add_up_and_the_first_is_small_in_samples_only(num_parts: int) -> None:
    chunks = chunk_shares(num_parts)
    assert sum(chunks) == pytest.approx(1)
    assert min(chunks) > 0
    if num_parts > 1:  # rows repeat, so the first samples bring more new rows than others
        assert chunks[0] > micro_batch_shares(num_parts)[0]
    assert sum(micro_batch_shares(num_parts)) == pytest.approx(1)


@pytest.mark.parametrize("is_sequence", [False, True])
def test_each_work_on_rows_has_its_price_once(is_sequence: bool) -> None:
    pooled = work(pooling=3).load
    item = TableWork(dataclasses.replace(pooled, is_sequence=is_sequence), world_size=2)
    totals, split = HotColdTotals.from_table(item, 100), item.split(100)
    home, lookups = split.cold_touched / 2, 3 * BATCH
    summed, updated = split.cold_used + split.hot_touched, home + split.hot_touched
    for phase, places, rows, written in (
        ("input_dist", ("ids_ms", "ids_ms", "ids_ms"), item.unique, home),
        # home rows are read once; replicas are read where they are
        ("forward", ("call_ms", "pool_ms", "gather_ms"), item.unique, home),
        # a hot row is updated on every rank
        ("backward", ("backward_call_ms", "sum_ms", "update_ms"), summed, updated),
    ):
        per_call = {"fixed_ms": 1.0, "feature_us": 1e-3, "pack_ms": 0.0}
        per_lookup = {
            "lookup_ns": lookups * 1e-6,
            "lookup_element_ns": DIM * lookups * 1e-6,
            "bag_element_ns": DIM * (lookups if is_sequence else BATCH) * 1e-6,
        }
        per_row = {
            "row_ns": rows * 1e-6,
            "row_element_ns": DIM * rows * 1e-6,
            "update_ns": written * 1e-6,
        }
        for place, priced in zip(places, (per_call, per_lookup, per_row)):
            for term, ms in priced.items():
                costs = SideCosts(**{phase: PhaseCost(**{term: 1.0})})  # type: ignore[arg-type]
                times = dataclasses.asdict(exchange_times(totals, LocalCosts(hot_cold=costs)))
                assert times == pytest.approx(dict.fromkeys(times, 0.0) | {place: ms}), (
                    phase,
                    term,
                )


def test_micro_batches_have_less_output_in_memory_and_as_many_rows() -> None:
    totals = HotColdTotals(pooled_elements=2e8, unique_elements=5e7, bag_elements=5e7)
    local = LocalCosts(hot_cold=in_all_phases(paged_element_ns=1.0))
    for num_parts in (1, 4):
        paged_ms = (2e8 / num_parts + 2 * 1e8 - (32 << 20) / 4) * 1e-6
        times = dataclasses.asdict(exchange_times(totals, local, num_parts=num_parts))
        expected = dict.fromkeys(times, 0.0) | {"pool_ms": paged_ms, "sum_ms": paged_ms}
        assert times == pytest.approx(expected)


def test_bags_send_lookups_lengths_and_pooled_vectors() -> None:
    item = work(pooling=5)
    sent = Exchange.from_tables([(item, 0, "bags")], 1).ways(2)[0].sent
    assert sent["ids"] == pytest.approx((5 * BATCH * 4 + BATCH * 4) / 2)
    assert sent["rows"] == sent["gradients"] == pytest.approx(BATCH * DIM * 4 / 2)
    assert sent["hot"] == 0
    # one bag of five nearly distinct lookups is shorter than their rows, of which one is not
    uniform = TableWork(dataclasses.replace(item.load, spectrum=None, num_embeddings=10**6), 2)
    curves = network()
    rows, bags = (
        StepPricer(curves, 2).price([Exchange.from_tables([(uniform, 0, form)], 1)])
        for form in ("rows", "bags")
    )
    assert bags.step_ms < rows.step_ms
    assert bags.wire_ms < rows.wire_ms / 2


@pytest.mark.parametrize(
    ("phase", "term", "where", "number"),
    [
        # a home rank gets no row numbers of bags
        ("input_dist", "update_ns", "update_ms", 0),
        ("input_dist", "lookup_ns", "ids_ms", 0),
        ("input_dist", "row_element_ns", "ids_ms", 0),
        ("input_dist", "bag_lookup_ns", "ids_ms", 3 * BATCH),
        ("forward", "fixed_ms", "call_ms", 1e6),
        ("forward", "feature_us", "call_ms", 1e3),
        ("forward", "lookup_ns", "bag_pool_ms", 3 * BATCH),
        ("forward", "lookup_element_ns", "bag_pool_ms", 3 * DIM * BATCH),
        ("forward", "row_ns", "gather_ms", BATCH),
        ("forward", "update_ns", "gather_ms", "home rows"),
        ("backward", "lookup_ns", "update_ms", 3 * BATCH),
        ("backward", "bag_lookup_ns", "update_ms", 3 * BATCH),
        ("backward", "bag_element_ns", "update_ms", DIM * BATCH),
        ("backward", "row_ns", "update_ms", BATCH),
        ("backward", "row_element_ns", "update_ms", DIM * BATCH),
        ("backward", "update_ns", "update_ms", "home rows"),
    ],
)
def test_each_work_on_bags_has_its_price_once(
    phase: str, term: str, where: str, number: float | str
) -> None:
    item, totals = work(pooling=3), HotColdTotals.from_table(work(pooling=3), 0, "bags")
    costs = SideCosts(**{phase: PhaseCost(**{term: 1e6})})  # type: ignore[arg-type]
    local = dataclasses.replace(FREE, hot_cold=costs)
    times = dataclasses.asdict(exchange_times(totals, local))
    expected = item.unique_anywhere / 2 if isinstance(number, str) else number
    assert times == pytest.approx(dict.fromkeys(times, 0.0) | {where: expected})
    # the busiest home rank pools bags, and copies and updates as many as others
    uneven = dataclasses.asdict(exchange_times(totals, local, uneven_bags=1.5))
    is_pooling = phase != "input_dist" and term.startswith(("lookup", "bag"))
    assert uneven[where] == pytest.approx(expected * (1.5 if is_pooling else 1.0))


def test_elements_of_several_packs_are_copied_twice_each_way() -> None:
    totals = HotColdTotals.from_table(work(), 0)
    one, two = (exchange_times(totals, FREE, num_packs=packs) for packs in (1, 2))
    assert one.gather_ms == one.update_ms == 0.0
    assert two.gather_ms == two.update_ms == pytest.approx(2 * totals.cold_elements * 0.7e-6)


def test_row_numbers_have_eight_bytes_where_a_home_rank_has_too_many_rows_for_four() -> None:
    for rows, num_bytes in ((2**31 - 1, 4), (2**31, 8)):
        totals = HotColdTotals(cold=1000.0, rows=2 * rows)
        assert Exchange(totals=totals).ways(2)[0].sent["ids"] == 1000 * num_bytes / 2
        by_host = ByHost(totals=totals, crossing=totals, ranks_per_host=1).ways(2)[1]
        assert by_host.sent["ids"] == 1000 * num_bytes / 2


@pytest.mark.parametrize("num_parts", [1, 4])
def test_a_step_sends_and_computes_everything_once(num_parts: int) -> None:
    rows = Exchange.from_tables([(work(), 100, "rows")], 1)
    bags = Exchange.from_tables([(work(pooling=5), 0, "bags")], 1)
    pricer = StepPricer(WIRE, 2, micro_batch_counts=[num_parts])
    sent = rows.ways(2)[0].sent
    mask = rows.totals.cold / 2  # a byte for each row that another rank serves
    wire_ms = pricer.price([rows], uneven_bags=1.5).wire_ms
    assert wire_ms == pytest.approx((sum(sent.values()) + mask) * 1e-6)
    sent = bags.ways(2)[0].sent
    uneven = {name: 1.0 if name in ("flags", "header") else 1.5 for name in sent}
    wire_ms = pricer.price([bags], uneven_bags=1.5).wire_ms
    assert wire_ms == pytest.approx(sum(sent[name] * uneven[name] for name in sent) * 1e-6)

    dense, local = DenseTimes.from_total(30.0), LocalCosts()
    pricer = StepPricer(WIRE, 2, dense, micro_batch_counts=[num_parts]).with_local(local)
    compute_ms = pricer.price([rows, bags]).compute_ms
    totals = HotColdTotals.sum([rows.totals, bags.totals])
    times = dataclasses.asdict(exchange_times(totals, local, 1, 2, num_parts))
    more_ms = (num_parts - 1) * (2.5 + 2 * 0.09)  # two features
    assert compute_ms == pytest.approx(sum(times.values()) + 30.0 + more_ms)


def test_relays_sort_hold_copy_and_sum_what_they_pass_on() -> None:
    item = TableWork(work().load, 4, ranks_per_host=2)
    by_host, split = ByHost.from_tables([(item, 0, "node_rows")], 1), item.split(0)
    for phase, term, where, number in (
        ("input_dist", "lookup_ns", "ids_ms", 2 * split.cold_used),
        ("forward", "fixed_ms", "call_ms", 0),
        ("forward", "row_ns", "gather_ms", split.cold_used),
        ("forward", "row_element_ns", "gather_ms", DIM * split.cold_used),
        ("backward", "row_ns", "update_ms", split.cold_used),
        ("backward", "row_element_ns", "update_ms", DIM * split.cold_used),
    ):
        costs = SideCosts(**{phase: PhaseCost(**{term: 1e6})})  # type: ignore[arg-type]
        local = LocalCosts(hot_cold=costs)
        own = exchange_times(by_host.totals, local)
        expected = dataclasses.asdict(own)
        expected[where] += number
        found = dataclasses.asdict(by_host.with_own_work(own, local))
        assert found == pytest.approx(expected), (phase, term)
    assert by_host.crossing.dirty_elements == pytest.approx(DIM * split.dirty_on_host / 2)
    relayed, flat = (
        hot_cold_memory_bytes([(item, 0, form)])["buffers"] for form in ("node_rows", "rows")
    )
    vectors = 1.125 * (split.cold_on_host / 2 + split.cold_used)
    assert relayed - flat == pytest.approx(vectors * DIM * 4 + 100 * split.cold_used)


def test_flags_go_by_host_where_any_rows_do() -> None:
    lines = dict.fromkeys(COLLECTIVES, 0.1) | {"inside": 1.0, "across": 2.0}
    collectives = {name: Curve.line(latency_ms, float("inf")) for name, latency_ms in lines.items()}
    curves = dataclasses.replace(WIRE, world_size=4, ranks_per_host=2, collectives=collectives)
    nothing = HotColdTotals()
    direct, by_host = (
        Exchange(totals=nothing),
        ByHost(totals=nothing, crossing=nothing, ranks_per_host=2),
    )
    pricer = StepPricer(curves, 4)
    assert pricer.price([direct]).wire_ms == pytest.approx(0.1 + 0.1)  # flags, header
    assert pricer.price([direct, by_host]).wire_ms == pytest.approx(3.0 + 3.1)


def test_clean_rows_are_hidden_and_dirty_ones_are_not() -> None:
    slow = CommCurves.assumed(2, gbytes_per_s=1e-3, latency_ms=0.0, local=FREE)
    rows = Exchange.from_tables([(work(), 0, "rows")], 1)
    sent, dirty = rows.ways(2)[0].sent, rows.totals.dirty_elements / rows.totals.cold_elements
    dense = DenseTimes.from_total(1e3)
    step = StepPricer(slow, 2, dense, [1]).price([rows])
    exposed_ms = (sent["gradients"] + dirty * sent["rows"]) * 1e-3
    assert step.step_ms == pytest.approx(dense.total_ms + exposed_ms, abs=0.2)  # mask and flags


def test_bags_are_never_fetched_ahead() -> None:
    # nothing of them is clean: all of it is exposed where steps meet, or hidden under parts
    bags = HotColdTotals.sum([HotColdTotals.from_table(work(pooling=2), 0, "bags")] * 20)
    dense = DenseTimes.from_total(500.0)
    curves = network(0.02, local=FREE)
    whole, cut = (StepPricer(curves, 2, dense, [k]).price([Exchange(totals=bags)]) for k in (1, 8))
    assert whole.step_ms > dense.total_ms + 0.9 * whole.wire_ms
    assert cut.step_ms < dense.total_ms + 0.3 * whole.wire_ms


def test_micro_batches_go_depth_first_where_only_bags_travel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def spy(*_: object, forwards_first: bool) -> StepPrice:
        asked.append(forwards_first)
        return StepPrice(step_ms=1.0, wire_ms=0.0, compute_ms=0.0)

    monkeypatch.setattr(step_price, "simulate_step", spy)
    rows, bags = (Exchange.from_tables([(work(), 0, form)], 1) for form in ("rows", "bags"))
    for exchanges in ([bags], [rows], [rows, bags]):
        StepPricer(WIRE, 2, micro_batch_counts=[2]).price(exchanges)
    assert asked == [False, True, True]


def test_dense_work_hides_the_exchange_and_more_parts_hide_more() -> None:
    totals = HotColdTotals.sum([HotColdTotals.from_table(work(0.6), 0)] * 20)
    idle = StepPricer(network(0.005), 2)
    dense = DenseTimes.from_total(2000.0)
    busy = StepPricer(network(0.005), 2, dense)
    added_ms = {
        k: StepPricer(network(0.005), 2, dense, [k]).price([Exchange(totals=totals)]).step_ms
        for k in (1, 4, 8)
    }
    assert added_ms[1] > added_ms[4] > added_ms[8]
    best = busy.price([Exchange(totals=totals)])
    assert best.num_micro_batches > 1
    assert best.step_ms - 2000 < 0.6 * idle.price([Exchange(totals=totals)]).step_ms
    assert best.step_ms >= max(best.wire_ms, best.compute_ms)


def test_stock_tables_beside_the_exchange_are_exposed() -> None:
    works = [work(0.6) for _ in range(20)]
    stock = stock_cost("table_wise", works, network(), 2)
    dense = DenseTimes.from_total(1000.0, parameter_bytes=1e6)
    pricer = StepPricer(network(), 2, dense, micro_batch_counts=[4])
    totals = HotColdTotals.sum(HotColdTotals.from_table(own, 0) for own in works)
    alone, beside = (
        pricer.price([Exchange(totals=totals)]),
        pricer.price([Exchange(totals=totals)], stock),
    )
    waits_ms = stock.forward_wire_ms + stock.backward_wire_ms
    assert beside.step_ms >= alone.step_ms + waits_ms
    assert beside.wire_ms == pytest.approx(alone.wire_ms + stock.wire_ms)
    no_sum = StepPricer(network(), 2, DenseTimes.from_total(1000.0), micro_batch_counts=[4])
    reduce_ms = alone.wire_ms - no_sum.price([Exchange(totals=totals)]).wire_ms
    assert reduce_ms == pytest.approx(network().ms("all_reduce", 1e6))


@pytest.mark.parametrize("count", [1, 4])
def test_stock_ids_beside_the_exchange_are_hidden_but_for_their_work(count: int) -> None:
    totals = HotColdTotals.from_table(work(), 0)
    dense, cores_ns = DenseTimes.from_total(1000.0), (0.0, 2.0)
    for core_ns in cores_ns:
        pricer = StepPricer(network(core_ns=core_ns), 2, dense, micro_batch_counts=[count])
        stock = stock_cost("table_wise", [work(0.6)] * 20, pricer.curves, 2)
        ids_ms, core_ms = stock.ids_wire_ms, core_ns * stock.sent_bytes["ids"] * 1e-6
        without = dataclasses.replace(stock, ids_wire_ms=0.0, sent_bytes={})
        all_ms, without_ms = (
            pricer.price([Exchange(totals=totals)], each).step_ms for each in (stock, without)
        )
        assert all_ms - without_ms == pytest.approx(core_ms, abs=1e-6)
        assert 0 <= core_ms < ids_ms


def test_a_message_takes_a_share_of_the_core() -> None:
    pricer = StepPricer(network(0.1, core_ns=1.0), 2)
    ms, core_share, latency_ms = map(pytest.approx, (10.3, 1 / 10.3, 0.3))
    assert pricer.message("all_reduce", 1e6) == Message(ms, core_share, latency_ms)
    two = pricer._joined({"all_reduce": 1e6, "all_gather": 1e6})
    assert two == Message(pytest.approx(20.6), core_share, pytest.approx(0.6))
    assert pricer.message("all_reduce", 0) is None


@pytest.mark.parametrize(("kind", "world_size"), [("table_wise", 1), ("data_parallel", 2)])
def test_stock_work_counts_where_nothing_is_sent(kind: str, world_size: int) -> None:
    # one rank sends nothing, and the lookup of a data-parallel table has no exchange
    item = TableWork(work().load, world_size)
    stock = stock_cost(kind, [item], network(), world_size)
    assert stock.forward_wire_ms == 0 < stock.forward_ms
    totals = HotColdTotals.from_table(item, 0)
    pricer = StepPricer(network(), world_size, micro_batch_counts=[1])
    alone, beside = (
        pricer.price([Exchange(totals=totals)]),
        pricer.price([Exchange(totals=totals)], stock),
    )
    assert beside.compute_ms == pytest.approx(alone.compute_ms + stock.compute_ms)
    assert beside.step_ms >= 0.999 * (alone.step_ms + stock.compute_ms + stock.wire_ms)


def test_hot_cold_modules_share_an_exchange_and_stock_ones_do_not() -> None:
    forward = SideCosts(forward=PhaseCost(fixed_ms=3.0))
    costs = dataclasses.replace(forward, step_ms=5.0)
    curves = network(local=LocalCosts(hot_cold=costs, stock=costs))
    pricer, totals = StepPricer(curves, 2), HotColdTotals.from_table(work(), 0)
    one, two = (
        pricer.price([Exchange(totals=totals)], num_modules=count).compute_ms for count in (1, 2)
    )
    assert two == pytest.approx(one + 0.6 * 3.0)
    one_exchange, two_exchanges = (
        pricer.sparse_dist(stock_cost("table_wise", works, curves, 2))
        for works in ([work()] * 2, in_modules(work().load, 2))
    )
    assert two_exchanges.compute_ms == pytest.approx(one_exchange.compute_ms + 3.0 + 1.5)
    assert one_exchange.compute_ms == pytest.approx(3.0 + 5.0)
    free = StepPricer(network(local=LocalCosts(hot_cold=forward, stock=forward)), 2)
    for first, second in (
        (pricer.price([Exchange(totals=totals)]), free.price([Exchange(totals=totals)])),
        (one_exchange, free.sparse_dist(stock_cost("table_wise", [work()] * 2, curves, 2))),
    ):
        assert first.step_ms == pytest.approx(second.step_ms + 5.0)
    # a splits, a lengths, a values, a rows and a gradients message more
    assert two_exchanges.wire_ms == pytest.approx(one_exchange.wire_ms + 5 * 0.3)


@pytest.mark.parametrize(("call_ms", "step_ms"), [(3.0, 8.0), (8.0, 3.0), (3.0, 0.0)])
def test_each_further_exchange_of_stock_tables_has_waits(call_ms: float, step_ms: float) -> None:
    local = LocalCosts(
        stock=SideCosts(forward=PhaseCost(fixed_ms=call_ms), step_ms=step_ms),
        hot_cold=SideCosts(forward=PhaseCost(fixed_ms=1.0)),
    )
    pricer = StepPricer(network(local=local), 2)

    def cost(kind: str, num_modules: int = 1) -> StockCost:
        return stock_cost(kind, in_modules(work().load, num_modules), pricer.curves, 2)

    once_ms, more_ms = call_ms + step_ms, call_ms + 0.5 * min(call_ms, step_ms)
    for stock, expected_ms in (
        (cost("table_wise"), once_ms),
        (cost("table_wise", 3), once_ms + 2 * more_ms),
        (cost("table_wise").plus(cost("column_wise")), once_ms + more_ms),
        (cost("table_wise").plus(cost("data_parallel")), once_ms + call_ms),
        (cost("data_parallel"), once_ms),
    ):
        assert pricer.sparse_dist(stock).compute_ms == pytest.approx(expected_ms)
    ours = [Exchange(totals=HotColdTotals.from_table(work(), 0))]
    alone_ms = pricer.price(ours).compute_ms
    for count in (1, 2):
        beside = pricer.price(ours, cost("table_wise", count))
        assert beside.compute_ms == pytest.approx(alone_ms + count * more_ms)
    one_rank = stock_cost("table_wise", in_modules(work().load, 2), pricer.curves, 1)
    found = StepPricer(pricer.curves, 1).sparse_dist(one_rank)
    assert found.compute_ms == pytest.approx(once_ms + call_ms)


def test_each_further_pack_and_each_wave_has_its_price() -> None:
    each = PhaseCost(pack_ms=2.0)
    costs = LocalCosts(
        hot_cold=SideCosts(input_dist=each, forward=each, backward=each), stock=FREE.stock
    )
    pricer = StepPricer(network(local=costs), 2, micro_batch_counts=[1])
    totals = HotColdTotals.from_table(work(), 0, "bags")
    one, four = (pricer.price([Exchange(totals=totals, num_packs=packs)]) for packs in (1, 4))
    assert four.compute_ms == pytest.approx(one.compute_ms + 3 * 3 * 2.0)
    # flags, header, ids, rows, gradients
    sent = Exchange(totals=totals, num_packs=4).ways(2)[0].sent
    assert four.wire_ms == pytest.approx(5 * 0.3 + sum(sent.values()) * 1e-5)
    in_waves = pricer.price([Exchange(totals=totals, num_packs=4)], num_bag_waves=4)
    # three rows and three gradients messages more, each with its latency
    assert in_waves.wire_ms == pytest.approx(four.wire_ms + 6 * 0.3)
    # which the core works for, too, with gloo
    assert in_waves.compute_ms == pytest.approx(four.compute_ms + 6 * 0.3)


@pytest.mark.parametrize(
    ("forms", "num_bag_waves", "world_size", "latencies"),
    [
        (("bags",), 1, 2, 0),
        (("bags",), 4, 2, 6),  # bags and gradients of three further waves
        (("bags",), 4, 1, 0),
        (("bags",), 2, 3, 4),  # to two peers
        (("rows",), 1, 2, 0),
        (("rows", "bags"), 1, 2, 2),  # rows are the first wave
        (("rows", "bags"), 3, 2, 6),
    ],
)
def test_exchanges_of_further_waves_work_on_the_core_of_a_cpu(
    forms: tuple[Form, ...], num_bag_waves: int, world_size: int, latencies: int
) -> None:
    curves = network()
    lines = dict.fromkeys(COLLECTIVES, Curve.line(9.0, 0.1))  # of others than rows and bags
    lines["row_exchange"] = curves.collectives["row_exchange"]
    exchange = Exchange.from_tables([(work(), 0, form) for form in forms], 4)
    on_core, on_gpu = (
        StepPricer(
            dataclasses.replace(curves, collectives=lines, device=device),
            world_size,
            micro_batch_counts=[1],
        ).price([exchange], num_bag_waves=num_bag_waves)
        for device in ("cpu", "cuda")
    )
    assert on_core.wire_ms == pytest.approx(on_gpu.wire_ms)
    assert on_core.compute_ms - on_gpu.compute_ms == pytest.approx(latencies * 0.3)
    assert on_core.step_ms - on_gpu.step_ms == pytest.approx(latencies * 0.3)


@pytest.mark.parametrize(
    ("forms", "count", "times"),
    [
        (("bags",), 1, 1),
        (("bags",), 2, 2),  # both micro-batches go by wave
        (("bags",), 8, 1),
        (("rows", "bags"), 2, 1),
    ],
)
def test_further_waves_have_as_many_exchanges_as_the_schedule(
    forms: tuple[Form, ...], count: int, times: int
) -> None:
    exchange = Exchange.from_tables([(work(), 0, form) for form in forms], 4)
    num_further = 2 + ("rows" in forms)
    on_core, on_gpu = (
        StepPricer(
            dataclasses.replace(network(), device=device), 2, micro_batch_counts=[count]
        ).price([exchange], num_bag_waves=3)
        for device in ("cpu", "cuda")
    )
    assert on_core.compute_ms - on_gpu.compute_ms == pytest.approx(times * num_further * 2 * 0.3)


def test_a_disturbed_small_message_makes_waves_no_dearer() -> None:
    sizes = [2**power for power in range(12, 24, 2)]
    times_ms = [0.3 + size * 1e-5 for size in sizes]
    prices = []
    for first_ms in (times_ms[0], 4 * times_ms[0]):
        curves = network()
        lines = {**curves.collectives, "row_exchange": Curve.fit(sizes, [first_ms, *times_ms[1:]])}
        curves = dataclasses.replace(curves, collectives=lines)
        pricer = StepPricer(curves, 2, micro_batch_counts=[1])
        one, four = (
            pricer.price([Exchange.from_tables([(work(), 0, "bags")], 4)], num_bag_waves=waves)
            for waves in (1, 4)
        )
        prices.append(four.compute_ms - one.compute_ms)
    assert prices[1] < 1.5 * prices[0]


def test_stock_alone_hides_its_ids_only_and_in_backward() -> None:
    works = [work(0.6) for _ in range(20)]
    curves = network(core_ns=1.0)
    stock = stock_cost("table_wise", works, curves, 2)
    dense = DenseTimes.from_total(50.0, parameter_bytes=1e6)
    price = StepPricer(curves, 2, dense).price([], stock)
    reduce_ms = curves.ms("all_reduce", 1e6)
    core_ms = curves.core_ns_per_byte * stock.sent_bytes["ids"] * 1e-6
    assert 0 < core_ms < stock.ids_wire_ms
    assert price.step_ms == pytest.approx(stock.exposed_ms + 50 + reduce_ms + core_ms)
    assert price.num_micro_batches == 1
    busy_wire = dataclasses.replace(stock, ids_wire_ms=1e4)
    longer = StepPricer(curves, 2, dense).price([], busy_wire)
    forward_ms = stock.ids_ms + stock.forward_ms + dense.forward_ms
    assert longer.step_ms == pytest.approx(longer.wire_ms + forward_ms)


def test_one_rank_has_no_wire() -> None:
    alone = StepPricer(network(), 1).price(
        [Exchange.from_tables([(TableWork(work().load, 1), 0, "rows")], 1)]
    )
    assert alone.wire_ms == 0
    assert alone.step_ms == pytest.approx(alone.compute_ms)
