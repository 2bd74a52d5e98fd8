"""Expected rows and bytes of a step, against counting them on generated batches.

The sharded module's own traffic is compared with the model in ``benchmarks.fields``; here the
arithmetic is checked where every number can be known.
"""

import dataclasses

import pytest
import torch

from torchrec_picasso.cost import CommCurves
from torchrec_picasso.cost.hot_cold import hot_cold_memory_bytes
from torchrec_picasso.cost.local import LocalCosts, SideCosts
from torchrec_picasso.cost.stock import (
    STOCK_TYPES,
    StockTotals,
    _cost,
    marginal_stock_costs,
    max_over_mean,
    stock_cost,
)
from torchrec_picasso.cost.table_work import TableLoad, TableWork
from torchrec_picasso.frequency.spectrum import CountSpectrum

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


def test_expected_rows_agree_with_simulation() -> None:
    generator = torch.Generator().manual_seed(0)
    sample = torch.repeat_interleave(torch.arange(3), torch.tensor([600, 300, 100]))
    batch = 8
    work = TableWork(load(lookups=float(batch), bags=float(batch)), world_size=4)
    cold = touched = 0.0
    trials = 4000
    for _ in range(trials):
        drawn = sample[torch.randperm(sample.numel(), generator=generator)[: 4 * batch]]
        cold += (drawn[:batch].unique() > 0).sum().item() / trials
        touched += (drawn == 0).any().item() / trials
    split = work.split(1)
    # 4,000 trials of a number below 2: standard error below 0.01
    assert split.cold_used == pytest.approx(cold, abs=0.04)
    assert split.hot_touched == pytest.approx(touched, abs=0.04)
    assert split.coverage == pytest.approx(0.6)


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


def test_the_busiest_rank_of_few_tables() -> None:
    tables = [load(str(i)) for i in range(3)]
    assert max_over_mean("table_wise", tables, 2) == pytest.approx(2 / 1.5)
    assert max_over_mean("table_wise", tables, 6) == pytest.approx(2.0)
    assert max_over_mean("column_wise", tables, 2) == pytest.approx(1.0)
    assert max_over_mean("row_wise", tables, 6) == 1.0


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
        steps = [_cost(kind, some, uneven, curves, 2).exposed_ms for some in totals]
        assert added[0].exposed_ms == pytest.approx(steps[0] - steps[1])
        assert all(cost.exposed_ms > 0 for cost in added)


def test_memory_counts_homes_replicas_and_state() -> None:
    work = TableWork(load(optimizer_share=0.5), world_size=2)
    memory = hot_cold_memory_bytes([work], [3])
    assert memory["home"] == pytest.approx(50 * 16 * 4 * 1.5)
    assert memory["replica"] == pytest.approx(3 * 16 * 4 * 1.5)
    assert memory["optimizer"] == pytest.approx(53 * 16 * 4 * 0.5)
    assert memory["buffers"] > 0
