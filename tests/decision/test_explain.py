"""The planner's own choice and its explanation, end to end without a process group."""

from __future__ import annotations

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

from tests.planner.samples import ROWS, AbleSharder, Model, stats, topology
from torchrec_picasso.cost import CommCurves, LocalCosts
from torchrec_picasso.decision.explain import summarize
from torchrec_picasso.decision.what_if import sweep
from torchrec_picasso.errors import PlanError
from torchrec_picasso.frequency import FrequencyStats, TableCounts
from torchrec_picasso.placement import HotColdParams
from torchrec_picasso.planner import hot_cold_planner
from torchrec_picasso.planner.planner import HotColdPlanner
from torchrec_picasso.planner.table_facts import facts_of_model

SLOW = CommCurves.assumed(2, gbytes_per_s=0.001, latency_ms=0.1)
FAST = dataclasses.replace(
    CommCurves.assumed(2, gbytes_per_s=1000.0, latency_ms=0.001),
    local=dataclasses.replace(LocalCosts(), hot_cold=LocalCosts().scaled(10.0).hot_cold),
)
"""A network that costs nothing, and an exchange that costs much: stock is faster."""
BATCH = 512


def skewed() -> FrequencyStats:
    """512 samples that look up few rows: row 0 of each table most of all."""
    return FrequencyStats(
        tables={
            name: TableCounts(
                num_embeddings=rows,
                feature_names=(f"f_{name}",),
                rows_U=torch.arange(3),
                counts_U=torch.tensor([400, 100, 12]) * 8,
            )
            for name, rows in ROWS.items()
        },
        num_batches=8,
        num_samples=8 * BATCH,
    )


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
    assert (frame["hot_cold_ms"] < frame["table_wise_ms"]).all()
    assert (frame["unique_rows"] <= 3).all()
    assert frame["why"].str.startswith("hot/cold").all()
    for kind in ("hot_cold", "table_wise", "row_wise", "column_wise", "data_parallel"):
        assert (frame[f"{kind}_ms"] >= 0).all()
        assert (frame[f"{kind}_bytes"] >= 0).all()
    json.dumps(frame.to_dict("records"))


def test_where_the_exchange_costs_more_tables_stay_stock() -> None:
    planner, plan = planned(curves=FAST)
    assert "hot_cold" not in placed(plan).values()
    assert planner.explain()["why"].str.startswith("stock").all()
    summary = summarize(planner.decision)
    assert summary["hot_rows"] == 0
    assert summary["speedup"] == pytest.approx(1.0)


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
    counts = TableCounts(
        num_embeddings=ROWS["b"],
        feature_names=("f_b",),
        rows_U=torch.arange(40),
        counts_U=torch.full((40,), 100),
    )
    alone = FrequencyStats(tables={**skewed().tables, "b": counts}, num_samples=8 * BATCH)
    planner, plan = planned(stats=alone, hot_rows={"b": 0})
    sizes = [s.shard_sizes[0] for s in plan.plan["pooled"]["b"].sharding_spec.shards]  # type: ignore[index]
    assert sum(sizes) == ROWS["b"]
    assert 17 <= sizes[0] <= 23
    summary = summarize(planner.decision)
    assert summary["even_home_max_over_mean"] > 1.9
    assert summary["home_max_over_mean"] < 1.1


def test_the_same_input_gives_the_same_plan_in_another_process() -> None:
    program = (
        "from tests.decision.test_explain import SLOW, planned, skewed\n"
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
    with pytest.raises(PlanError, match=r"plan\(model, sharders\) comes first"):
        hot_cold_planner(topology(), curves=SLOW).explain()


def test_statistics_of_another_model_are_refused() -> None:
    tables = dict(skewed().tables)
    del tables["c"]
    with pytest.raises(PlanError, match="the statistics have no table 'c'"):
        planned(stats=FrequencyStats(tables=tables, num_samples=1), curves=SLOW)
    other = TableCounts(
        num_embeddings=7,
        feature_names=("f_c",),
        rows_U=torch.tensor([1]),
        counts_U=torch.tensor([1]),
    )
    with pytest.raises(PlanError, match="table 'c' has 5 rows in the model, but 7 in the stat"):
        planned(stats=FrequencyStats(tables={**tables, "c": other}, num_samples=1), curves=SLOW)


def test_what_if_over_world_sizes_and_bandwidths() -> None:
    facts = facts_of_model(Model(), skewed(), BATCH)
    frame = sweep(facts, skewed(), SLOW, batch_size=BATCH, world_sizes=[2, 64])
    assert list(frame["world_size"]) == [2, 64]
    assert (frame["speedup"] > 1).all()
    faster = sweep(facts, skewed(), SLOW, batch_size=BATCH, bandwidths=[1, 100])
    assert faster["step_ms"].is_monotonic_decreasing
    for wrong in ({"world_sizes": [1]}, {"bandwidths": [0.0]}):
        with pytest.raises(PlanError, match="expected"):
            sweep(facts, None, SLOW, batch_size=BATCH, **wrong)  # type: ignore[arg-type]


def test_old_samples_without_counts_of_samples_still_plan() -> None:
    assert set(placed(planned(stats=stats(), curves=SLOW, hot_rows=3)[1])) == set(ROWS)
