"""The plan says what it was priced for, takes the dense part into account, and may send bags."""

from typing import Any

import pytest
from torch import nn
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

from tests.planner.samples import META, ROWS, AbleSharder, Model, stats, topology
from tests.support.tables import configs_of, tables_of
from torchrec_picasso import (
    HotColdEmbeddingCollectionSharder,
    HotColdFeatureProcessedEmbeddingBagCollectionSharder,
)
from torchrec_picasso.cost import CommCurves
from torchrec_picasso.errors import PlanError
from torchrec_picasso.placement import HotColdParams
from torchrec_picasso.planner import hot_cold_planner
from torchrec_picasso.planner.explain import summarize
from torchrec_picasso.planner.planner import HotColdPlanner

SLOW = CommCurves.assumed(2, gbytes_per_s=0.001, latency_ms=0.1)
BATCH = 1024
TOWER_ROWS = {"wide": 50_000, "long": 80_000, "small": 20}


class Towers(nn.Module):
    """Two tables with large bags whose rows hardly repeat, one whose do, and dense layers."""

    def __init__(self) -> None:
        super().__init__()
        self.pooled = EmbeddingBagCollection(
            tables=configs_of(EmbeddingBagConfig, tables_of(TOWER_ROWS, 16)), device=META
        )
        self.over = nn.Linear(48, 500, device=META)


POOLING = {
    name: ParameterConstraints(pooling_factors=[pooling])
    for name, pooling in (("wide", 12.0), ("long", 9.0), ("small", 1.0))
}


def planned(model: nn.Module, **arguments: Any) -> tuple[HotColdPlanner, ShardingPlan]:
    planner = hot_cold_planner(topology(), batch_size=BATCH, debug=False, **arguments)
    return planner, planner.plan(model, [AbleSharder(), HotColdEmbeddingCollectionSharder()])


def params(plan: ShardingPlan) -> dict[str, HotColdParams]:
    return {
        table: placed.cache_params
        for module in plan.plan.values()
        for table, placed in module.items()  # type: ignore[attr-defined]
        if isinstance(placed.cache_params, HotColdParams)
    }


def test_all_tables_say_the_micro_batches_that_the_plan_was_priced_for() -> None:
    planner, plan = planned(Towers(), curves=SLOW, constraints=POOLING, dense_ms=2000.0)
    summary = summarize(planner.decision)
    assert summary["num_micro_batches"] in (2, 4, 8, 16)
    assert {of.num_micro_batches for of in params(plan).values()} == {summary["num_micro_batches"]}
    assert summary["dense_ms"] == pytest.approx(2000)
    assert summary["step_ms"] >= max(summary["wire_ms"], summary["compute_ms"])
    assert summary["compute_ms"] > 2000
    # where somebody else names the rows, the price is still known
    given, plan = planned(Towers(), curves=SLOW, constraints=POOLING, hot_rows=0, dense_ms=2000.0)
    found = {of.num_micro_batches for of in params(plan).values()}
    assert found == {given.decision.step.num_micro_batches} != {None}


def test_without_curves_a_plan_of_given_rows_says_nothing_of_micro_batches() -> None:
    _, plan = planned(Model(), stats=stats(), hot_rows=3)
    assert {of.num_micro_batches for of in params(plan).values()} == {None}


