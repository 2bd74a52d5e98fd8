"""The choice against a brute-force search over the same predictions, and the cases it must know."""

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrec_picasso.cost import CommCurves
from torchrec_picasso.cost.curves import Curve
from torchrec_picasso.cost.forms import EXCHANGES
from torchrec_picasso.cost.hot_cold import Exchange, Way
from torchrec_picasso.cost.local import DenseTimes, LocalCosts
from torchrec_picasso.cost.schedule_time import StepPrice
from torchrec_picasso.cost.step_price import StepPricer
from torchrec_picasso.cost.stock import StockCost
from torchrec_picasso.cost.table_work import TableLoad, TableWork
from torchrec_picasso.frequency.spectrum import CountSpectrum
from torchrec_picasso.placement import FORMS, Form, FormTraits
from torchrec_picasso.planner import choice as choice_module
from torchrec_picasso.planner.choice import (
    PricedPlan,
    TableInfo,
    _fastest,
    _plans,
    choose,
    price_plan,
)

ROWS = 20_000
BATCH = 1024


def curves(world_size: int = 2, *, reduce_gbytes_per_s: float = 1.0, **others: float) -> CommCurves:
    """A network whose all-reduce may be faster than its all-to-all."""
    usual = {"gbytes_per_s": 0.1, "latency_ms": 0.3, **others}
    assumed = CommCurves.assumed(world_size, **usual)  # type: ignore[arg-type]
    fast = Curve.line(usual["latency_ms"], reduce_gbytes_per_s)
    return CommCurves(
        world_size=world_size,
        backend="test",
        device="cpu",
        collectives={**assumed.collectives, "all_reduce": fast},
        local=LocalCosts(measured=True),
    )


def work(
    name: str, exponent: float | None, world_size: int = 2, dim: int = 64, rows: int = ROWS
) -> TableWork:
    """A Zipf table, or a uniform one."""
    spectrum = None
    if exponent is not None:
        counts = (1e5 * torch.arange(1, rows + 1, dtype=torch.float64) ** -exponent).ceil()
        spectrum = CountSpectrum.from_counts(counts, rows)
    load = TableLoad(
        name=name,
        num_embeddings=rows,
        dim=dim,
        lookups=float(BATCH),
        bags=float(BATCH),
        spectrum=spectrum,
    )
    return TableWork(load, world_size)


def ask(works: list[TableWork], *stock: str) -> list[TableInfo]:
    types = stock or ("table_wise", "row_wise")
    return [TableInfo(load=w.load, stock_types=types) for w in works]


def hot_counts(
    works: list[TableWork], prices: StepPricer, budget_bytes: float = float("inf")
) -> list[int]:
    """Hot rows of tables that have to be hot/cold."""
    tables = [TableInfo(load=w.load, stock_types=()) for w in works]
    return list(choose(tables, prices, budget_bytes).num_hot)


def pricer(network: CommCurves, dense_ms: float = 0.0, world_size: int = 2) -> StepPricer:
    return StepPricer(network, world_size, DenseTimes.from_total(dense_ms))


@settings(max_examples=12, deadline=None)
@given(
    exponents=st.lists(st.floats(0.3, 1.4), min_size=1, max_size=2),
    speed=st.floats(0.05, 0.5),
    dense_ms=st.sampled_from([0.0, 5.0, 50.0]),
    world_size=st.sampled_from([2, 3, 8]),
)
def test_hot_counts_are_near_the_best_of_all_sizes(
    exponents: list[float], speed: float, dense_ms: float, world_size: int
) -> None:
    works = [work(str(i), exponent, world_size) for i, exponent in enumerate(exponents)]
    prices = pricer(curves(world_size, reduce_gbytes_per_s=speed), dense_ms, world_size)

    def ms(counts: list[int]) -> float:
        forms = dict.fromkeys(range(len(works)), "rows")
        plan = price_plan(works, forms, dict(enumerate(counts)), {}, prices)  # type: ignore[arg-type]
        return plan.step.step_ms

    sizes = [0, 10, 50, 200, 1000, 3000, 8000, 20_000]
    best = min(ms(list(counts)) for counts in itertools.product(sizes, repeat=len(works)))
    assert ms(hot_counts(works, prices)) <= 1.1 * best


