"""Which packs travel together, and which lie in one matrix."""

import torch

from torchrec_picasso.ops.ids import PackedTable
from torchrec_picasso.ops.pack_plan import PackPlan
from torchrec_picasso.placement import owner_pooled_waves

NO_ROWS = torch.empty(0, dtype=torch.int64)


def _plan(
    dims_and_waves: list[tuple[int, int]], waves: list[slice] | None = None, module: int = 0
) -> PackPlan:
    """A pack of one table with two features for each dim and wave."""
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
                module=module,
            )
            for pack, (dim, wave) in enumerate(dims_and_waves)
        ],
        torch.device("cpu"),
        waves,
    )


def test_packs_of_a_wave_travel_together_and_waves_may_have_gaps() -> None:
    plan = _plan([(4, 0), (8, 0), (4, 2), (8, 5), (8, 5)])
    assert plan.waves == (slice(0, 2), slice(2, 3), slice(3, 5))


def test_neighbours_of_one_dim_share_a_matrix_across_waves() -> None:
    plan = _plan([(8, 0), (4, 0), (4, 1), (8, 1), (8, 2)])
    assert plan.matrices == (slice(0, 1), slice(1, 3), slice(3, 5))
    assert plan.features_M == (2, 4, 4)


def test_bags_are_in_waves_of_their_own_four_at_most() -> None:
    assert owner_pooled_waves(3) == [slice(0, 1), slice(1, 2), slice(2, 3)]
    assert owner_pooled_waves(6) == [slice(0, 1), slice(1, 3), slice(3, 4), slice(4, 6)]


def test_plans_of_routes_follow_each_other() -> None:
    rows, bags = _plan([(4, 0), (8, 0)]), _plan([(4, 0), (8, 0)], owner_pooled_waves(2), module=1)
    plan = PackPlan.joined([rows, bags, rows])
    assert plan.waves == (slice(0, 2), slice(2, 3), slice(3, 4), slice(4, 6))
    assert plan.matrices == tuple(slice(pack, pack + 1) for pack in range(6))
    assert plan.dim_M == (4, 8) * 3
    assert plan.modules == ((0, 1, 4, 5), (2, 3))
    assert plan.num_packs == 6
