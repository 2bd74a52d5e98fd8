"""Plans come out of TorchRec's planner with the hot rows in them, the same on every rank."""

import re
from typing import Any

import pytest
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner
from torchrec.distributed.planner.proposers import GridSearchProposer
from torchrec.distributed.planner.types import ParameterConstraints, Topology
from torchrec.distributed.types import ShardingPlan

from tests.planner.samples import DIM, ROWS, AbleSharder, Model, stats, topology
from torchrec_picasso.app.launch.run_ranks import run_ranks
from torchrec_picasso.cost import CommCurves
from torchrec_picasso.errors import PlanError
from torchrec_picasso.placement import HotColdParams
from torchrec_picasso.planner import hot_cold_planner

SHARDERS = [AbleSharder(), EmbeddingCollectionSharder()]


def hot_rows_of(plan: ShardingPlan) -> dict[str, list[int] | None]:
    """Hot rows by table, None for a table that TorchRec places on its own."""
    return {
        table: placed.cache_params.hot_rows.tolist()
        if isinstance(placed.cache_params, HotColdParams)
        else None
        for module in plan.plan.values()
        for table, placed in module.items()
    }


@pytest.mark.parametrize(
    ("hot_rows", "expected"),
    [
        (0, {"a": [], "b": [], "c": []}),
        (3, {"a": [2], "b": [7, 50], "c": []}),
        (sum(ROWS.values()), {name: list(range(rows)) for name, rows in ROWS.items()}),
        ({"a": 3}, {"a": [0, 1, 2], "b": None, "c": None}),
        ({}, {"a": None, "b": None, "c": None}),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_plan_carries_the_hot_rows(hot_rows: Any, expected: Any, device: str) -> None:
    planner = hot_cold_planner(topology(device), stats(), hot_rows=hot_rows)
    assert isinstance(planner, EmbeddingShardingPlanner)
    plan = planner.plan(Model(sequence=True), SHARDERS)
    assert hot_rows_of(plan) == {**expected, "s": None}
    for table, placed in plan.plan["pooled"].items():
        if expected[table] is not None:
            assert placed.sharding_type == "row_wise"
            assert placed.compute_kernel == "fused"
            assert placed.ranks == [0, 1]


def test_replicas_that_do_not_fit_are_refused_by_the_planner() -> None:
    # each rank has room for all rows of the model once: its half of b and its batch fit, but not
    # with a replica of all of b beside them
    capacity = 4 * DIM * sum(ROWS.values())

    def plan(hot_rows: int) -> ShardingPlan:
        devices = Topology(world_size=2, compute_device="cpu", ddr_cap=capacity)
        planner = hot_cold_planner(devices, hot_rows={"b": hot_rows}, batch_size=1)
        return planner.plan(Model(), [AbleSharder()])

    assert hot_rows_of(plan(0))["b"] == []
    message = (
        r"table 'b' with [\d,]+, 3,200 of them replicas\. .* ddr_cap of .* at least [\d,]+, or "
        r"request at most \d+ hot rows instead of 100"
    )
    with pytest.raises(PlanError, match=message) as caught:
        plan(ROWS["b"])
    most = int(re.search(r"at most (\d+)", str(caught.value)).group(1))  # type: ignore[union-attr]
    assert hot_rows_of(plan(most))["b"] == list(range(most))


def test_replicas_of_uvm_homes_must_fit_in_hbm() -> None:
    in_uvm = {name: ParameterConstraints(compute_kernels=["fused_uvm"]) for name in ROWS}
    constraints = {**in_uvm, "b": ParameterConstraints(["row_wise"], ["fused_uvm"])}
    capacity = 4 * DIM * ROWS["b"]  # less than the home of b and its replicas together

    def plan(hot_rows: int, ddr_cap: int) -> ShardingPlan:
        devices = Topology(world_size=2, compute_device="cuda", hbm_cap=capacity, ddr_cap=ddr_cap)
        planner = hot_cold_planner(
            devices, hot_rows={"b": hot_rows}, batch_size=1, constraints=constraints
        )
        return planner.plan(Model(), [AbleSharder()])

    homes_alone = 4 * DIM * sum(ROWS.values())
    fits = plan(ROWS["b"] // 2, homes_alone)
    assert fits.plan["pooled"]["b"].compute_kernel == "fused_uvm"
    assert hot_rows_of(fits)["b"] == list(range(ROWS["b"] // 2))
    message = (
        r"bytes of hbm per rank.* 3,200 of them replicas\. .* hbm_cap of .* at least [\d,]+, or req"
    )
    with pytest.raises(PlanError, match=message):
        plan(ROWS["b"], homes_alone)


def test_arguments_reach_torchrec() -> None:
    proposer = GridSearchProposer()
    constraints = {"a": ParameterConstraints(sharding_types=["column_wise"])}
    planner = hot_cold_planner(
        topology(), hot_rows={"b": 1}, constraints=constraints, proposer=proposer, debug=False
    )
    assert planner._proposers == [proposer]
    plan = planner.plan(Model(), [AbleSharder()])
    assert plan.plan["pooled"]["a"].sharding_type == "column_wise"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"hot_rows": 0, "curves": 1}, "curves is a int, expected CommCurves"),
        ({"curves": CommCurves.assumed(1, gbytes_per_s=1)}, "curves are of 1 rank, without"),
        ({"hot_rows": 0, "stats": "s.parquet"}, "stats is a str, expected FrequencyStats"),
        ({"hot_rows": 0, "enumerator": 1}, "enumerator was given, but hot_cold_planner creates"),
    ],
)
def test_arguments_that_cannot_be_used(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        hot_cold_planner(topology(), **arguments)


def plan_together(rank: int, world_size: int) -> tuple[dict[str, Any], dict[str, Any], str]:
    model = Model(sequence=True)
    planner = hot_cold_planner(topology(), stats() if rank == 0 else None, hot_rows=3)
    plan = planner.collective_plan(model, SHARDERS)
    placed = {t: (p.sharding_type, p.ranks) for m in plan.plan.values() for t, p in m.items()}
    try:  # only rank 0 plans, but all must learn that it could not
        hot_cold_planner(topology(), hot_rows={"z": 1}).collective_plan(model, SHARDERS)
    except PlanError as error:
        return hot_rows_of(plan), placed, str(error)
    return hot_rows_of(plan), placed, "no error"


def test_every_rank_gets_the_plan_or_the_error() -> None:
    (hot, placed, error), other = run_ranks(plan_together, 2, timeout_s=120)
    assert hot == {"a": [2], "b": [7, 50], "c": [], "s": None}
    assert (hot, placed) == other[:2]
    assert error.startswith("hot_rows names table 'z'")
    assert other[2] == f"planning failed on rank 0: PlanError: {error}"
