"""Which options are kept, and replica memory counted as TorchRec counts the home's."""

from typing import Any

import pytest
import torch
import torchrec
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec.distributed.planner.types import ParameterConstraints, ShardingOption
from torchrec.distributed.types import CacheAlgorithm, CacheParams

from tests.planner.samples import DIM, AbleSharder, Model, topology
from torchrec_picasso.errors import PlanError
from torchrec_picasso.placement import HotColdParams
from torchrec_picasso.planner.enumerator import HotColdEnumerator
from torchrec_picasso.planner.hot_options import replica_bytes

NO_ROWS = torch.empty(0, dtype=torch.int64)


def row_wise_option(
    hot_rows: dict[str, int], model: nn.Module, device: str = "cpu", **constraint: Any
) -> ShardingOption:
    """The row-wise fused option of table b."""
    constraints = {"b": ParameterConstraints(**constraint)} if constraint else None
    enumerator = HotColdEnumerator(topology(device), 4, hot_rows, constraints=constraints)
    (found,) = (
        option
        for option in enumerator.enumerate(model, [AbleSharder()])
        if option.name == "b"
        and (option.sharding_type, option.compute_kernel) == ("row_wise", "fused")
    )
    return found


@pytest.mark.parametrize(
    ("optimizer", "bytes_per_row"),
    [
        (None, 4 * DIM),
        (torch.optim.SGD, 4 * DIM),
        (torch.optim.Adagrad, 8 * DIM),
        (torchrec.optim.RowWiseAdagrad, 4 * DIM + 4),
        (torch.optim.Adam, 12 * DIM),
    ],
)
@pytest.mark.parametrize(("device", "memory"), [("cpu", "ddr"), ("cuda", "hbm")])
def test_replicas_are_charged_to_every_shard(
    optimizer: type | None, bytes_per_row: int, device: str, memory: str
) -> None:
    model = Model()
    if optimizer is not None:
        apply_optimizer_in_backward(optimizer, model.parameters(), {"lr": 0.1})
    without = row_wise_option({"b": 0}, model, device)
    half = row_wise_option({"b": 50}, model, device)
    assert replica_bytes(half) == 50 * bytes_per_row
    assert replica_bytes(without) == 0
    for before, after in zip(without.shards, half.shards, strict=True):
        grown = {
            kind: getattr(after.storage, kind) - getattr(before.storage, kind)
            for kind in ("hbm", "ddr", "ssd")
        }
        assert grown == {"hbm": 0, "ddr": 0, "ssd": 0} | {memory: 50 * bytes_per_row}


def test_replica_memory_agrees_with_torchrecs_for_the_home() -> None:
    # TorchRec charges a rank that holds all rows of b alone; its other charges depend on the batch
    # only, so they cancel in the difference of a model with and one without an optimizer
    plain, adagrad = Model(), Model()
    apply_optimizer_in_backward(torch.optim.Adagrad, adagrad.parameters(), {"lr": 0.1})
    home = [row_wise_option({"b": 0}, model).total_storage.ddr for model in (plain, adagrad)]
    replicas = [replica_bytes(row_wise_option({"b": 100}, model)) for model in (plain, adagrad)]
    assert replicas[1] - replicas[0] == home[1] - home[0]


def test_estimating_again_charges_once() -> None:
    enumerator = HotColdEnumerator(topology(), 4, {"b": 50})
    space = enumerator.enumerate(Model(), [AbleSharder()])
    before = [option.total_storage.ddr for option in space]
    enumerator.populate_estimates(space)
    assert [option.total_storage.ddr for option in space] == before


def test_other_cache_settings_are_kept() -> None:
    given = CacheParams(algorithm=CacheAlgorithm.LFU, load_factor=0.25, reserved_memory=3.0)
    option = row_wise_option({"b": 2}, Model(), cache_params=given)
    assert option.cache_params == HotColdParams(
        algorithm=CacheAlgorithm.LFU,
        load_factor=0.25,
        reserved_memory=3.0,
        hot_rows=torch.tensor([0, 1]),
    )
    assert not isinstance(given, HotColdParams)


@pytest.mark.parametrize("constraint", [{"sharding_types": ["table_wise"]}])
def test_constraints_without_row_wise_are_refused(constraint: dict[str, Any]) -> None:
    message = r"table 'b' .* \[\('table_wise', 'fused'\)\]; either its constraints exclude it"
    with pytest.raises(PlanError, match=message):
        row_wise_option({"b": 1}, Model(), **constraint)
