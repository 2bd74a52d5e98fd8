"""Loads of ranks are counted by plan, and a run of stock with moved weights is another one."""

import pytest
import torch
from torch import nn

from benchmarks.hstu_losses import _parser, load, move_weights
from torchrec_picasso.app.launch.run_ranks import run_ranks
from torchrec_picasso.cost.stock import over_mean


def test_each_plan_serves_every_lookup_once() -> None:
    args = _parser().parse_args(["--model", "hstu_long_64"])
    loads = run_ranks(load, 2, args, timeout_s=300)[0]
    total = sum(loads["table_wise"])
    assert total > 0
    assert [sum(served_W) for served_W in loads.values()] == pytest.approx([total] * len(loads))
    assert over_mean(loads["column_wise"]) == pytest.approx(1.0)
    assert over_mean(loads["all_rows"]) < over_mean(loads["row_wise"])


def test_weights_move_by_a_unit_in_the_last_place() -> None:
    model = nn.Linear(100, 100)
    before = model.weight.detach().clone()
    move_weights(model, 50, seed=1)
    moved = model.weight != before
    assert 0 < moved.sum() < 500
    above = torch.nextafter(before, torch.tensor(torch.inf))
    torch.testing.assert_close(model.weight[moved], above[moved], rtol=0, atol=0)
