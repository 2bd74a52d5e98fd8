"""The planner's own choice and its explanation, end to end without a process group but for one
test: the plan says what it was priced for, takes the dense part into account, and may send bags."""

import dataclasses
import json
import os
import subprocess
import sys
import warnings
from statistics import fmean
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torchrec.distributed.planner.types import ParameterConstraints, Topology
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

from tests.planner.samples import DIM, META, ROWS, AbleSharder, Model, stats, topology
from tests.support.hosts import pretend_hosts
from tests.support.placing import wire_codecs
from tests.support.tables import bags_of, stats_of, tables_of
from torchrec_picasso import (
    HotColdEmbeddingCollectionSharder,
    HotColdFeatureProcessedEmbeddingBagCollectionSharder,
)
from torchrec_picasso.app.launch.run_ranks import run_ranks
from torchrec_picasso.cost import CommCurves, LocalCosts
from torchrec_picasso.cost.curves import COLLECTIVES, Curve
from torchrec_picasso.cost.local import DenseTimes, PhaseCost, SideCosts
from torchrec_picasso.cost.stock import rank_loads
from torchrec_picasso.errors import PlanError
from torchrec_picasso.frequency import FrequencyStats
from torchrec_picasso.placement import HotColdParams
from torchrec_picasso.planner import hot_cold_planner
from torchrec_picasso.planner.explain import summarize, why_nothing_is_hot_cold
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
        *("lookups", "unique_rows", "cold_rows", "row_wise_load"),
        *("home_bytes", "replica_bytes", "why"),
    ]
    json.dumps(frame.to_dict("records"))


def test_where_the_exchange_costs_more_tables_stay_stock_and_the_log_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    planner, plan = planned(curves=FAST)
    assert "hot_cold" not in placed(plan).values()
    (record,) = (each for each in caplog.records if each.name == "torchrec_picasso.planner")
    assert record.levelname == "WARNING"
    assert "no table is hot/cold, so this package has no effect: a step is predicted to take " in (
        record.getMessage()
    )
    assert planner.explain()["why"].str.match(r"stock (row|table)_wise: a step is predicted").all()
    stock_ms, once_ms = planner.decision.priced_ms["stock"], FAST.local.hot_cold.once_ms
    assert f"which must save {0.03 * stock_ms + 0.05 * once_ms:.1f} ms" in record.getMessage()
    summary = summarize(planner.decision)
    assert summary["hot_rows"] == 0
    assert summary["speedup"] == pytest.approx(1.0)


def test_the_plan_that_stock_was_compared_with_is_named() -> None:
    decision = planned(curves=FAST)[0].decision
    # mixed must be 18 % below both others, so stock was compared with rows
    priced_ms = {"stock": 10.0, "rows": 9.9, "bags": 11.0, "mixed": 8.5}
    local = LocalCosts(hot_cold=SideCosts(), measured=True)
    decision = dataclasses.replace(
        decision, priced_ms=priced_ms, curves=dataclasses.replace(FAST, local=local)
    )
    assert why_nothing_is_hot_cold(decision) == (
        "a step is predicted to take 10.0 ms with stock tables and 9.9 ms with hot/cold ones, "
        "which must save 0.3 ms"
    )


def test_a_plan_without_a_hot_cold_table_says_why(caplog: pytest.LogCaptureFixture) -> None:
    only_stock = ParameterConstraints(sharding_types=["table_wise"], compute_kernels=["fused"])
    planner, _ = planned(curves=SLOW, constraints=dict.fromkeys(ROWS, only_stock))
    summary = summarize(planner.decision)
    held = fmean(rank["memory_bytes"] for rank in summary["stock_ranks"]["table_wise"])
    assert [rank["memory_bytes"] for rank in summary["ranks"]] == pytest.approx([held] * 2)
    planned(curves=SLOW, hot_rows={})
    logged = [one.getMessage() for one in caplog.records if one.name == "torchrec_picasso.planner"]
    assert len(logged) == 2
    assert "no table can be: its sharder or its constraints do not allow hot/cold" in logged[0]
    assert "hot_rows names no table" in logged[1]