def test_what_is_hidden_needs_no_replicas_and_what_is_exposed_does() -> None:
    works = [work(str(i), 1.2) for i in range(8)]
    # the wire is slow for rows and fast for sums, and there is nothing to hide rows under
    network = curves(gbytes_per_s=0.003, reduce_gbytes_per_s=0.006, latency_ms=0.01)
    exposed = hot_counts(works, pricer(network))
    assert sum(exposed) > 100
    # work enough to hide all of it: now every rank's update of a replica is in the way
    assert sum(hot_counts(works, pricer(network, dense_ms=5000.0))) == 0


def _step_ms(works: list[TableWork], num_hot: int, prices: StepPricer) -> float:
    """The step of row-exchanged tables, each with so many hot rows."""
    each = range(len(works))
    forms: dict[int, Form] = dict.fromkeys(each, "rows")
    return price_plan(works, forms, dict.fromkeys(each, num_hot), {}, prices).step.step_ms


@pytest.mark.parametrize(("reduce_gbytes_per_s", "gain_enough"), [(0.005, False), (0.006, True)])
def test_any_hot_rows_must_gain_10_percent(reduce_gbytes_per_s: float, gain_enough: bool) -> None:
    works = [work(str(i), 1.2) for i in range(8)]
    network = curves(gbytes_per_s=0.003, reduce_gbytes_per_s=reduce_gbytes_per_s, latency_ms=0.01)
    prices = pricer(network)
    share = _step_ms(works, 554, prices) / _step_ms(works, 0, prices)
    assert share < 0.95
    assert (share < 0.9) == gain_enough
    assert (sum(hot_counts(works, prices)) > 0) == gain_enough


def test_more_hot_rows_must_gain_half_a_percent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice_module, "_ANY_HOT_MARGIN", 0.0)
    works = [work(str(i), 1.2) for i in range(8)]
    prices = pricer(curves(gbytes_per_s=0.003, reduce_gbytes_per_s=0.0035, latency_ms=0.01))
    assert hot_counts(works, prices) == [29] * 8
    assert 0.995 < _step_ms(works, 42, prices) / _step_ms(works, 29, prices) < 1


def test_a_faster_all_reduce_wants_the_frequent_rows() -> None:
    works = [work("skewed", 1.2), work("flat", 0.2)]
    network = curves(gbytes_per_s=0.005, reduce_gbytes_per_s=0.05, latency_ms=0.01)
    skewed, flat = hot_counts(works, pricer(network))
    assert skewed > 50
    assert flat < skewed / 2


def test_replicas_stay_within_the_budget() -> None:
    works = [work("a", 1.1), work("b", 1.1, dim=16)]
    prices = pricer(curves(gbytes_per_s=0.003, latency_ms=0.01))
    free = hot_counts(works, prices)
    replica_bytes = [w.load.replica_bytes for w in works]
    needed = sum(n * b for n, b in zip(free, replica_bytes))
    assert hot_counts(works, prices, needed) == free
    tight = hot_counts(works, prices, needed / 3)
    used = sum(n * b for n, b in zip(tight, replica_bytes))
    assert 0.95 * needed / 3 < used <= needed / 3
    assert hot_counts(works, prices, 0.0) == [0, 0]


def test_uniform_ids_stay_stock_where_nothing_is_saved() -> None:
    # 1,024 lookups of 20,000 equal rows are nearly all distinct, and a fast network costs little
    tables = ask([work(str(i), None) for i in range(4)])
    choice = choose(tables, pricer(curves(gbytes_per_s=100.0, latency_ms=0.01)))
    assert choice.forms == (None,) * 4
    assert choice.num_hot == (0,) * 4
    assert (choice.sent_bytes, choice.step) == (choice.stock.sent_bytes, choice.stock.step)


