"""The decided plan is proposed as it is; TorchRec's proposers come where it does not fit."""

import logging

import pytest
from torch import nn
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.partitioners import GreedyPerfPartitioner
from torchrec.distributed.planner.proposers import (
    GreedyProposer,
    GridSearchProposer,
    UniformProposer,
)
from torchrec.distributed.planner.types import ParameterConstraints

from benchmarks.planning_time import Workload
from tests.planner.samples import DIM, ROWS, AbleSharder, Model, topology
from torchrec_picasso.cost import CommCurves, LocalCosts
from torchrec_picasso.cost.local import PhaseCost, SideCosts
from torchrec_picasso.placement import HotColdParams
from torchrec_picasso.planner import hot_cold_planner

STOCK = CommCurves(
    world_size=2,
    backend="test",
    device="cpu",
    collectives=CommCurves.assumed(2, gbytes_per_s=1000.0, latency_ms=0.001).collectives,
    local=LocalCosts(hot_cold=SideCosts(forward=PhaseCost(fixed_ms=1000.0)), stock=SideCosts()),
)
"""The exchange costs a second, and work nothing: every table is stock, and whole."""


@pytest.mark.parametrize("given_partitioner", [False, True])
@pytest.mark.parametrize("hot_rows", [None, 500])
def test_one_proposal_places_the_decided_plan(
    hot_rows: int | None, given_partitioner: bool
) -> None:
    workload = Workload(num_tables=24, seed=3)
    own = {"partitioner": GreedyPerfPartitioner()} if given_partitioner else {}
    planner = hot_cold_planner(
        workload.topology(), workload.stats(), hot_rows=hot_rows, batch_size=2048, **own
    )
    plan = planner.plan(workload.model(), [AbleSharder()])
    assert planner._num_proposals == 1
    frame = planner.explain().set_index("table")
    placed = next(iter(plan.plan.values()))
    for name, line in frame.iterrows():
        sharding = placed[name]  # type: ignore[index]
        if line["placement"] == "hot_cold":
            assert isinstance(sharding.cache_params, HotColdParams)
            assert sharding.cache_params.form == line["form"]
        else:
            assert sharding.sharding_type == line["placement"]


def test_a_plan_that_does_not_fit_gives_way_to_torchrecs_proposers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    # a rank has room for half of table b beside the others, and not for all of it
    room = 4 * DIM * ROWS["b"]
    small = Topology(world_size=2, compute_device="cpu", ddr_cap=room, local_world_size=2)
    kinds = ParameterConstraints(sharding_types=["table_wise", "row_wise"])
    asked = {"curves": STOCK, "batch_size": 1, "constraints": dict.fromkeys(ROWS, kinds)}
    planner = hot_cold_planner(small, **asked)  # type: ignore[arg-type]
    plan = planner.plan(Model(), [AbleSharder()])
    assert set(planner.explain()["placement"]) == {"table_wise"}
    assert plan.plan["pooled"]["b"].sharding_type == "row_wise"  # type: ignore[index]
    assert planner._num_proposals > 1
    with_room = hot_cold_planner(topology(), **asked)  # type: ignore[arg-type]
    placed = with_room.plan(Model(), [AbleSharder()]).plan["pooled"]
    assert {of.sharding_type for of in placed.values()} == {"table_wise"}  # type: ignore[attr-defined]
    warned = [of for of in caplog.records if "does not fit into memory" in of.getMessage()]
    assert [(of.name, of.levelno) for of in warned] == [
        ("torchrec_picasso.planner", logging.WARNING)
    ]


def test_tables_that_are_not_named_take_what_torchrec_rates_fastest() -> None:
    planner = hot_cold_planner(topology(), hot_rows={"a": 1})
    plan = planner.plan(Model(), [AbleSharder()])
    assert planner._num_proposals == 1
    planner._enumerator.only_decided = False
    space = planner._enumerator.enumerate(Model(), [AbleSharder()])
    greedy = GreedyProposer()
    greedy.load(space)
    first = {option.name: option.sharding_type for option in greedy.propose() or []}
    placed = plan.plan["pooled"].items()  # type: ignore[attr-defined]
    assert {name: of.sharding_type for name, of in placed} == first


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_proposers_are_torchrecs(device: str) -> None:
    others = [type(other) for other in hot_cold_planner(topology(device), hot_rows=0)._proposers]
    assert others[-3:] == [GreedyProposer, GreedyProposer, UniformProposer]
    assert others[:-3] == ([GridSearchProposer] if device == "cuda" else [])


def test_a_model_without_tables_has_an_empty_plan() -> None:
    planner = hot_cold_planner(topology(), hot_rows={})
    assert planner.plan(nn.Linear(1, 1), [AbleSharder()]).plan == {}