def test_a_plan_with_hot_cold_tables_is_logged_for_who_asks(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level("INFO", logger="torchrec_picasso.planner"):
        planned(stats=skewed(), curves=SLOW)
    (record,) = (each for each in caplog.records if each.name == "torchrec_picasso.planner")
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


def test_weights_of_lookups_are_on_the_wire() -> None:
    sent = {}
    for is_weighted in (False, True):
        planner = hot_cold_planner(topology(), batch_size=BATCH, curves=FAST, debug=False)
        model = nn.Sequential(bags_of(tables_of(ROWS, DIM), "meta", is_weighted=is_weighted))
        planner.plan(model, [AbleSharder()])
        assert set(planner.decision.forms) == {None}
        sent[is_weighted] = planner.decision.sent_bytes["ids"]
    # 4 bytes of each lookup, half of which are of the other rank's tables
    assert sent[True] - sent[False] == pytest.approx(4 * BATCH * len(ROWS) / 2)


def test_homes_follow_the_load() -> None:
    # all lookups of b go to its first rows, which equal blocks put on one rank
    stats_b = stats_of({"b": ROWS["b"]}, lambda rows: torch.full((40,), 100), 8, BATCH).tables
    alone = FrequencyStats(tables={**skewed().tables, **stats_b}, num_samples=8 * BATCH)
    planner, plan = planned(stats=alone, hot_rows={"b": 0})
    sizes = [s.shard_sizes[0] for s in plan.plan["pooled"]["b"].sharding_spec.shards]  # type: ignore[index]
    assert sum(sizes) == ROWS["b"]
    assert 17 <= sizes[0] <= 23
    decision = planner.decision
    summary = summarize(decision)
    assert summary["even_home_max_over_mean"] > 1.9
    assert summary["home_max_over_mean"] < 1.1
    over = summary["busiest_over_mean"]
    assert over["served_bytes"] == pytest.approx(summary["home_max_over_mean"])
    assert over["row_wise"] == pytest.approx(2.0)  # row 0 of each table is on rank 0
    assert planner.explain()["row_wise_load"].tolist() == pytest.approx([2.0] * len(ROWS))
    *_, sent, received, memory = zip(*(rank.values() for rank in summary["ranks"]))
    assert sum(sent) / 2 == pytest.approx(summary["sent_bytes"])
    assert sum(received) / 2 == pytest.approx(summary["sent_bytes"])
    assert memory[1] > memory[0]
    means = [summary["memory_bytes"][name] for name in ("home", "replica", "buffers")]
    # the other tables are stock
    stock = [each.load for each, form in zip(decision.works, decision.forms) if form is None]
    (kind,) = {each for each in decision.stock_types if each}
    held = fmean(rank["memory_bytes"] for rank in rank_loads(kind, stock, 2))
    assert fmean(memory) == pytest.approx(sum(means) + held)


def test_a_rank_serves_its_home_rows_and_their_lookups() -> None:
    planner, plan = planned(stats=skewed(), hot_rows={"b": 0})
    sizes = [s.shard_sizes[0] for s in plan.plan["pooled"]["b"].sharding_spec.shards]  # type: ignore[index]
    assert sizes[0] == 2  # rows 0 and 1 have 500 of 512 lookups, and each is sent as often as row 2
    summary = summarize(planner.decision)
    lookups, served, sent, received, _ = zip(*(rank.values() for rank in summary["ranks"]))
    others = 2 * 512  # of the other tables, which are stock: a rank's as means
    assert lookups == (2 * 500 + others, 2 * 12 + others)
    rows = np.array(served) / (4 * DIM)
    assert rows == pytest.approx([2.0, 1.0], abs=1e-3)
    assert np.subtract(received, sent) == pytest.approx(4 * (rows - rows[::-1]))  # row numbers
    stock = summary["stock_ranks"]
    by_tables = {"table_wise": [4 * 512, 2 * 512], "column_wise": [6 * 512, 6 * 512]}
    found = {kind: [rank["served_lookups"] for rank in each] for kind, each in stock.items()}
    assert found == {"row_wise": [6 * 512, 0.0], **by_tables}
    loads = ("ranks", "busiest_over_mean", "stock_ranks")
    assert planner.explain().attrs == {name: summary[name] for name in loads}
    replicated, _ = planned(stats=skewed(), hot_rows={"b": 1})  # row 0
    lookups = [rank["served_lookups"] for rank in summarize(replicated.decision)["ranks"]]
    assert sum(lookups) == pytest.approx(2 * (512 - 400 + others))


def test_rows_count_as_equally_often_asked_for_without_counts() -> None:
    planner, _ = planned(hot_rows=0)
    summary = summarize(planner.decision)
    asked = sum(planner.explain()["cold_rows"]) * DIM * 4  # bytes that a rank asks for
    assert [rank["served_bytes"] for rank in summary["ranks"]] == pytest.approx([asked / 2] * 2)
    assert "row_wise" not in summary["busiest_over_mean"]
    # a table that no sample looked up beside others
    unseen = stats_of({"c": ROWS["c"]}, lambda rows: torch.tensor([], dtype=torch.int64), 8, BATCH)
    some = FrequencyStats(tables={**skewed().tables, **unseen.tables}, num_samples=8 * BATCH)
    planner, _ = planned(stats=some, hot_rows=0)
    load = planner.explain().set_index("table")["row_wise_load"]
    assert load.to_dict() == pytest.approx({"a": 2.0, "b": 2.0, "c": 1.0})


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
    only_stock = ParameterConstraints(sharding_types=["table_wise"], compute_kernels=["fused"])
    found = FrequencyStats(tables={**tables, **other}, num_samples=1)
    for constraints in (None, {"c": only_stock}):
        with pytest.raises(PlanError, match="table 'c' has 5 rows in the model, but 7 in the stat"):
            planned(stats=found, curves=SLOW, constraints=constraints)


LARGE_BATCH = 1024
TOWER_ROWS = {"wide": 50_000, "long": 80_000, "small": 20}


class Towers(nn.Module):
    """Two tables with large bags whose rows hardly repeat, one whose do, and dense layers."""

    def __init__(self) -> None:
        super().__init__()
        self.pooled = bags_of(tables_of(TOWER_ROWS, 16), "meta")
        self.over = nn.Linear(48, 500, device=META)


POOLING = {
    name: ParameterConstraints(pooling_factors=[pooling])
    for name, pooling in (("wide", 12.0), ("long", 9.0), ("small", 1.0))
}


def planned_of(model: nn.Module, **arguments: Any) -> tuple[HotColdPlanner, ShardingPlan]:
    planner = hot_cold_planner(topology(), batch_size=LARGE_BATCH, debug=False, **arguments)
    return planner, planner.plan(model, [AbleSharder(), HotColdEmbeddingCollectionSharder()])


def params(plan: ShardingPlan) -> dict[str, HotColdParams]:
    return {
        table: placed.cache_params
        for module in plan.plan.values()
        for table, placed in module.items()  # type: ignore[attr-defined]
        if isinstance(placed.cache_params, HotColdParams)
    }


def test_all_tables_say_the_micro_batches_that_the_plan_was_priced_for() -> None:
    planner, plan = planned_of(Towers(), curves=SLOW, constraints=POOLING, dense_ms=2000.0)
    summary = summarize(planner.decision)
    assert summary["num_micro_batches"] in (2, 4, 8, 16)
    assert {one.num_micro_batches for one in params(plan).values()} == {
        summary["num_micro_batches"]
    }
    assert summary["dense_ms"] == pytest.approx(2000)
    assert summary["step_ms"] >= max(summary["wire_ms"], summary["compute_ms"])
    assert summary["compute_ms"] > 2000
    # where somebody else names the rows, the price is still known
    given, plan = planned_of(Towers(), curves=SLOW, constraints=POOLING, hot_rows=0, dense_ms=2000)
    found = {each.num_micro_batches for each in params(plan).values()}
    assert found == {given.decision.step.num_micro_batches} != {None}


def test_without_curves_a_plan_of_given_rows_says_nothing_of_micro_batches() -> None:
    _, plan = planned_of(Model(), stats=stats(), hot_rows=3)
    assert {each.num_micro_batches for each in params(plan).values()} == {None}


def test_the_dense_part_is_that_of_the_curves_unless_given() -> None:
    dense = DenseTimes(forward_ms=10.0, backward_ms=20.0, batch_size=LARGE_BATCH // 2)
    known = dataclasses.replace(SLOW, dense=dense)
    planner, _ = planned_of(Towers(), curves=known)
    assert planner.decision.dense.total_ms == pytest.approx(60)  # twice the samples
    assert planner.decision.dense.parameter_bytes == 4 * (48 * 500 + 500)
    given, _ = planned_of(Towers(), curves=known, dense_ms=7.0)
    assert given.decision.dense.total_ms == pytest.approx(7)
    unknown, _ = planned_of(Towers(), curves=SLOW)
    assert unknown.decision.dense.total_ms == 0
    with pytest.raises(PlanError, match="dense_ms is -1, expected milliseconds of at least 0"):
        planned_of(Towers(), dense_ms=-1)
    with pytest.raises(PlanError, match="dense_ms is inf"):
        planned_of(Towers(), dense_ms=float("inf"))


def test_bags_are_placed_on_the_rank_that_pools_them() -> None:
    rows_planner, plan = planned_of(Towers(), curves=SLOW, constraints=POOLING, hot_rows=0)
    assert {each.form for each in params(plan).values()} == {"rows"}
    planner, plan = planned_of(Towers(), curves=SLOW, constraints=POOLING)
    forms = {name: each.form for name, each in params(plan).items()}
    assert forms == {"wide": "bags", "long": "bags", "small": "rows"}
    for name, placed in plan.plan["pooled"].items():  # type: ignore[attr-defined]
        is_bags = forms[name] == "bags"
        assert placed.sharding_type == ("table_wise" if is_bags else "row_wise")
        assert placed.compute_kernel == "fused"
        assert len(placed.ranks) == (1 if is_bags else 2)
    frame = planner.explain().set_index("table")
    assert dict(frame["form"]) == forms
    assert frame.loc["wide", "why"].startswith("hot/cold, owner-pooled: 1,024 pooled vectors are")
    summary = summarize(planner.decision)
    assert summary["bag_tables"] == 2
    assert summary["step_ms"] < 0.8 * summarize(rows_planner.decision)["step_ms"]
    assert summary["sent_bytes"] == pytest.approx(sum(planner.decision.sent_bytes.values()))


def _asking(**forms: HotColdParams) -> dict[str, ParameterConstraints]:
    return {
        name: ParameterConstraints(
            pooling_factors=POOLING[name].pooling_factors, cache_params=forms.get(name)
        )
        for name in POOLING
    }


@pytest.mark.parametrize("curves", [SLOW, None])
@pytest.mark.parametrize("hot_rows", [None, 0, {"wide": 0, "small": 0}])
def test_a_form_that_constraints_ask_for_is_had(
    curves: CommCurves | None, hot_rows: int | dict[str, int] | None
) -> None:
    """Chosen freely, it would be the other one in both tables."""
    asked = _asking(wide=HotColdParams(), small=HotColdParams(form="bags"))
    _, plan = planned_of(Towers(), curves=curves, constraints=asked, hot_rows=hot_rows)
    forms = {name: each.form for name, each in params(plan).items()}
    assert (forms["wide"], forms["small"]) == ("rows", "bags")
    placed = plan.plan["pooled"]["small"]  # type: ignore[index]
    assert (placed.sharding_type, len(placed.ranks)) == ("table_wise", 1)


def test_hot_rows_of_constraints_stay_where_bags_would_be_cheaper() -> None:
    asked = _asking(wide=HotColdParams(hot_rows=[1, 5]))
    curves = CommCurves.assumed(2, gbytes_per_s=0.02)
    _, plan = planned_of(Towers(), curves=curves, constraints=asked)
    assert params(plan)["wide"].form == "rows"
    assert params(plan)["wide"].hot_rows.tolist() == [1, 5]
    assert params(plan)["long"].form == "bags"


def test_a_total_of_hot_rows_goes_past_tables_that_shall_take_bags() -> None:
    asked = {"b": ParameterConstraints(cache_params=HotColdParams(form="bags"))}
    _, plan = planned_of(Model(), stats=stats(), constraints=asked, hot_rows=2)
    assert {name: (each.form, each.num_hot_rows) for name, each in params(plan).items()} == {
        "a": ("rows", 1),
        "b": ("bags", 0),
        "c": ("rows", 1),
    }


def test_bags_that_cannot_be_had_are_refused() -> None:
    bags = HotColdParams(form="bags")
    with pytest.raises(PlanError, match="'wide', which cannot have hot rows: form='bags' was req"):
        planned_of(Towers(), constraints=_asking(wide=bags), stats=None, hot_rows={"wide": 1})
    asked = {"s": ParameterConstraints(cache_params=bags)}
    why = "'s', which cannot be hot/cold: form='bags' was requested, "
    with pytest.raises(PlanError, match=why):
        planned_of(Model(sequence=True), constraints=asked)
    asked = {"a": ParameterConstraints(cache_params=bags, sharding_types=["row_wise"])}
    with pytest.raises(PlanError, match="chosen to be hot/cold, which needs table_wise"):
        planned_of(Model(), constraints=asked)


_LINK = Curve.line(0.1, 0.0001)
ON_HOSTS = dataclasses.replace(
    CommCurves.assumed(4, gbytes_per_s=0.00015, latency_ms=0.1, ranks_per_host=2),
    collectives={
        **dict.fromkeys(COLLECTIVES, Curve.line(0.1, 0.00015)),
        "all_reduce": Curve.line(0.1, 0.00001),  # no replicas
        "inside": Curve.line(0.01, 1.0),
        "across": _LINK,
    },
)
"""Two hosts of two ranks behind a slow link, of which 2 of 3 bytes to other ranks are sent."""


def _placed_on_hosts(
    sharder: Any = None, topology: Topology | None = None, **arguments: Any
) -> tuple[HotColdPlanner, set[str]]:
    topology = topology or Topology(4, "cpu", local_world_size=2)
    planner = hot_cold_planner(topology, batch_size=BATCH, **{"curves": ON_HOSTS, **arguments})
    return planner, _forms(planner.plan(Model(), [sharder or AbleSharder()]))


def _forms(plan: ShardingPlan) -> set[str]:
    return {table.cache_params.form for table in plan.plan["pooled"].values()}  # type: ignore[attr-defined]


def test_rows_go_by_host_where_the_curves_are_of_hosts() -> None:
    planner, forms = _placed_on_hosts()
    assert forms == {"node_rows"}
    summary = summarize(planner.decision)
    assert summary["tables_by_host"] == len(ROWS)
    ms = summary["priced_ms"]
    assert summary["step_ms"] == ms["node_rows"] < 0.9 * ms["rows"]
    why = planner.explain().set_index("table")["why"]["b"]
    assert "; sent by host: 50 rows are sent instead of 99 between hosts, a step is pred" in why
    assert why.endswith(f" {ms['node_rows']:.1f} ms, {ms['rows']:.1f} directly")
    fast = dataclasses.replace(
        ON_HOSTS, collectives={**ON_HOSTS.collectives, "row_exchange": Curve.line(0.01, 1.0)}
    )
    planner, forms = _placed_on_hosts(curves=fast)
    assert forms == {"rows"}
    ms = planner.decision.priced_ms
    reason = f"; sent directly: a step is predicted to take {ms['rows']:.1f} ms, "
    assert planner.explain()["why"].str.endswith(f"{reason}{ms['node_rows']:.1f} by host").all()


@pytest.mark.parametrize(
    "arguments",
    [
        {"topology": Topology(4, "cpu", local_world_size=1)},
        {"topology": Topology(2, "cpu", local_world_size=2)},
        {"topology": Topology(5, "cpu", local_world_size=5)},
        {"curves": dataclasses.replace(SLOW, world_size=4, ranks_per_host=2)},
        {"sharder": AbleSharder(qcomm_codecs_registry=wire_codecs("fp16"))},
        {"constraints": {"a": ParameterConstraints(cache_params=HotColdParams())}},
    ],
    ids=["other hosts", "one host", "uneven hosts", "no levels", "a codec", "rows requested"],
)
@pytest.mark.filterwarnings("ignore:curves of")
def test_rows_go_directly_where_they_may_not_go_by_host(arguments: dict[str, Any]) -> None:
    planner, forms = _placed_on_hosts(**arguments)
    assert forms == {"rows"}
    assert "node_rows" not in planner.decision.priced_ms


def test_rows_go_directly_where_the_launcher_has_other_hosts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for num_places, form in ((4, "rows"), (2, "node_rows")):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(num_places))
        assert _placed_on_hosts(topology=Topology(4, "cpu"))[1] == {form}


def _placed_in_a_launch(rank: int, world_size: int) -> list[set[str]]:
    """Of a launch that tells all ranks their hosts, and of one that tells all but the last rank."""
    found = []
    for not_told in (None, world_size - 1):
        pretend_hosts(rank, 2)
        if rank == not_told:
            del os.environ["LOCAL_WORLD_SIZE"]
        planner = hot_cold_planner(Topology(world_size, "cpu"), batch_size=BATCH, curves=ON_HOSTS)
        found.append(_forms(planner.collective_plan(Model(), [AbleSharder()])))
    return found


def test_rows_go_directly_where_a_rank_cannot_exchange_by_host() -> None:
    """Unasked; the sharder refuses rows by host on such ranks."""
    assert run_ranks(_placed_in_a_launch, 4, timeout_s=60) == [[{"node_rows"}, {"rows"}]] * 4


BY_HOST = ParameterConstraints(cache_params=HotColdParams(hot_rows=[2], form="node_rows"))


@pytest.mark.parametrize("curves", [ON_HOSTS, None])
@pytest.mark.parametrize("hot_rows", [None, dict.fromkeys(ROWS, 1)])
def test_rows_go_by_host_where_that_is_requested(curves: Any, hot_rows: Any) -> None:
    constraints = dict.fromkeys(ROWS, BY_HOST)
    forms = _placed_on_hosts(constraints=constraints, curves=curves, hot_rows=hot_rows)[1]
    assert forms == {"node_rows"}


@pytest.mark.parametrize(
    ("tables", "arguments", "message"),
    [
        (
            ROWS,
            {"topology": Topology(4, "cpu")},
            "'a', .* but all ranks are on one host, by LOCAL_WORLD",
        ),
        (
            ROWS,
            {"topology": Topology(4, "cpu", local_world_size=1)},
            "but each host has one rank, by LO",
        ),
        (
            ROWS,
            {"topology": Topology(5, "cpu", local_world_size=2)},
            "not numbered host by host, 2 on",
        ),
        (
            ROWS,
            {"sharder": AbleSharder(qcomm_codecs_registry=wire_codecs("fp16"))},
            "but its sharder has a codec for rows; request form='rows'",
        ),
        ("a", {}, "'a' request form='node_rows', those of table 'c' of the same module do not; re"),
    ],
    ids=["one host", "hosts of one rank", "uneven hosts", "a codec", "one table"],
)
@pytest.mark.filterwarnings("ignore:curves of")
def test_rows_by_host_that_cannot_be_had_are_refused(
    tables: Any, arguments: dict[str, Any], message: str
) -> None:
    curves = None if "topology" in arguments else ON_HOSTS
    with pytest.raises(PlanError, match=message):
        _placed_on_hosts(
            constraints=dict.fromkeys(tables, BY_HOST), **{"curves": curves, **arguments}
        )


def test_sequences_never_take_bags() -> None:
    planner, plan = planned_of(Model(sequence=True), curves=SLOW, stats=None)
    facts = {fact.load.name: fact.no_form.get("bags") for fact in planner.decision.tables}
    assert facts == {**dict.fromkeys(ROWS), "s": "its output is sequences, not bags"}
    assert params(plan)["s"].form == "rows"


class Processed(nn.Module):
    """The towers' tables behind position weights."""

    def __init__(self) -> None:
        super().__init__()
        weights = PositionWeightedModuleCollection({f"f_{n}": 20 for n in POOLING}, device=META)
        tables = bags_of(tables_of(TOWER_ROWS, 16), "meta", is_weighted=True)
        self.pooled = FeatureProcessedEmbeddingBagCollection(tables, weights)


def _processed(**arguments: Any) -> tuple[HotColdPlanner, ShardingPlan]:
    planner = hot_cold_planner(topology(), batch_size=LARGE_BATCH, debug=False, **arguments)
    sharder = HotColdFeatureProcessedEmbeddingBagCollectionSharder()
    return planner, planner.plan(Processed(), [sharder])


def test_tables_behind_feature_processors_take_rows_alone() -> None:
    """And only where constraints name row_wise: unasked, TorchRec does not offer it there."""
    either = dict.fromkeys(POOLING, ParameterConstraints(sharding_types=["row_wise", "table_wise"]))
    planner, plan = _processed(curves=SLOW, constraints=either, hot_rows=0)
    # a processor makes weights where lookups have arrived
    assert not any(work.load.is_weighted for work in planner.decision.works)
    assert {name: one.form for name, one in params(plan).items()} == dict.fromkeys(POOLING, "rows")
    assert {fact.no_form["bags"] for fact in planner.decision.tables} == {
        "feature processors weight its lookups on the rank of the batch"
    }
    chosen, plan = _processed(curves=SLOW, constraints=either)
    assert all(fact.not_hot_cold is None for fact in chosen.decision.tables)
    _, plan = _processed(curves=SLOW)
    assert not params(plan)
    bags = ParameterConstraints(cache_params=HotColdParams(form="bags"))
    with pytest.raises(PlanError, match="form='bags' was requested, but feature processors weight"):
        _processed(constraints={"wide": bags})