def test_work_to_hide_under_lets_even_distinct_rows_travel() -> None:
    # what the exchange computes more than stock is less than what stock leaves exposed
    tables = ask([work(str(i), None) for i in range(8)])
    network = curves(gbytes_per_s=0.05, latency_ms=0.01, reduce_gbytes_per_s=0.05)
    busy = choose(tables, pricer(network, dense_ms=200.0))
    assert all(busy.forms)
    assert busy.step.num_micro_batches > 1
    assert busy.step.step_ms < 0.9 * busy.stock.step.step_ms


@pytest.mark.parametrize(("gbytes_per_s", "taken"), [(5.0, False), (0.02, True)])
def test_an_assumed_core_decides_nothing_alone(gbytes_per_s: float, taken: bool) -> None:
    # on a fast network the packed exchange saves updates of narrow rows, which are slow on one core
    works = [pooled(str(i), 5, 0.8, dim=8) for i in range(40)]
    measured = curves(gbytes_per_s=gbytes_per_s, reduce_gbytes_per_s=gbytes_per_s)
    assumed = dataclasses.replace(measured, local=LocalCosts())
    assert any(choose(may_take_bags(works), pricer(measured)).forms)
    assert any(choose(may_take_bags(works), pricer(assumed)).forms) == taken


@pytest.mark.parametrize(
    ("tables", "gbytes_per_s", "num_types"),
    [
        (((64, 1), (4, 50), (4, 5)), 0.001, 2),
        (((4, 1), (256, 50), (4, 50)), 0.01, 1),
        (((16, 1), (8, 1), (8, 1), (4, 1)), 1.0, 1),
    ],
    ids=["7 % gained", "2 % gained", "nothing gained"],
)
def test_stock_tables_share_a_type_unless_several_pay(
    tables: tuple[tuple[int, int], ...], gbytes_per_s: float, num_types: int
) -> None:
    """The cheapest type of each table alone may cost a second exchange for all."""
    works = [pooled(str(i), lookups, None, dim) for i, (dim, lookups) in enumerate(tables)]
    by = pricer(curves(gbytes_per_s=gbytes_per_s, latency_ms=0.01))
    every_type = itertools.product(("table_wise", "row_wise"), repeat=len(works))
    prices = {
        types: price_plan(works, {}, {}, dict(enumerate(types)), by).step.step_ms
        for types in every_type
    }
    stock = choose(ask(works), by).stock
    assert stock is not None
    assert len(set(stock.stock_types)) == num_types
    assert stock.step.step_ms <= min(prices.values()) / 0.94
    one_type_ms = min(ms for types, ms in prices.items() if len(set(types)) == 1)
    assert (stock.step.step_ms < 0.95 * one_type_ms) == (num_types > 1)


@pytest.mark.parametrize("free", ["table_wise", "row_wise"])
def test_a_constrained_table_keeps_its_type(free: str) -> None:
    tables = ask([work("free", None), work("bound", None)])
    for place, kind in enumerate((free, "row_wise")):
        tables[place] = dataclasses.replace(tables[place], stock_types=(kind,))
    stock = choose(tables, pricer(curves())).stock
    assert stock is not None
    assert stock.stock_types == (free, "row_wise")


def pooled(name: str, pooling: int, exponent: float | None, dim: int = 64) -> TableWork:
    """A table with several lookups to a bag."""
    load = dataclasses.replace(work(name, exponent, dim=dim).load, lookups=float(pooling * BATCH))
    return TableWork(load, 2)


MIXED = [pooled("distinct", 6, None), pooled("repeated", 2, 1.3), pooled("more", 8, 0.2)]


def may_take_bags(works: list[TableWork], *able: bool) -> list[TableInfo]:
    tables = zip(ask(works), able or (True,) * len(works))
    no_form: list[dict[Form, str]] = [{"bags": "no", "node_rows": "no"}, {"node_rows": "no"}]
    return [dataclasses.replace(table, no_form=no_form[may]) for table, may in tables]


