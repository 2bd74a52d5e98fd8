"""Which packs travel together, and which lie in one matrix."""

from __future__ import annotations

import torch

from torchrec_picasso.ops.ids import PackedTable
from torchrec_picasso.ops.pack_plan import PackPlan

NO_ROWS = torch.empty(0, dtype=torch.int64)


def _plan(dims_and_waves: list[tuple[int, int]], num_bag_packs: int = 0) -> PackPlan:
    """A pack of one table with two features for each dim and wave, then packs of bags."""
    of_bags = [
        PackedTable(
            name=f"b{pack}",
            pack=len(dims_and_waves) + pack,
            dim=4 * (pack + 1),
            block_rows_W=(3, 0),
            hot_rows_H=NO_ROWS,
            feature_names=(f"h{pack}",),
            as_bags=True,
        )
        for pack in range(num_bag_packs)
    ]
    return PackPlan.build(
        [
            PackedTable(
                name=f"t{pack}",
                pack=pack,
                dim=dim,
                wave=wave,
                block_rows_W=(3, 2),
                hot_rows_H=NO_ROWS,
                feature_names=(f"f{pack}", f"g{pack}"),
            )
            for pack, (dim, wave) in enumerate(dims_and_waves)
        ]
        + of_bags,
        torch.device("cpu"),
    )


def test_packs_of_a_wave_travel_together_and_waves_may_have_gaps() -> None:
    plan = _plan([(4, 0), (8, 0), (4, 2), (8, 5), (8, 5)])
    assert plan.waves == (slice(0, 2), slice(2, 3), slice(3, 5))


def test_neighbours_of_one_dim_share_a_matrix_across_waves() -> None:
    plan = _plan([(8, 0), (4, 0), (4, 1), (8, 1), (8, 2)])
    assert plan.matrices == (slice(0, 1), slice(1, 3), slice(3, 5))
    assert plan.features_M == (2, 4, 4)


def test_matrices_know_their_dim_and_waves_their_packs() -> None:
    plan = _plan([(8, 0), (4, 0), (4, 1), (8, 1)])
    assert plan.dim_M == (8, 4, 8)
    assert [plan.packs_of(wave) for wave in (None, 1, 2)] == [
        slice(0, 4),
        slice(2, 4),
        slice(4, 4),
    ]


def test_one_table_is_one_wave_and_one_matrix() -> None:
    plan = _plan([(4, 3)])
    assert plan.waves == plan.matrices == (slice(0, 1),)


def test_tables_of_a_pack_count_once() -> None:
    tables = [
        PackedTable(
            name=name,
            pack=pack,
            dim=4,
            block_rows_W=(2,),
            hot_rows_H=NO_ROWS,
            feature_names=(name,),
        )
        for name, pack in (("a", 0), ("b", 0), ("c", 1))
    ]
    plan = PackPlan.build(tables, torch.device("cpu"))
    assert plan.waves == plan.matrices == (slice(0, 2),)
    assert plan.features_M == (3,)


def test_bags_are_in_waves_of_their_own_four_at_most() -> None:
    plan = _plan([(4, 0), (8, 0)], num_bag_packs=3)
    assert plan.waves == (slice(0, 2), slice(2, 3), slice(3, 4), slice(4, 5))
    assert plan.num_row_waves == 1
    bags_alone = _plan([], num_bag_packs=6)
    assert bags_alone.waves == (slice(0, 1), slice(1, 3), slice(3, 4), slice(4, 6))
    assert bags_alone.num_row_waves == 0
    assert _plan([(4, 0), (4, 1)], num_bag_packs=1).num_row_waves == 2
