"""The choice against a brute-force search over the same predictions, and the cases it must know."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrec_picasso.cost import CommCurves
from torchrec_picasso.cost.curve import Curve
from torchrec_picasso.cost.hot_cold import hot_cold_cost, hot_cold_totals
from torchrec_picasso.cost.table_work import TableLoad, TableWork
from torchrec_picasso.decision.choice import TableQuestion, _best_size, best_hot_counts, choose
from torchrec_picasso.frequency.spectrum import CountSpectrum

ROWS = 20_000
BATCH = 1024


def curves(world_size: int = 2, *, reduce_gbytes_per_s: float = 1.0, **of: float) -> CommCurves:
    """A network whose all-reduce may be faster than its all-to-all."""
    usual = {"gbytes_per_s": 0.1, "latency_ms": 0.3, **of}
    assumed = CommCurves.assumed(world_size, **usual)  # type: ignore[arg-type]
    fast = Curve.line(usual["latency_ms"], reduce_gbytes_per_s)
    return CommCurves(
        world_size=world_size,
        backend="test",
        device="cpu",
        collectives={**assumed.collectives, "all_reduce": fast},
    )


def work(
    name: str, exponent: float | None, world_size: int = 2, dim: int = 64, rows: int = ROWS
) -> TableWork:
    """A Zipf table, or a uniform one."""
    spectrum = None
    if exponent is not None:
        counts = (1e5 * torch.arange(1, rows + 1, dtype=torch.float64) ** -exponent).ceil()
        spectrum = CountSpectrum.of(counts, rows)
    load = TableLoad(
        name=name,
        num_embeddings=rows,
        dim=dim,
        lookups=float(BATCH),
        bags=float(BATCH),
        spectrum=spectrum,
    )
    return TableWork(load, world_size)


def ask(works: list[TableWork], *stock: str) -> list[TableQuestion]:
    types = stock or ("table_wise", "row_wise")
    return [TableQuestion(work=w, may_be_hot_cold=True, stock_types=types) for w in works]


@settings(max_examples=25, deadline=None)
@given(
    exponents=st.lists(st.floats(0.3, 1.4), min_size=1, max_size=2),
    speed=st.floats(0.05, 2.0),
    world_size=st.sampled_from([2, 3, 8]),
)
def test_hot_counts_are_near_the_best_of_all_sizes(
    exponents: list[float], speed: float, world_size: int
) -> None:
    works = [work(str(i), exponent, world_size) for i, exponent in enumerate(exponents)]
    network = curves(world_size, reduce_gbytes_per_s=speed)

    def ms(counts: list[int]) -> float:
        return hot_cold_cost(hot_cold_totals(works, counts), network, world_size).total_ms

    sizes = [0, 10, 50, 200, 1000, 3000, 8000, 20_000]
    best = min(ms(list(counts)) for counts in itertools.product(sizes, repeat=len(works)))
    assert ms(best_hot_counts(works, network, world_size)) <= 1.02 * best


def test_a_flat_network_wants_no_replicas() -> None:
    works = [work("a", 1.05), work("b", 1.2)]
    assert best_hot_counts(works, curves(reduce_gbytes_per_s=0.1), 2) == [0, 0]


def test_a_faster_all_reduce_wants_the_frequent_rows() -> None:
    works = [work("skewed", 1.2), work("flat", 0.2)]
    skewed, flat = best_hot_counts(works, curves(reduce_gbytes_per_s=0.19, latency_ms=0.01), 2)
    assert skewed > 50
    assert flat < skewed / 2


def test_replicas_stay_within_the_budget() -> None:
    works = [work("a", 1.1), work("b", 1.1, dim=16)]
    free = best_hot_counts(works, curves(), 2)
    row_bytes = [w.load.row_bytes for w in works]
    budget = sum(n * b for n, b in zip(free, row_bytes)) / 3
    tight = best_hot_counts(works, curves(), 2, budget)
    assert 0 < sum(n * b for n, b in zip(tight, row_bytes)) <= budget
    assert best_hot_counts(works, curves(), 2, 0.0) == [0, 0]


def test_one_rank_needs_no_replicas() -> None:
    assert best_hot_counts([work("a", 1.2, 1)], curves(), 1) == [0]


def test_uniform_ids_stay_stock_where_nothing_is_saved() -> None:
    # 1,024 lookups of 20,000 equal rows are nearly all distinct, and a fast network costs little
    questions = ask([work(str(i), None) for i in range(4)])
    choice = choose(questions, curves(gbytes_per_s=100.0, latency_ms=0.01), 2)
    assert choice.hot_cold == (False,) * 4
    assert choice.num_hot == (0,) * 4
    assert choice.stock_cost is not None
    assert choice.cost == choice.stock_cost


def test_skewed_ids_take_the_exchange() -> None:
    choice = choose(ask([work("a", 1.2), work("b", 1.1)]), curves(), 2)
    assert choice.hot_cold == (True, True)
    assert choice.stock_cost is not None
    assert choice.cost.total_ms < choice.stock_cost.total_ms


def test_what_is_not_allowed_is_not_chosen() -> None:
    skewed, uniform = work("a", 1.2), work("b", None)
    questions = [
        TableQuestion(work=skewed, may_be_hot_cold=False, stock_types=("row_wise",)),
        TableQuestion(work=uniform, may_be_hot_cold=True, stock_types=()),
    ]
    choice = choose(questions, curves(gbytes_per_s=100.0), 2)
    assert choice.hot_cold == (False, True)
    assert choice.stock_types == ("row_wise", None)
    assert choice.stock_cost is None


def test_many_tables_are_chosen_in_seconds() -> None:
    works = [work(str(i), 1.1 if i % 2 else None, rows=500) for i in range(300)]
    choice = choose(ask(works), curves(), 2)
    assert len(choice.hot_cold) == 300


@pytest.mark.parametrize("seed", range(3))
def test_the_order_of_tables_changes_nothing_but_the_order(seed: int) -> None:
    works = [work(str(i), 0.8 + 0.1 * i, dim=16 * (1 + i % 2)) for i in range(6)]
    order = torch.randperm(6, generator=torch.Generator().manual_seed(seed)).tolist()
    first = choose(ask(works), curves(), 2)
    second = choose(ask([works[i] for i in order]), curves(), 2)
    assert [first.num_hot[i] for i in order] == list(second.num_hot)
    assert [first.hot_cold[i] for i in order] == list(second.hot_cold)


@pytest.mark.parametrize(
    ("plans_ms", "expected"),
    [
        ({0: 100, 5: 95, 10: 120}, 0),  # a mixture must win clearly
        ({0: 100, 5: 70, 10: 120}, 5),
        ({0: 100, 5: 93, 10: 95}, 10),  # all of one kind need not
        ({0: 100, 5: 110, 10: 99}, 0),
        ({0: 100, 5: 99, 10: 90}, 10),
        ({3: 100, 5: 70, 10: 60}, 10),
        ({4: 100}, 4),
    ],
)
def test_a_mixed_plan_must_win_clearly(plans_ms: dict[int, float], expected: int) -> None:
    assert _best_size(plans_ms) == expected