def test_bags_travel_where_they_are_cheaper() -> None:
    prices = pricer(curves(gbytes_per_s=0.02, reduce_gbytes_per_s=0.02))
    tables = may_take_bags(MIXED)
    as_rows = choose(may_take_bags(MIXED, False, False, False), prices)
    assert "bags" not in as_rows.forms
    choice = choose(tables, prices)
    assert choice.forms == ("bags", "rows", "bags")
    assert choice.num_hot[0] == choice.num_hot[2] == 0
    assert choice.step.step_ms < as_rows.step.step_ms
    refused = choose(may_take_bags(MIXED, False, True, True), prices)
    assert refused.forms[0] != "bags"


def test_forms_are_near_the_best_of_all() -> None:
    works = [*MIXED, pooled("skewed", 4, 0.9), pooled("one", 1, 0.6)]
    for gbytes_per_s, dense_ms in ((0.02, 0.0), (0.02, 100.0), (0.2, 20.0), (5.0, 0.0)):
        network = curves(gbytes_per_s=gbytes_per_s, reduce_gbytes_per_s=gbytes_per_s)
        prices = pricer(network, dense_ms)
        choice = choose(may_take_bags(works), prices)
        assert choice.stock is not None
        every = itertools.product((None, "rows", "bags"), repeat=len(works))
        times = {
            forms: price_plan(
                works,
                {i: form for i, form in enumerate(forms) if form},  # type: ignore[misc]
                {},
                dict(enumerate(choice.stock.stock_types)),
                prices,
            ).step.step_ms
            for forms in every
        }
        # few tables share two homes unevenly; plans with some stock tables are not weighed
        one_form_ms = min(ms for forms, ms in times.items() if len({*forms}) == 1)
        assert choice.step.step_ms <= 1.1 * one_form_ms
        # rows beside bags must win by 18 %
        assert choice.step.step_ms <= 1.2 / (1 - 0.18) * min(times.values())


@pytest.mark.parametrize("seed", range(3))
def test_the_order_of_tables_changes_nothing_but_the_order(seed: int) -> None:
    works = [work(str(i), 0.8 + 0.1 * i, dim=16 * (1 + i % 2)) for i in range(6)]
    order = torch.randperm(6, generator=torch.Generator().manual_seed(seed)).tolist()
    first = choose(ask(works), pricer(curves()))
    second = choose(ask([works[i] for i in order]), pricer(curves()))
    assert [first.num_hot[i] for i in order] == list(second.num_hot)
    assert [first.forms[i] for i in order] == list(second.forms)


def test_rows_beside_bags_must_win_clearly() -> None:
    tables, taken = may_take_bags(MIXED), set()
    for gbytes_per_s in (0.02, 0.05, 0.2, 1.0, 5.0):
        network = curves(gbytes_per_s=gbytes_per_s, reduce_gbytes_per_s=gbytes_per_s)
        choice = choose(tables, pricer(network))
        ms, has_both = choice.priced_ms, len({*choice.forms} - {None}) == 2
        assert set(ms) == {"stock", "rows", "bags", "mixed"}
        assert has_both == (ms["mixed"] <= 0.82 * min(ms["stock"], ms["rows"], ms["bags"]))
        taken.add(has_both)
    assert taken == {True, False}


