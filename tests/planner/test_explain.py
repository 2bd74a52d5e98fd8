"""The planner's own choice and its explanation, end to end without a process group."""

import dataclasses
import json
import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import ShardingPlan

from tests.planner.samples import ROWS, AbleSharder, Model, topology
from tests.support.tables import stats_of
from torchrec_picasso.cost import CommCurves, LocalCosts
from torchrec_picasso.cost.local import PhaseCost, SideCosts
from torchrec_picasso.errors import PlanError
from torchrec_picasso.frequency import FrequencyStats
from torchrec_picasso.placement import HotColdParams
from torchrec_picasso.planner import hot_cold_planner
from torchrec_picasso.planner.explain import summarize
from torchrec_picasso.planner.planner import HotColdPlanner

SLOW = CommCurves.assumed(2, gbytes_per_s=0.001, latency_ms=0.1)
FAST = dataclasses.replace(
    CommCurves.assumed(2, gbytes_per_s=1000.0, latency_ms=0.001),
    local=LocalCosts(hot_cold=SideCosts(forward=PhaseCost(fixed_ms=1000.0))),
)
"""A network that costs nothing, and an exchange that costs much: stock is faster."""
BATCH = 512


def skewed() -> FrequencyStats:
    """512 samples that look up few rows: row 0 of each table most of all."""
    return stats_of(ROWS, lambda rows: torch.tensor([400, 100, 12]) * 8, 8, BATCH)


def planned(**arguments: Any) -> tuple[HotColdPlanner, ShardingPlan]:
    planner = hot_cold_planner(topology(), batch_size=BATCH, debug=False, **arguments)
    return planner, planner.plan(Model(), [AbleSharder()])


def placed(plan: ShardingPlan) -> dict[str, str]:
    return {
        table: "hot_cold" if isinstance(s.cache_params, HotColdParams) else s.sharding_type
        for table, s in plan.plan["pooled"].items()  # type: ignore[attr-defined]
    }


def test_a_slow_network_takes_the_exchange() -> None:
    planner, plan = planned(stats=skewed(), curves=SLOW)
    assert set(placed(plan).values()) == {"hot_cold"}
    frame = planner.explain()
    assert list(frame["table"]) == list(ROWS)
    assert list(frame["rows"]) == list(ROWS.values())
    assert (frame["unique_rows"] <= 3).all()
    assert frame["why"].str.startswith("hot/cold").all()
    assert list(frame.columns) == [
        *("table", "rows", "dim", "placement", "form", "wave", "hot_rows", "coverage"),
        *("lookups", "unique_rows", "cold_rows", "home_bytes", "replica_bytes", "why"),
    ]
    json.dumps(frame.to_dict("records"))


def test_where_the_exchange_costs_more_tables_stay_stock_and_the_log_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    planner, plan = planned(curves=FAST)
    assert "hot_cold" not in placed(plan).values()
    (record,) = (of for of in caplog.records if of.name == "torchrec_picasso.planner")
    assert record.levelname == "WARNING"
    assert "no table is hot/cold, so this package has no effect: a step is predicted to take " in (
        record.getMessage()
    )
    assert planner.explain()["why"].str.match(r"stock (row|table)_wise: a step is predicted").all()
    summary = summarize(planner.decision)
    assert summary["hot_rows"] == 0
    assert summary["speedup"] == pytest.approx(1.0)


def test_a_plan_without_a_hot_cold_table_says_why(caplog: pytest.LogCaptureFixture) -> None:
    only_stock = ParameterConstraints(sharding_types=["table_wise"], compute_kernels=["fused"])
    planned(curves=SLOW, constraints=dict.fromkeys(ROWS, only_stock))
    planned(curves=SLOW, hot_rows={})
    logged = [of.getMessage() for of in caplog.records if of.name == "torchrec_picasso.planner"]
    assert len(logged) == 2
    assert "no table can be: its sharder or its constraints do not allow hot/cold" in logged[0]
    assert "hot_rows names no table" in logged[1]


def test_a_plan_with_hot_cold_tables_is_logged_for_who_asks(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level("INFO", logger="torchrec_picasso.planner"):
        planned(stats=skewed(), curves=SLOW)
    (record,) = (of for of in caplog.records if of.name == "torchrec_picasso.planner")
    assert record.levelname == "INFO"
    assert record.getMessage().startswith(f"{len(ROWS)} tables hot/cold (0 owner-pooled) with ")


def test_constraints_are_respected() -> None:
    constraints = {
        "a": ParameterConstraints(sharding_types=["column_wise"]),
        "b": ParameterConstraints(
            sharding_types=["row_wise"],
            compute_kernels=["fused"],
            cache_params=HotColdParams(hot_rows=[5, 7]),
        ),
    }
    planner, plan = planned(stats=skewed(), curves=FAST, constraints=constraints)
    assert placed(plan)["a"] == "column_wise"
    assert placed(plan)["b"] == "hot_cold"
    assert plan.plan["pooled"]["b"].cache_params.hot_rows.tolist() == [5, 7]  # type: ignore[index]
    why = planner.explain().set_index("table")["why"]
    assert why["a"] == "stock: its sharder or its constraints do not allow hot/cold"
    assert "no stock type is allowed" in why["b"]


def test_homes_follow_the_load() -> None:
    # all lookups of b go to its first rows, which equal blocks put on one rank
    of_b = stats_of({"b": ROWS["b"]}, lambda rows: torch.full((40,), 100), 8, BATCH).tables
    alone = FrequencyStats(tables={**skewed().tables, **of_b}, num_samples=8 * BATCH)
    planner, plan = planned(stats=alone, hot_rows={"b": 0})
    sizes = [s.shard_sizes[0] for s in plan.plan["pooled"]["b"].sharding_spec.shards]  # type: ignore[index]
    assert sum(sizes) == ROWS["b"]
    assert 17 <= sizes[0] <= 23
    summary = summarize(planner.decision)
    assert summary["even_home_max_over_mean"] > 1.9
    assert summary["home_max_over_mean"] < 1.1


def test_the_same_input_gives_the_same_plan_in_another_process() -> None:
    program = (
        "from tests.planner.test_explain import SLOW, planned, skewed\n"
        "print(repr(planned(stats=skewed(), curves=SLOW)[1]))"
    )
    texts = {
        subprocess.run(
            [sys.executable, "-W", "ignore", "-c", program],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(texts) == 1
    assert "HotColdParams" in texts.pop()


def test_curves_of_elsewhere_are_announced() -> None:
    with pytest.warns(UserWarning, match=r"curves of 2 ranks .*used for 4 ranks.*: times are extr"):
        hot_cold_planner(topology(world_size=4), curves=SLOW)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        hot_cold_planner(topology(), curves=SLOW)


def test_there_is_nothing_to_explain_before_a_plan() -> None:
    with pytest.raises(PlanError, match=r"call plan\(model, sharders\) first"):
        hot_cold_planner(topology(), curves=SLOW).explain()


def test_statistics_of_another_model_are_refused() -> None:
    tables = dict(skewed().tables)
    del tables["c"]
    with pytest.raises(PlanError, match="the statistics have no table 'c'"):
        planned(stats=FrequencyStats(tables=tables, num_samples=1), curves=SLOW)
    other = stats_of({"c": 7}, lambda rows: torch.tensor([1]), 1, 1).tables
    with pytest.raises(PlanError, match="table 'c' has 5 rows in the model, but 7 in the stat"):
        planned(stats=FrequencyStats(tables={**tables, **other}, num_samples=1), curves=SLOW)
