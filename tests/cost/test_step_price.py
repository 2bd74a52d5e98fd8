"""Expected rows and bytes of a step, against counting them on generated batches; what a step is
priced at: chunks of first use, dirty rows, and what hides what.

The sharded module's own traffic is compared with the model in ``benchmarks.fields``; here the
arithmetic is checked where every number can be known."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from torchrec_picasso.app.runs.exchange_step import make_batch, table_collection
from torchrec_picasso.cost import CommCurves
from torchrec_picasso.cost.curves import Curve
from torchrec_picasso.cost.forms import hot_cold_memory_bytes
from torchrec_picasso.cost.hot_cold import Exchange, HotColdTotals, exchange_times
from torchrec_picasso.cost.local import DenseTimes, LocalCosts, PhaseCost, SideCosts
from torchrec_picasso.cost.step_price import StepPricer, _shares, chunk_shares
from torchrec_picasso.cost.stock import (
    STOCK_TYPES,
    StockTotals,
    cost_of_totals,
    deal_out,
    marginal_stock_costs,
    max_over_mean,
    rank_loads,
    stock_cost,
)
from torchrec_picasso.cost.table_work import HOT_ROW_BYTES, TableLoad, TableWork
from torchrec_picasso.frequency.spectrum import CountSpectrum
from torchrec_picasso.schedule.setting_choice import NUM_MICRO_BATCHES

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
FREE = LocalCosts(hot_cold=SideCosts(), stock=SideCosts())
WIRE = CommCurves.assumed(2, gbytes_per_s=1.0, latency_ms=0.0, local=FREE)


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


def test_a_map_of_more_rows_takes_longer_for_each_row_of_sequences() -> None:
    backward = SideCosts(backward=PhaseCost(hash_ns=100.0))
    slow = dataclasses.replace(WIRE, local=LocalCosts(stock=backward))
    sequences = load(spectrum=None, is_sequence=True, num_embeddings=10**6, lookups=9000.0)
    for world_size in (2, 4):
        works = [TableWork(sequences, world_size)] * world_size  # a table on each rank
        rows = works[0].unique_anywhere
        on_rank = {"row_wise": rows / world_size, "data_parallel": 0.0}  # a dense update has none
        for kind in STOCK_TYPES:
            ms = stock_cost(kind, works, slow, world_size).backward_ms
            updated = rows * world_size if kind == "column_wise" else rows
            expected_ns = 100 * updated * on_rank.get(kind, rows) ** 0.5
            assert ms == pytest.approx(expected_ns * 1e-6), kind
        # a step waits for the rank that has the only table
        alone_ms = stock_cost("table_wise", works[:1], slow, world_size).backward_ms
        assert alone_ms == pytest.approx(100 * rows**1.5 * 1e-6)
        bags = TableWork(dataclasses.replace(sequences, is_sequence=False), world_size)
        assert stock_cost("table_wise", [bags], slow, world_size).backward_ms == 0


def test_each_shard_of_columns_updates_every_row() -> None:
    work = TableWork(load(), world_size=2)
    whole, columns = (StockTotals.from_table(kind, work) for kind in ("table_wise", "column_wise"))
    assert columns.rows == pytest.approx(2 * whole.rows)
    assert columns.row_elements == pytest.approx(whole.row_elements)


def test_the_busiest_rank_of_few_tables() -> None:
    tables = [load(str(i)) for i in range(3)]
    assert max_over_mean("table_wise", tables, 2) == pytest.approx(2 / 1.5)
    assert max_over_mean("table_wise", tables, 6) == pytest.approx(2.0)
    assert max_over_mean("column_wise", tables, 2) == pytest.approx(1.0)
    assert max_over_mean("row_wise", tables, 6) == 1.0
    blocks = load("first rows", dim=48, row_wise_W=(45.0, 5.0))
    assert max_over_mean("row_wise", [*tables, blocks], 2) == pytest.approx((75 + 135) / 150)
    # 16 columns on 3 ranks: the width divides them, and is a multiple of 4
    assert list(map(sorted, deal_out("column_wise", tables[:1], 3))) == [[0, 0, 1, 2]]


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


def test_memory_of_stock_tables_is_what_was_measured() -> None:
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


def test_memory_counts_homes_replicas_and_state() -> None:
    work = TableWork(load(optimizer_share=0.5), world_size=2)
    memory = hot_cold_memory_bytes([(work, 3, "rows")])
    assert memory["home"] == pytest.approx(50 * (16 * 4 * 1.5 + 1 + 4))  # a mark, a count
    assert memory["replica"] == pytest.approx(3 * (16 * 4 * 1.5 + HOT_ROW_BYTES))
    assert memory["optimizer"] == pytest.approx(53 * 16 * 4 * 0.5)
    bags = hot_cold_memory_bytes([(work, 0, "bags")])
    assert bags["home"] == pytest.approx(50 * 16 * 4 * 1.5)
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
    generator = torch.Generator().manual_seed(0)
    chance = zipf_counts(1.0)
    trials, cold, dirty, touched = 60, 0.0, 0.0, 0.0
    for _ in range(trials):
        drawn = torch.multinomial(chance, 3 * BATCH, replacement=True, generator=generator)
        before, rows = drawn[: 2 * BATCH].unique(), drawn[2 * BATCH :].unique()
        rows = rows[rows >= num_hot]
        cold += rows.numel() / trials
        dirty += float(torch.isin(rows, before).sum()) / trials
        touched += float((before < num_hot).sum()) / trials
    split = work().split(num_hot)
    assert split.cold_used == pytest.approx(cold, rel=0.04)
    assert split.dirty == pytest.approx(dirty, rel=0.04)
    assert split.hot_touched == pytest.approx(touched, rel=0.04)
    assert split.coverage == pytest.approx(float(chance[:num_hot].sum() / chance.sum()))


def test_hot_rows_are_neither_cold_nor_dirty() -> None:
    few, many = work().split(10), work().split(200)
    assert many.dirty < few.dirty < work().split(0).dirty
    assert many.cold_used < few.cold_used
    assert work().split(ROWS).cold_used == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("num_parts", NUM_MICRO_BATCHES)
def test_chunks_add_up_and_the_first_is_small_in_samples_only(num_parts: int) -> None:
    chunks = chunk_shares(num_parts)
    assert sum(chunks) == pytest.approx(1)
    assert min(chunks) > 0
    if num_parts > 1:  # rows repeat, so the first samples bring more new rows than others
        assert chunks[0] > _shares(num_parts)[0]
    assert sum(_shares(num_parts)) == pytest.approx(1)


def test_homes_update_distinct_rows_once() -> None:
    item = work()
    totals = HotColdTotals.from_table(item, 0)
    assert totals.updated == pytest.approx(item.unique_anywhere / 2)
    assert totals.updated < totals.cold  # some rows are asked for by both ranks
    local = dataclasses.replace(FREE, hot_cold=SideCosts())
    per_row = dataclasses.replace(local.hot_cold.backward, update_ns=1000)
    local = dataclasses.replace(local, hot_cold=SideCosts(backward=per_row))
    assert exchange_times(totals, local).update_ms == pytest.approx(totals.updated * 1e-3)
    # a hot row is updated on every rank
    hot = exchange_times(HotColdTotals.from_table(item, ROWS), local)
    assert hot.update_ms == pytest.approx(item.split(ROWS).hot_touched * 1e-3)


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
        ("input_dist", "bag_lookup_ns", "ids_ms", 3 * BATCH),
        ("forward", "lookup_ns", "bag_pool_ms", 3 * BATCH),
        ("forward", "row_ns", "gather_ms", BATCH),
        ("forward", "update_ns", "gather_ms", "home rows"),
        ("backward", "lookup_ns", "update_ms", 3 * BATCH),
        ("backward", "bag_lookup_ns", "update_ms", 3 * BATCH),
        ("backward", "bag_element_ns", "update_ms", DIM * BATCH),
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
    is_pooling = phase != "input_dist" and term in ("lookup_ns", "bag_lookup_ns", "bag_element_ns")
    assert uneven[where] == pytest.approx(expected * (1.5 if is_pooling else 1.0))


def test_elements_of_several_packs_are_copied_twice_each_way() -> None:
    totals = HotColdTotals.from_table(work(), 0)
    one, two = (exchange_times(totals, FREE, num_packs=packs) for packs in (1, 2))
    assert one.gather_ms == one.update_ms == 0.0
    assert two.gather_ms == two.update_ms == pytest.approx(2 * totals.cold_elements * 0.7e-6)


def test_home_rows_are_read_once_in_forward() -> None:
    item = work()
    local = dataclasses.replace(FREE, hot_cold=SideCosts(forward=PhaseCost(update_ns=1e6)))
    for num_hot in (0, 100):  # replicas are read where they are
        times = exchange_times(HotColdTotals.from_table(item, num_hot), local)
        assert times.gather_ms == pytest.approx(item.split(num_hot).cold_touched / 2)


def test_bags_are_never_fetched_ahead() -> None:
    # nothing of them is clean: all of it is exposed where steps meet, or hidden under parts
    bags = HotColdTotals.sum([HotColdTotals.from_table(work(pooling=2), 0, "bags")] * 20)
    dense = DenseTimes.from_total(500.0)
    curves = network(0.02, local=FREE)
    whole, cut = (StepPricer(curves, 2, dense, [k]).price([Exchange(totals=bags)]) for k in (1, 8))
    assert whole.step_ms > dense.total_ms + 0.9 * whole.wire_ms
    assert cut.step_ms < dense.total_ms + 0.3 * whole.wire_ms


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
    pricer = StepPricer(network(), 2, DenseTimes.from_total(1000.0))
    totals = HotColdTotals.sum(HotColdTotals.from_table(own, 0) for own in works)
    alone, beside = (
        pricer.price([Exchange(totals=totals)]),
        pricer.price([Exchange(totals=totals)], stock),
    )
    waits_ms = stock.forward_wire_ms + stock.backward_wire_ms
    assert beside.step_ms >= alone.step_ms + waits_ms


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
    costs = SideCosts(forward=PhaseCost(fixed_ms=3.0), step_ms=5.0)
    curves = network(local=LocalCosts(hot_cold=costs, stock=costs))
    pricer, totals = StepPricer(curves, 2), HotColdTotals.from_table(work(), 0)
    one, two = (
        pricer.price([Exchange(totals=totals)], num_modules=count).compute_ms for count in (1, 2)
    )
    assert two == pytest.approx(one + 0.6 * 3.0)
    one_exchange, two_exchanges = (
        pricer.sparse_dist(stock_cost("table_wise", [work()] * 2, curves, 2, count))
        for count in (1, 2)
    )
    assert two_exchanges.compute_ms == pytest.approx(one_exchange.compute_ms + 3.0)
    assert one_exchange.compute_ms == pytest.approx(3.0 + 5.0)
    # a splits, a lengths, a values, a rows and a gradients message more
    assert two_exchanges.wire_ms == pytest.approx(one_exchange.wire_ms + 5 * 0.3)


def test_each_further_pack_and_each_wave_has_its_price() -> None:
    each = PhaseCost(pack_ms=2.0)
    costs = LocalCosts(
        hot_cold=SideCosts(input_dist=each, forward=each, backward=each), stock=FREE.stock
    )
    pricer = StepPricer(network(local=costs), 2, micro_batch_counts=[1])
    totals = HotColdTotals.from_table(work(), 0, "bags")
    one, four = (pricer.price([Exchange(totals=totals, num_packs=packs)]) for packs in (1, 4))
    assert four.compute_ms == pytest.approx(one.compute_ms + 3 * 3 * 2.0)
    in_waves = pricer.price([Exchange(totals=totals, num_packs=4)], num_bag_waves=4)
    # three rows and three gradients messages more, each with its latency
    assert in_waves.wire_ms == pytest.approx(four.wire_ms + 6 * 0.3)


@pytest.mark.parametrize("pooling", [1, 5])
def test_lookups_are_read_and_bags_are_written_as_often_as_in_a_real_module(pooling: int) -> None:
    module = table_collection([50, 60], [8, 16])
    features = make_batch(torch.randint(50, (2, BATCH, pooling)))
    pooled = module.to_empty(device="cpu")(features).values()
    loads = [
        TableLoad(name=c.name, num_embeddings=c.num_embeddings, dim=c.embedding_dim, bags=BATCH,
                  lookups=float(pooling * BATCH)) for c in module.embedding_bag_configs()
    ]  # fmt: skip
    works = [TableWork(load, 2) for load in loads]
    per_bag, per_lookup = PhaseCost(bag_element_ns=1.0), PhaseCost(lookup_ns=1.0)
    for cost, count in ((per_bag, pooled.numel()), (per_lookup, features.values().numel())):
        side = SideCosts(forward=cost)
        local = LocalCosts(hot_cold=side, stock=side)
        totals = [
            HotColdTotals.sum(HotColdTotals.from_table(item, 0, form) for item in works)
            for form in ("rows", "bags")
        ]
        rows, bags = (exchange_times(total, local) for total in totals)
        stock = stock_cost("data_parallel", works, network(local=local), 2)
        assert stock.forward_ms == pytest.approx(count * 1e-6)
        assert rows.pool_ms == bags.bag_pool_ms == pytest.approx(count * 1e-6)


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