def test_bags_are_priced_in_their_waves_and_for_the_busiest_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: dict[str, float] = {}
    price = StepPricer.price

    def asking(own: StepPricer, *exchanges: object, **arguments: float) -> StepPrice:
        asked.update(arguments)
        return price(own, *exchanges, **arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(StepPricer, "price", asking)
    works = [pooled(str(dim), 4, None, dim) for dim in (128, 16, 64)]
    forms: dict[int, Form] = {0: "bags", 1: "bags", 2: "rows"}
    price_plan(works, forms, {}, {}, pricer(curves()))
    # one home has 128 columns, the other 16, each a pack and so a wave
    assert asked == {"num_modules": 1, "uneven_bags": pytest.approx(128 / 72), "num_bag_waves": 2}

    # two modules have a pack each, even of one dim
    alike = [
        TableWork(dataclasses.replace(pooled(name, 4, None).load, module=name), 2)
        for name in ("one", "other")
    ]
    price_plan(alike, {0: "bags", 1: "bags"}, {}, {}, pricer(curves()))
    assert (asked["num_modules"], asked["num_bag_waves"]) == (2, 2)


def test_stock_tables_exchange_by_module_and_sharding_type(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[float] = []
    price = StepPricer.sparse_dist

    def noting(own: StepPricer, cost: StockCost) -> StepPrice:
        found.append(cost.exchanges)
        return price(own, cost)

    monkeypatch.setattr(StepPricer, "sparse_dist", noting)
    for modules, kinds in (
        ("aa", ("table_wise", "table_wise")),
        ("ab", ("table_wise", "table_wise")),
        ("aa", ("table_wise", "row_wise")),
        ("ab", ("table_wise", "data_parallel")),
    ):
        works = [
            TableWork(dataclasses.replace(pooled(name, 4, None).load, module=module), 2)
            for name, module in zip("xy", modules)
        ]
        price_plan(works, {}, {}, dict(enumerate(kinds)), pricer(curves()))
    assert found == [1, 2, 2, 1]


@pytest.mark.parametrize(("exponent", "form"), [(0.4, "bags"), (0.6, "rows")])
def test_rows_of_a_mixed_plan_send_8_percent_fewer_bytes(exponent: float, form: Form) -> None:
    alone = pooled("t", 1, exponent)
    rows, bags = (
        sum(price_plan([alone], {0: each}, {}, {}, pricer(curves())).sent_bytes.values())
        for each in ("rows", "bags")
    )
    assert rows < 0.96 * bags
    assert (rows < 0.92 * bags) == (form == "rows")
    assert _plans(may_take_bags([alone]), [alone])["mixed"] == {0: form}


HOSTS, PLACES = 2, 4


def on_hosts(gbytes_per_s: float, inside_gbytes_per_s: float = 5.0) -> CommCurves:
    """Two hosts of four ranks; of what a rank sends to all others 4 of 7 bytes cross."""
    size = HOSTS * PLACES
    flat = curves(size, gbytes_per_s=gbytes_per_s * (size - 1) / (size - PLACES))
    across = Curve.line(flat.collectives["row_exchange"].latency_ms, gbytes_per_s)
    inside = Curve.line(0.01, inside_gbytes_per_s)
    levels = {**flat.collectives, "inside": inside, "across": across}
    return dataclasses.replace(flat, ranks_per_host=PLACES, collectives=levels)


def may_go_by_host(works: list[TableWork], **others: object) -> list[TableInfo]:
    return [dataclasses.replace(each, no_form={"bags": "no"}, **others) for each in ask(works)]  # type: ignore[arg-type]


def module_works(name: str, exponent: float, num_tables: int = 4) -> list[TableWork]:
    works = [work(f"{name}{i}", exponent, dim=128) for i in range(num_tables)]
    return [TableWork(dataclasses.replace(each.load, module=name), 8) for each in works]


def test_rows_go_by_host_where_ranks_share_them_and_the_network_is_slow() -> None:
    shared, slow = module_works("shared", 0.7), pricer(on_hosts(0.004), world_size=8)
    choice = choose(may_go_by_host(shared, no_hot_rows="no"), slow)
    assert set(choice.forms) == {"node_rows"}
    assert choice.priced_ms["node_rows"] < 0.9 * choice.priced_ms["rows"]
    assert choice.priced_ms["node_rows"] == choice.step.step_ms
    # a table whose rows go directly keeps its module so
    tables = may_go_by_host(shared, no_hot_rows="no")
    tables[0] = dataclasses.replace(tables[0], no_form={"node_rows": "form='rows' was requested"})
    choice = choose(tables, slow)
    assert "node_rows" not in choice.priced_ms
    assert set(choice.forms) == {"rows"}
    # what is saved across hosts is lost inside them, or is less than the error of predictions
    for network in (on_hosts(0.004, inside_gbytes_per_s=0.012), on_hosts(0.1)):
        choice = choose(may_go_by_host(shared, no_hot_rows="no"), pricer(network, world_size=8))
        assert set(choice.forms) == {"rows"}
        assert choice.priced_ms["node_rows"] > 0.9 * choice.priced_ms["rows"]


@pytest.mark.parametrize(
    ("rows", "bags", "by_host", "fastest"),
    [
        (98.5, 99, 96.5, "stock"),
        (90, 70, 64, "bags"),
        (90, 70, 62, "node_rows"),
        # 3 % of stock's step, and 5 % of the 5.4 ms that a hot/cold step costs once
        (96.8, 99, 99, "stock"),
        (96.7, 99, 99, "rows"),
    ],
)
def test_rows_by_host_must_beat_the_best_other_plan_and_rows_sent_directly(
    rows: float, bags: float, by_host: float, fastest: str
) -> None:
    plans = {
        name: PricedPlan(
            forms=(),
            num_hot=(),
            stock_types=(),
            step=StepPrice(step_ms=ms, wire_ms=ms, compute_ms=0.0),
            sent_bytes={},
        )
        for name, ms in zip(
            ("stock", "rows", "bags", "mixed", "node_rows"), (100.0, rows, bags, 99.0, by_host)
        )
    }
    assert _fastest(plans, pricer(curves())) == fastest


class _Halved(Exchange):
    """Sends half of what rows take."""

    def ways(self, world_size: int) -> list[Way]:
        (way,) = super().ways(world_size)
        return [dataclasses.replace(way, sent={name: n / 2 for name, n in way.sent.items()})]


def test_a_further_form_is_planned_by_its_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FORMS, "halved", FormTraits(by_module=True))  # type: ignore[arg-type]
    monkeypatch.setitem(EXCHANGES, "halved", _Halved)  # type: ignore[arg-type]
    monkeypatch.setattr(choice_module, "_BY_MODULE", ["halved"])
    slow = pricer(on_hosts(0.004), world_size=8)
    choice = choose(may_go_by_host(module_works("shared", 0.7), no_hot_rows="no"), slow)
    assert set(choice.forms) == {"halved"}
    assert choice.priced_ms["halved"] < 0.8 * choice.priced_ms["rows"]


def test_hot_rows_do_not_make_up_for_the_worse_route() -> None:
    """Sums that a curve shows too fast favour flat rows: by host, hot rows do not use them."""
    works, network = module_works("shared", 0.9), on_hosts(0.004)
    fast = {**network.collectives, "all_reduce": Curve.line(0.01, 5.0)}
    prices = pricer(dataclasses.replace(network, collectives=fast), world_size=8)
    tables = may_go_by_host(works)
    flat = choose(ask(works), prices)
    assert sum(flat.num_hot) > 0
    choice = choose(tables, prices)
    assert flat.step.step_ms < choice.priced_ms["node_rows"] < 0.9 * choice.priced_ms["rows"]
    assert (set(choice.forms), sum(choice.num_hot)) == ({"node_rows"}, 0)


def test_relays_sort_copy_and_sum() -> None:
    works, prices = module_works("shared", 0.7), pricer(on_hosts(0.004), world_size=8)
    works = [TableWork(each.load, 8, PLACES) for each in works]
    forms: tuple[Form, ...] = ("rows", "node_rows")
    direct, by_host = (
        price_plan(works, dict.fromkeys(range(len(works)), form), {}, {}, prices) for form in forms
    )
    assert by_host.step.compute_ms > 1.05 * direct.step.compute_ms
    assert by_host.step.wire_ms < direct.step.wire_ms


def test_each_module_goes_by_host_or_directly() -> None:
    network = on_hosts(0.0035, inside_gbytes_per_s=0.05)
    works = [*module_works("shared", 1.3, num_tables=12), *module_works("apart", 0.0, num_tables=2)]
    choice = choose(may_go_by_host(works, no_hot_rows="no"), pricer(network, world_size=8))
    assert choice.forms == ("node_rows",) * 12 + ("rows",) * 2
