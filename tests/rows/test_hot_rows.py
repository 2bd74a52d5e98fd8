"""Rows that enter a hot set, and rows that leave it."""

import pytest
import torch
from torch import Tensor

from torchrec_picasso import Refresh
from torchrec_picasso.errors import ConfigError
from torchrec_picasso.rows.hot_rows import PackUses, choose_swaps

HOT_USES = torch.tensor([9.0, 2.0, 5.0, 2.0])
IDS = torch.tensor([40, 10, 30, 20])
USES = torch.tensor([4.0, 8.0, 8.0, 2.4])


def counted(hot_uses: Tensor, ids: Tensor, uses: Tensor) -> PackUses:
    return PackUses(hot_uses_H=hot_uses, candidate_ids_C=ids, candidate_uses_C=uses)


def swaps(deviations: float = 1.0, most: int = 4) -> tuple[list[int], list[int]]:
    leaving, entering = choose_swaps(
        counted(HOT_USES, IDS, USES), num_batches=1e9, deviations=deviations, most=most
    )
    return leaving.tolist(), IDS[entering].tolist()


def test_the_most_used_enter_for_the_least_used() -> None:
    # slots 1 and 3 are used alike, and so are 10 and 30: the first of them come first
    assert swaps() == ([1, 3], [10, 30])
    assert swaps(most=1) == ([1], [10])
    assert swaps(deviations=1.9) == ([], [])  # (8 - 2) / sqrt(8 + 2)


def test_a_row_used_alike_does_not_enter() -> None:
    hot, ids = torch.tensor([100.0, 100.0]), torch.tensor([1, 2])
    alike = torch.tensor([130.0, 100.0])  # 30 more, of 15.2 by chance
    for deviations, expected in ((2.0, []), (1.9, [0])):
        leaving, entering = choose_swaps(
            counted(hot, ids, alike), num_batches=1e9, deviations=deviations, most=2
        )
        assert leaving.tolist() == entering.tolist() == expected


def test_a_row_of_every_batch_is_no_chance() -> None:
    hot, ids = torch.tensor([0.0]), torch.tensor([1])
    for uses, num_batches, enters in ((4.0, 4.0, True), (4.0, 40.0, False), (12.0, 40.0, True)):
        leaving, _ = choose_swaps(
            counted(hot, ids, torch.tensor([uses])), num_batches=num_batches, deviations=3.0, most=1
        )
        assert bool(leaving.numel()) is enters


def test_rows_hardly_used_are_no_candidates() -> None:
    leaving, _ = choose_swaps(
        counted(torch.zeros(2), torch.tensor([1]), torch.tensor([0.9])),
        num_batches=2,
        deviations=0.0,
        most=2,
    )
    assert leaving.numel() == 0


@pytest.mark.parametrize("seed", range(5))
def test_no_pair_is_left_that_should_have_changed(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def uses(count: int) -> Tensor:
        return torch.randint(0, 12, (count,), generator=generator).float()

    hot, cold = uses(20), uses(50)
    ids = torch.randperm(50, generator=generator)
    leaving, entering = choose_swaps(
        counted(hot, ids, cold), num_batches=1e9, deviations=1, most=20
    )
    stay = torch.ones(20, dtype=torch.bool).index_fill_(0, leaving, False)
    out = torch.ones(50, dtype=torch.bool).index_fill_(0, entering, False)
    assert len(set(leaving.tolist())) == len(set(entering.tolist())) == len(leaving)

    def by_chance(more: Tensor, less: Tensor) -> Tensor:
        return more - less <= (more + less).sqrt()

    assert not by_chance(cold[entering], hot[leaving]).any()
    if stay.any():
        assert by_chance(cold[out].max(), hot[stay].min())
    # the order in which homes name them changes nothing
    again = torch.randperm(50, generator=generator)
    left, entered = choose_swaps(
        counted(hot, ids[again], cold[again]), num_batches=1e9, deviations=1.0, most=20
    )
    assert left.tolist() == leaving.tolist()
    assert ids[again][entered].tolist() == ids[entering].tolist()


def test_a_policy_out_of_range_is_refused_with_every_problem() -> None:
    with pytest.raises(ConfigError, match="at least 1, got 0; deviations: expected at least 0"):
        Refresh(every_steps=0, deviations=-1)
    with pytest.raises(ConfigError, match="most_moved: expected more than 0, got 0"):
        Refresh(most_moved=0)
    assert Refresh(every_steps=10, half_life_steps=1).decay == 0.5
    assert Refresh(every_steps=10).decay == 0.5**0.1
