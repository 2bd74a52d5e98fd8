"""Plans come out of TorchRec's planner with the hot rows in them, the same on every rank.

The decided plan is proposed as it is; TorchRec's proposers come where it does not fit. Tables are
spread over waves of about equal volume, and only large groups are cut. Tables with fewer rows than
ranks: no plan cuts them by rows, which FBGEMM could not train. Planning stays linear in the tables:
what is expensive is counted, and a plan timed beside stock; the figures of a machine are measured
by ``python -m benchmarks.planning_time``.
"""

import json
import logging
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torchrec import EmbeddingBagCollection
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.partitioners import GreedyPerfPartitioner
from torchrec.distributed.planner.proposers import (
    GreedyProposer,
    GridSearchProposer,
    UniformProposer,
)
from torchrec.distributed.planner.shard_estimators import EmbeddingStorageEstimator
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import ShardingPlan
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from benchmarks.planning_time import Workload, main, plan_ours
from tests.planner.samples import DIM, ROWS, AbleSharder, Model, stats, topology
from tests.support.tables import Table, bags_of, stats_of, tables_of
from torchrec_picasso import HotColdEmbeddingBagCollectionSharder, hot_cold_planner
from torchrec_picasso.app.launch.run_ranks import run_ranks
from torchrec_picasso.cost import CommCurves, LocalCosts
from torchrec_picasso.cost.local import PhaseCost, SideCosts
from torchrec_picasso.cost.table_work import HOT_ROW_BYTES, TableLoad
from torchrec_picasso.errors import PlanError
from torchrec_picasso.placement import HotColdParams
from torchrec_picasso.planner.choice import TableInfo
from torchrec_picasso.planner.decision import balance_waves, decide
from torchrec_picasso.planner.table_info import assumed_curves

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

    def plan(hot_rows: int, capacity: int = capacity) -> ShardingPlan:
        devices = Topology(world_size=2, compute_device="cpu", ddr_cap=capacity)
        planner = hot_cold_planner(devices, hot_rows={"b": hot_rows}, batch_size=1)
        return planner.plan(Model(), [AbleSharder()])

    assert hot_rows_of(plan(0))["b"] == []
    message = (
        r"on rank 0, .* table 'b' with [\d,]+, 9,600 of them replicas\. .* at least [\d,]+, or "
        r"request at most \d+ hot rows instead of 100"
    )
    with pytest.raises(PlanError, match=message) as caught:
        plan(ROWS["b"])
    most = int(re.search(r"at most (\d+)", str(caught.value)).group(1))  # type: ignore[union-attr]
    assert hot_rows_of(plan(most))["b"] == list(range(most))
    sufficient = int(re.search(r"at least ([\d,]+)", str(caught.value)).group(1).replace(",", ""))  # type: ignore[union-attr]
    assert len(hot_rows_of(plan(ROWS["b"], sufficient))["b"]) == ROWS["b"]
    with pytest.raises(PlanError, match=f"at least {sufficient:,}"):
        plan(ROWS["b"], sufficient - 2)


def test_home_blocks_of_equal_load_give_way_to_memory() -> None:
    """Equal load puts the last 80 % of the rows on one rank."""
    num_rows, counts = 10_000, torch.full((4_000,), 9)
    found = stats_of({"t": num_rows}, lambda rows: counts, 8, 100)

    def largest_block(share: float) -> int:
        """With memory for ``share`` of the table on each rank."""
        capacity = int(num_rows * 4 * DIM * share)
        devices = Topology(world_size=2, compute_device="cpu", ddr_cap=capacity)
        planner = hot_cold_planner(devices, found, hot_rows=0, batch_size=1, debug=False)
        model = nn.ModuleDict({"pooled": bags_of(tables_of({"t": num_rows}, DIM), "meta")})
        sharding = planner.plan(model, [AbleSharder()]).plan["pooled"]["t"]  # type: ignore[index]
        return max(shard.shard_sizes[0] for shard in sharding.sharding_spec.shards)

    assert largest_block(2.0) == pytest.approx(8_000, rel=0.01)
    assert 5_500 < largest_block(0.9) < 0.85 * 0.9 * num_rows
    assert largest_block(0.7) <= 5_950
    assert largest_block(0.55) == 5_000
    with pytest.raises(PlanError, match=r"bytes of ddr on rank 0, .* the largest is table 't'"):
        largest_block(0.45)


