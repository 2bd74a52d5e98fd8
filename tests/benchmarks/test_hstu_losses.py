"""Loads of ranks are counted by plan and measured on hosts; a run of stock with moved weights is
another one; runs in windows resume and refresh hot rows, with stock's losses."""

from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.cluster import EmulatedCluster, why_unavailable
from benchmarks.hstu_losses import (
    OURS,
    STOCK,
    _parser,
    differences,
    load,
    measured_load,
    move_weights,
    train_windows,
)
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


@pytest.mark.skipif(why_unavailable() is not None, reason="emulates no cluster")
def test_hosts_send_what_others_receive() -> None:
    args = _parser().parse_args(["--model", "hstu_long_64"])
    with EmulatedCluster(2, 1000) as hosts:
        given = (measured_load, 2, args)
        found = run_ranks(*given, timeout_s=300, on_start=hosts.on_start)[0]
    for by_name in found.values():
        assert by_name["sent_mb"] == pytest.approx(by_name["received_mb"][::-1], rel=0.01)
    assert sum(found[OURS]["sent_mb"]) < sum(found["row_wise"]["sent_mb"]) / 2
    counted = run_ranks(load, 2, args, timeout_s=300)[0]
    assert found[OURS]["served_lookups"] == pytest.approx(counted[OURS])


def test_windows_resume_and_refresh_with_losses_of_stock(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "configs" / "hstu_stream.yaml").read_text()
    config = tmp_path / "windows.yaml"
    config.write_text(text.replace(": 128 ", ": 16 ").replace("_steps: 10 ", "_steps: 3 "))
    args = _parser().parse_args(f"--config {config} --steps 8 --hot-rows 300".split())
    stock, ours = (train_windows(args, kind, 0) for kind in (STOCK[0], OURS))
    assert max(differences(stock["losses"], ours["losses"])) < 1e-5
    assert len(ours["losses"]) == 8
    assert list(ours["aucs"]) == list(stock["aucs"]) == [3, 4, 6, 8]
    assert sum(ours["became_hot"].values()) > 0


def test_weights_move_by_a_unit_in_the_last_place() -> None:
    model = nn.Linear(100, 100)
    before = model.weight.detach().clone()
    move_weights(model, 50, seed=1)
    moved = model.weight != before
    assert 0 < moved.sum() < 500
    above = torch.nextafter(before, torch.tensor(torch.inf))
    torch.testing.assert_close(model.weight[moved], above[moved], rtol=0, atol=0)
