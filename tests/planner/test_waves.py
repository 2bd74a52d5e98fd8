"""Tables are spread over waves of about equal volume, and only large groups are cut."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torchrec.distributed.planner.types import ParameterConstraints

from tests.planner.samples import ROWS, AbleSharder, Model, stats, topology
from torchrec_picasso.cost.table_work import TableLoad
from torchrec_picasso.errors import PlanError
from torchrec_picasso.placement import HotColdParams
from torchrec_picasso.planner import hot_cold_planner
from torchrec_picasso.planner.choice import TableInfo
from torchrec_picasso.planner.decision import balance_waves, decide
from torchrec_picasso.planner.table_info import assumed_curves

Volumes = list[tuple[int, float]]
"""Pack and elements of each table."""
VOLUMES = st.lists(st.tuples(st.integers(0, 3), st.floats(0, 1e6)), max_size=30)


@given(VOLUMES, st.integers(1, 6))
def test_waves_are_about_equal_and_a_pack_that_fits_one_is_kept_whole(
    tables: Volumes, num_waves: int
) -> None:
    waves = balance_waves(tables, num_waves)
    assert set(waves) <= set(range(num_waves))
    fair = sum(elements for _, elements in tables) / num_waves
    largest_unit = max((elements for _, elements in tables), default=0.0)
    for pack in {pack for pack, _ in tables}:
        places = [i for i, (of, _) in enumerate(tables) if of == pack]
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
        load = TableLoad(
            name=name, num_embeddings=1000, dim=dim, lookups=64, bags=64, module=module
        )
        return TableInfo(load=load)

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
    assert [of.wave for of in decision.placements if of] == [0, 1, 0, 1]


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