def test_replicas_of_uvm_homes_must_fit_in_hbm() -> None:
    in_uvm = {name: ParameterConstraints(compute_kernels=["fused_uvm"]) for name in ROWS}
    constraints = {**in_uvm, "b": ParameterConstraints(["row_wise"], ["fused_uvm"])}
    capacity = (4 * DIM + HOT_ROW_BYTES) * ROWS["b"]  # of the replicas of b, but for the batch

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
        r"bytes of hbm on rank 0.* 9,600 of them replicas\. .* hbm_cap of .* at least [\d,]+, or re"
    )
    with pytest.raises(PlanError, match=message):
        plan(ROWS["b"], homes_alone)


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


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts proposals placed and options estimated."""
    counted: Counter[str] = Counter()

    def count(owner: Any, name: str, what: Callable[..., int]) -> None:
        inner = getattr(owner, name)

        def counting(*args: Any, **kwargs: Any) -> Any:
            counted[name] += what(*args, **kwargs)
            return inner(*args, **kwargs)

        monkeypatch.setattr(owner, name, counting)

    count(GreedyPerfPartitioner, "partition", lambda *args, **kwargs: 1)
    count(EmbeddingStorageEstimator, "estimate", lambda self, options, **kwargs: len(options))
    return counted


@pytest.mark.parametrize("hot_rows", [None, 500])
def test_expensive_calls_grow_with_tables_alone(calls: Counter[str], hot_rows: int | None) -> None:
    found = []
    for num_tables in (15, 45):
        calls.clear()
        workload = Workload(num_tables=num_tables)
        plan_ours(workload, workload.stats(), hot_rows=hot_rows)
        assert calls["partition"] == 1
        assert calls["estimate"] <= 10 * num_tables
        found.append(dict(calls))
    assert found[1]["estimate"] <= 4 * found[0]["estimate"]


def test_the_benchmark_tells_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "time.json"
    assert main(["--tables", "3", "5", "--times", "1", "--json", str(out)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3
    planning = json.loads(out.read_text())["planning"]
    assert [line["num_tables"] for line in planning] == [3, 5]
    assert all(line[name] > 0 for line in planning for name in line)


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
def test_one_proposal_places_a_decided_plan(hot_rows: int | None, given_partitioner: bool) -> None:
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
    warned = [each for each in caplog.records if "does not fit into memory" in each.getMessage()]
    assert [(w.name, w.levelno) for w in warned] == [("torchrec_picasso.planner", logging.WARNING)]
    said = r"tables need [\d,]+ bytes of ddr on rank 0, .* is table 'b' .* to at least ([\d,]+)"
    found = re.search(said, warned[0].getMessage())
    assert found is not None
    sufficient = int(found.group(1).replace(",", ""))
    for cap, whole in ((sufficient, {"table_wise"}), (sufficient - 2, {"table_wise", "row_wise"})):
        small = Topology(world_size=2, compute_device="cpu", ddr_cap=cap, local_world_size=2)
        placed = hot_cold_planner(small, **asked).plan(Model(), [AbleSharder()])  # type: ignore[arg-type]
        assert {each.sharding_type for each in placed.plan["pooled"].values()} == whole  # type: ignore[attr-defined]


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
    assert {name: each.sharding_type for name, each in placed} == first


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_proposers_are_torchrecs_or_given(device: str) -> None:
    others = [type(other) for other in hot_cold_planner(topology(device), hot_rows=0)._proposers]
    assert others[-3:] == [GreedyProposer, GreedyProposer, UniformProposer]
    assert others[:-3] == ([GridSearchProposer] if device == "cuda" else [])
    own = GridSearchProposer()
    assert hot_cold_planner(topology(device), hot_rows=0, proposer=own)._proposers == [own]


def test_a_model_without_tables_has_an_empty_plan() -> None:
    planner = hot_cold_planner(topology(), hot_rows={})
    assert planner.plan(nn.Linear(1, 1), [AbleSharder()]).plan == {}


Volumes = list[tuple[int, float]]
"""Pack and elements of each table."""
VOLUMES = st.lists(st.tuples(st.integers(0, 3), st.floats(0, 1e6)), max_size=30)


@given(VOLUMES, st.integers(1, 6))
def test_waves_are_about_equal_and_small_packs_stay_whole(tables: Volumes, num_waves: int) -> None:
    waves = balance_waves(tables, num_waves)
    assert set(waves) <= set(range(num_waves))
    fair = sum(elements for _, elements in tables) / num_waves
    largest_unit = max((elements for _, elements in tables), default=0.0)
    for pack in {pack for pack, _ in tables}:
        places = [i for i, (each, _) in enumerate(tables) if each == pack]
        if (whole := sum(tables[i][1] for i in places)) <= fair:
            assert len({waves[i] for i in places}) == 1
            largest_unit = max(largest_unit, whole)
    filled = [0.0] * num_waves
    for wave, (_, elements) in zip(waves, tables):
        filled[wave] += elements
    # no wave is fuller than longest-first allows
    assert max(filled) <= (fair + largest_unit) * (1 + 1e-9)


def test_a_large_pack_is_cut_and_the_small_ones_fill_up() -> None:
    large = [("large", n) for n in (40.0, 30.0, 20.0, 10.0)]
    assert balance_waves([*large, ("small", 6.0), ("small", 6.0)], 2) == [0, 1, 1, 1, 0, 0]


def test_the_planner_gives_every_hot_cold_table_its_wave() -> None:
    planner = hot_cold_planner(topology(), stats(), hot_rows=3, batch_size=4, num_waves=2)
    plan = planner.plan(Model(), [AbleSharder()])
    waves = {
        name: sharding.cache_params.wave
        for module_plan in plan.plan.values()
        for name, sharding in module_plan.items()
    }
    assert set(waves.values()) == {0, 1}
    frame = planner.explain().set_index("table")
    assert frame["wave"].to_dict() == waves
    by_wave = frame.groupby("wave").size()
    assert by_wave.sum() == len(frame)


def test_every_module_has_waves_of_its_own() -> None:
    """Tables of two modules never share an exchange, so they do not balance each other."""

    def fact(name: str, module: str, dim: int) -> TableInfo:
        used: Any = {"num_embeddings": 1000, "lookups": 64, "bags": 64}
        return TableInfo(load=TableLoad(name=name, dim=dim, module=module, **used))

    facts = [fact(n, "user", 8) for n in "ab"] + [fact(n, "item", 16) for n in "cd"]
    decision = decide(
        facts,
        None,
        assumed_curves(topology()),
        world_size=2,
        batch_size=64,
        hot_rows=0,
        num_waves=2,
    )
    assert [each.wave for each in decision.placements if each] == [0, 1, 0, 1]


def test_gradients_of_hot_rows_count_in_waves() -> None:
    sizes = {"hot": 100, "b": 60, "c": 60}
    found = stats_of(sizes, lambda rows: torch.full((rows,), 100), 8, 512)
    used: Any = {"dim": 8, "lookups": 512, "bags": 512}
    tables = [
        TableInfo(load=TableLoad(name=name, num_embeddings=rows, spectrum=spectrum, **used))
        for name, rows in sizes.items()
        for spectrum in [found.table(name).spectrum]
    ]
    decision = decide(
        tables,
        found,
        assumed_curves(topology()),
        world_size=2,
        batch_size=512,
        hot_rows={"hot": 100, "b": 0, "c": 0},
        num_waves=2,
    )
    assert [each.wave for each in decision.placements if each] == [0, 1, 1]


def test_tables_that_share_a_name_have_waves_too() -> None:
    model = nn.ModuleList([Model().pooled, Model().pooled])
    planner = hot_cold_planner(topology(), hot_rows=0, batch_size=4, num_waves=2)
    plan = planner.plan(model, [AbleSharder()])
    for path in ("0", "1"):
        placed = plan.plan[path].values()  # type: ignore[attr-defined]
        assert {sharding.cache_params.wave for sharding in placed} == {0, 1}
    assert list(planner.explain()["table"]) == [*ROWS, *ROWS]


def test_waves_of_constraints_are_not_kept() -> None:
    fixed = ParameterConstraints(
        sharding_types=["row_wise"], cache_params=HotColdParams(hot_rows=[1], wave=7)
    )
    planner = hot_cold_planner(topology(), batch_size=4, constraints={"a": fixed})
    plan = planner.plan(Model(), [AbleSharder()])
    params = plan.plan["pooled"]["a"].cache_params
    assert (params.hot_rows.tolist(), params.wave) == ([1], 0)


def test_no_waves_are_refused() -> None:
    with pytest.raises(PlanError, match="num_waves is 0, expected at least 1"):
        hot_cold_planner(topology(), num_waves=0)


FEW_ROWS = {"one": 1, "two": 2, "three": 3, "five": 5, "many": 400}


def _collection() -> EmbeddingBagCollection:
    collection = bags_of((Table(n, 4, rows, (n,)) for n, rows in FEW_ROWS.items()), "meta")
    apply_optimizer_in_backward(RowWiseAdagrad, collection.parameters(), {"lr": 0.1})
    return collection


def _planner(world_size: int, **options: Any) -> Any:
    topology = Topology(world_size=world_size, compute_device="cpu")
    return hot_cold_planner(topology, hot_rows=None, batch_size=8, debug=False, **options)


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_what_has_no_rows_for_a_rank_stays_whole(world_size: int) -> None:
    planner = _planner(world_size)
    planner.plan(_collection(), [HotColdEmbeddingBagCollectionSharder()])
    for table in planner.decision.tables:
        num_rows = FEW_ROWS[table.load.name]
        per_rank = -(-num_rows // world_size)
        if per_rank * (world_size - 1) >= num_rows:
            assert "row_wise" not in table.stock_types


def test_it_is_cut_where_nothing_else_is_allowed() -> None:
    constraint = ParameterConstraints(sharding_types=["row_wise"], compute_kernels=["fused"])
    planner = _planner(4, constraints={"one": constraint})
    plan = planner.plan(_collection(), [HotColdEmbeddingBagCollectionSharder()])
    assert plan.plan[""]["one"].sharding_type == "row_wise"
