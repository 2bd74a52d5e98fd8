"""Counts of uses that fade."""

import pytest
import torch

from torchrec_picasso.storage.row_uses import RowUses


def test_a_use_counts_half_a_half_life_later() -> None:
    uses = RowUses(4, 2, torch.device("cpu"))
    for _ in range(3):
        uses.count(torch.tensor([0, 2, 0]), torch.tensor([1]))
        uses.fade(0.5)
    assert (uses.num_cold, uses.num_hot) == (9, 3)
    for _ in range(2):  # settled once or twice, they are the same
        uses.settle()
        assert uses.homes_n.tolist() == pytest.approx([1.75, 0, 0.875, 0])
        assert uses.replicas_h.tolist() == pytest.approx([0, 0.875])
    uses.count(torch.tensor([3], dtype=torch.int32), torch.tensor([], dtype=torch.int64))
    uses.fade(0.5)
    uses.settle()
    assert uses.homes_n.tolist() == pytest.approx([0.875, 0, 0.4375, 0.5])
    uses.begin_window()
    assert (uses.num_cold, uses.num_hot) == (0, 0)


def test_counts_stay_finite_however_seldom_they_are_settled() -> None:
    uses = RowUses(2, 0, torch.device("cpu"))
    nothing = torch.tensor([], dtype=torch.int64)
    for _ in range(300):  # 2^300 is beyond float32
        uses.count(torch.tensor([1]), nothing)
        uses.fade(0.5)
    uses.settle()
    assert uses.homes_n.tolist() == pytest.approx([0, 1.0])
