"""Linear ids as wide as they have to be, the hot slots that any rank's batch uses, and which packs
travel together or lie in one matrix."""

import random
from itertools import pairwise

import pytest
import torch

from torchrec_picasso.ops.ids import HotSlots, IdSpace, PackedTable, bits_to_words, flags_of
from torchrec_picasso.ops.pack_plan import PackPlan
from torchrec_picasso.placement import owner_pooled_waves

CPU = torch.device("cpu")


def test_ids_widen_when_the_space_does() -> None:
    hot = torch.empty(0, dtype=torch.int64)
    for rows, dtype in ((2**31 - 1, torch.int32), (2**31, torch.int64)):
        table = PackedTable(
            name="t", pack=0, dim=4, block_rows_W=(rows,), hot_rows_H=hot, feature_names=("f",)
        )
        space = IdSpace.build([table], CPU)
        assert space.id_dtype == dtype
        linear_N, _ = space.linearize(torch.tensor([rows - 1]), torch.tensor([1]))
        assert linear_N.tolist() == [rows - 1]


def test_any_integer_type_of_rows() -> None:
    hot = torch.tensor([1])
    tables = [
        PackedTable(name=n, pack=0, dim=4, block_rows_W=(2, 1), hot_rows_H=hot, feature_names=(n,))
        for n in "ab"
    ]
    space = IdSpace.build(tables, CPU)
    for dtype in (torch.int16, torch.int32, torch.int64):
        rows_N = torch.tensor([2, torch.iinfo(dtype).max, torch.iinfo(dtype).min, 2], dtype=dtype)
        linear_N, num_outside = space.linearize(rows_N, torch.tensor([1, 4]))
        assert num_outside == 2
        assert linear_N.tolist()[::3] == [2, 5]
        assert ((linear_N >= 0) & (linear_N < 6)).all()
        inside_N, num_outside = space.linearize(rows_N[[0, 3]], torch.tensor([1, 2]))
        assert num_outside == 0
        assert inside_N.tolist() == [2, 5]


@pytest.mark.parametrize("num_hot", [0, 1, 63, 64, 65, 200])
@pytest.mark.parametrize("num_parts", [1, 3])
def test_the_slots_of_bits_are_found_by_pack(num_hot: int, num_parts: int) -> None:
    rng = random.Random(num_hot)
    flags = torch.zeros(flags_of(num_hot, num_parts), dtype=torch.uint8)
    flags[:num_hot] = torch.tensor([rng.random() < 0.1 for _ in range(num_hot)])
    bits_X = bits_to_words(flags).numpy()
    assert len(bits_X) == num_parts * -(-num_hot // (64 * num_parts))
    slot_s = flags.nonzero().flatten()
    for starts in ((0, num_hot), (0, num_hot // 3, num_hot)):
        found = HotSlots(torch.arange(num_hot), starts).by_pack(bits_X)
        for (start, end), slots in zip(pairwise(starts), found, strict=True):
            expected = slot_s[(slot_s >= start) & (slot_s < end)] - start
            assert slots.tolist() == expected.tolist()


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