def test_the_dense_part_is_that_of_the_curves_unless_given() -> None:
    from dataclasses import replace

    from torchrec_picasso.cost.local import DenseTimes

    known = replace(
        SLOW, dense=DenseTimes(forward_ms=10.0, backward_ms=20.0, batch_size=BATCH // 2)
    )
    planner, _ = planned(Towers(), curves=known)
    assert planner.decision.dense.total_ms == pytest.approx(60)  # twice the samples
    assert planner.decision.dense.parameter_bytes == 4 * (48 * 500 + 500)
    given, _ = planned(Towers(), curves=known, dense_ms=7.0)
    assert given.decision.dense.total_ms == pytest.approx(7)
    unknown, _ = planned(Towers(), curves=SLOW)
    assert unknown.decision.dense.total_ms == 0
    with pytest.raises(PlanError, match="dense_ms is -1, expected milliseconds of at least 0"):
        planned(Towers(), dense_ms=-1)


def test_bags_are_placed_on_the_rank_that_pools_them() -> None:
    rows_planner, plan = planned(Towers(), curves=SLOW, constraints=POOLING, hot_rows=0)
    assert {of.form for of in params(plan).values()} == {"rows"}
    planner, plan = planned(Towers(), curves=SLOW, constraints=POOLING)
    forms = {name: of.form for name, of in params(plan).items()}
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
    _, plan = planned(Towers(), curves=curves, constraints=asked, hot_rows=hot_rows)
    forms = {name: of.form for name, of in params(plan).items()}
    assert (forms["wide"], forms["small"]) == ("rows", "bags")
    placed = plan.plan["pooled"]["small"]  # type: ignore[index]
    assert (placed.sharding_type, len(placed.ranks)) == ("table_wise", 1)


def test_hot_rows_of_constraints_stay_where_bags_would_be_cheaper() -> None:
    asked = _asking(wide=HotColdParams(hot_rows=[1, 5]))
    curves = CommCurves.assumed(2, gbytes_per_s=0.02)
    _, plan = planned(Towers(), curves=curves, constraints=asked)
    assert params(plan)["wide"].form == "rows"
    assert params(plan)["wide"].hot_rows.tolist() == [1, 5]
    assert params(plan)["long"].form == "bags"


def test_a_total_of_hot_rows_goes_past_tables_that_shall_take_bags() -> None:
    asked = {"b": ParameterConstraints(cache_params=HotColdParams(form="bags"))}
    _, plan = planned(Model(), stats=stats(), constraints=asked, hot_rows=2)
    assert {name: (of.form, of.num_hot_rows) for name, of in params(plan).items()} == {
        "a": ("rows", 1),
        "b": ("bags", 0),
        "c": ("rows", 1),
    }


def test_bags_that_cannot_be_had_are_refused() -> None:
    bags = HotColdParams(form="bags")
    with pytest.raises(PlanError, match="'wide', which cannot have hot rows: form='bags' was req"):
        planned(Towers(), constraints=_asking(wide=bags), stats=None, hot_rows={"wide": 1})
    asked = {"s": ParameterConstraints(cache_params=bags)}
    with pytest.raises(
        PlanError, match="'s', which cannot be hot/cold: form='bags' was requested, "
    ):
        planned(Model(sequence=True), constraints=asked)
    asked = {"a": ParameterConstraints(cache_params=bags, sharding_types=["row_wise"])}
    with pytest.raises(PlanError, match="chosen to be hot/cold, which needs table_wise"):
        planned(Model(), constraints=asked)


def test_sequences_never_take_bags() -> None:
    planner, plan = planned(Model(sequence=True), curves=SLOW, stats=None)
    facts = {fact.load.name: fact.no_bags for fact in planner.decision.tables}
    assert facts == {**dict.fromkeys(ROWS), "s": "its output is sequences, not bags"}
    assert params(plan)["s"].form == "rows"


class Processed(nn.Module):
    """The towers' tables behind position weights."""

    def __init__(self) -> None:
        super().__init__()
        self.pooled = FeatureProcessedEmbeddingBagCollection(
            EmbeddingBagCollection(
                tables=Towers().pooled.embedding_bag_configs(), is_weighted=True, device=META
            ),
            PositionWeightedModuleCollection({f"f_{name}": 20 for name in POOLING}, device=META),
        )


def _processed(**arguments: Any) -> tuple[HotColdPlanner, ShardingPlan]:
    planner = hot_cold_planner(topology(), batch_size=BATCH, debug=False, **arguments)
    sharder = HotColdFeatureProcessedEmbeddingBagCollectionSharder()
    return planner, planner.plan(Processed(), [sharder])


def test_tables_behind_feature_processors_take_rows_alone() -> None:
    """And only where constraints name row_wise: unasked, TorchRec does not offer it there."""
    either = dict.fromkeys(POOLING, ParameterConstraints(sharding_types=["row_wise", "table_wise"]))
    planner, plan = _processed(curves=SLOW, constraints=either, hot_rows=0)
    assert {name: of.form for name, of in params(plan).items()} == dict.fromkeys(POOLING, "rows")
    assert {fact.no_bags for fact in planner.decision.tables} == {
        "feature processors weight its lookups on the rank of the batch"
    }
    chosen, plan = _processed(curves=SLOW, constraints=either)
    assert all(fact.not_hot_cold is None for fact in chosen.decision.tables)
    _, plan = _processed(curves=SLOW)
    assert not params(plan)
    bags = ParameterConstraints(cache_params=HotColdParams(form="bags"))
    with pytest.raises(PlanError, match="form='bags' was requested, but feature processors weight"):
        _processed(constraints={"wide": bags})
