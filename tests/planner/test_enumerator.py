"""Tables that get hot/cold options, in which order, and what is refused; which options are kept,
and replica memory counted as TorchRec counts the home's."""

import dataclasses
from typing import Any

import pytest
import torch
import torchrec
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.types import ParameterConstraints, ShardingOption
from torchrec.distributed.types import CacheAlgorithm, CacheParams

from tests.planner.samples import DIM, ROWS, AbleSharder, Model, stats, topology
from tests.sharding.jobs import RowWiseOnCpuSharder
from torchrec_picasso.cost import CommCurves
from torchrec_picasso.cost.table_work import HOT_ROW_BYTES
from torchrec_picasso.errors import PlanError
from torchrec_picasso.placement import HotColdParams
from torchrec_picasso.planner.decision import Decision
from torchrec_picasso.planner.enumerator import HotColdEnumerator
from torchrec_picasso.planner.hot_options import replica_bytes

SHARDERS = [AbleSharder(), EmbeddingCollectionSharder()]
Kinds = dict[str, set[tuple[str, str, Any]]]


def kinds(space: list[ShardingOption]) -> Kinds:
    """Sharding type, kernel and hot rows of the options of each table; None for a stock option."""
    found: Kinds = {}
    for o in space:
        hot = tuple(o.cache_params.hot_rows.tolist()) if o.cache_params is not None else None
        found.setdefault(o.name, set()).add((o.sharding_type, o.compute_kernel, hot))
    return found


def stock_kinds(model: nn.Module) -> Kinds:
    return kinds(EmbeddingEnumerator(topology(), 4).enumerate(model, SHARDERS))


def test_a_mapping_leaves_other_tables_the_stock_types_that_have_a_price() -> None:
    model = Model(sequence=True)
    found = kinds(HotColdEnumerator(topology(), 4, {"c": 2}, stats()).enumerate(model, SHARDERS))
    pooled = found.pop("a"), found.pop("b")
    priced = {"table_wise", "row_wise", "column_wise"}
    same = {kind for kind in stock_kinds(model)["a"] if kind[0] in priced}
    assert {kind[0] for kind in same} == priced
    assert pooled == (same, same)
    assert found == {"c": {("row_wise", "fused", (0, 1))}, "s": stock_kinds(model)["s"]}


def test_a_mapping_keeps_row_wise_shards_without_rows_out() -> None:
    space = HotColdEnumerator(topology(world_size=4), 4, {"b": 2}, stats())
    found = kinds(space.enumerate(Model(), [AbleSharder()]))
    assert "row_wise" in {kind[0] for kind in found["a"]}
    # c has 5 rows: blocks of 2, 2, 1 and 0
    assert {kind[0] for kind in found["c"]} == {"table_wise", "column_wise"}


@pytest.mark.parametrize("hot_rows", [None, {"c": 2}])
def test_types_without_a_price_are_taken_only_if_no_other_is_named(
    hot_rows: dict[str, int] | None,
) -> None:
    constraints = {
        "a": ParameterConstraints(sharding_types=["table_wise", "table_column_wise"]),
        "b": ParameterConstraints(sharding_types=["table_column_wise"]),
    }
    enumerator = HotColdEnumerator(topology(), 4, hot_rows, stats(), constraints=constraints)
    found = kinds(enumerator.enumerate(Model(), [AbleSharder()]))
    assert {kind[0] for kind in found["a"]} == {"table_wise"}
    assert {kind[0] for kind in found["b"]} == {"table_column_wise"}


@pytest.mark.parametrize("requested", [True, False])
def test_a_table_that_no_stock_type_suits_keeps_what_constraints_say(requested: bool) -> None:
    """The mapping leaves out a table of a requested placement, or of an optimizer that FBGEMM
    lacks on the CPU."""
    model = Model()
    constraints = {"a": ParameterConstraints(cache_params=HotColdParams())}
    if not requested:
        constraints = {}
        apply_optimizer_in_backward(torch.optim.Adam, model.parameters(), {"lr": 0.1})
    enumerator = HotColdEnumerator(topology(), 4, {"c": 2}, stats(), constraints=constraints)
    found = enumerator.enumerate(model, [AbleSharder()])
    assert kinds(found)["a"] == {("row_wise", "fused", () if requested else None)}


def test_the_stored_space_is_a_copy_with_the_hot_rows() -> None:
    enumerator = HotColdEnumerator(topology(), 4, 3, stats())
    assert enumerator.last_stored_search_space is None
    space = enumerator.enumerate(Model(), SHARDERS)
    stored = enumerator.last_stored_search_space
    assert kinds(stored) == kinds(space)
    space[0].shards[0].rank = 1
    assert stored[0].shards[0].rank is None


def test_the_order_does_not_follow_string_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    def order() -> list[tuple[str, str, str]]:
        space = HotColdEnumerator(topology("cuda"), 4, {"b": 1}).enumerate(Model(), SHARDERS)
        return [(o.name, o.sharding_type, o.compute_kernel) for o in space]

    usual = order()
    kernels = EmbeddingEnumerator._filter_compute_kernels
    types = EmbeddingEnumerator._filter_sharding_types
    monkeypatch.setattr(
        EmbeddingEnumerator, "_filter_compute_kernels", lambda *args: kernels(*args)[::-1]
    )
    monkeypatch.setattr(
        EmbeddingEnumerator, "_filter_sharding_types", lambda *args: types(*args)[::-1]
    )
    assert order() == usual


def test_memory_of_stock_tables_is_untouched() -> None:
    stock = EmbeddingEnumerator(topology(), 4).enumerate(Model(), SHARDERS)
    ours = HotColdEnumerator(topology(), 4, {"b": 1}).enumerate(Model(), SHARDERS)

    def storage(space: list[ShardingOption]) -> dict[tuple[str, str], Any]:
        return {(o.name, o.sharding_type): o.total_storage for o in space if o.name != "b"}

    assert {("a", "row_wise"), ("c", "table_wise")} <= {*storage(ours)}
    assert storage(ours).items() <= storage(stock).items()


@pytest.mark.parametrize("hot_rows", [0, 3, {"b": 1}])
def test_sharders_that_cannot_place_hot_rows_are_refused(hot_rows: Any) -> None:
    enumerator = HotColdEnumerator(topology(), 4, hot_rows, stats())
    for sharder in (EmbeddingBagCollectionSharder(), RowWiseOnCpuSharder()):
        with pytest.raises(PlanError, match=type(sharder).__name__):
            enumerator.enumerate(Model(), [sharder])


def test_a_named_table_elsewhere_is_refused_with_its_sharder() -> None:
    enumerator = HotColdEnumerator(topology(), 4, {"b": 1, "s": 1})
    message = (
        r"names table 's' of module 'sequence' \(EmbeddingCollection\), whose sharder "
        "EmbeddingCollectionSharder cannot place hot rows"
    )
    with pytest.raises(PlanError, match=message):
        enumerator.enumerate(Model(sequence=True), SHARDERS)


class UnableOnCpu(EmbeddingBagCollectionSharder):
    supports_hot_cold = True


def test_a_sharder_without_row_wise_is_named_as_the_cause() -> None:
    enumerator = HotColdEnumerator(topology(), 4, 0)
    with pytest.raises(PlanError, match=r"table 'a' .*TorchRec's own has no row_wise on CPU: pass"):
        enumerator.enumerate(Model(), [UnableOnCpu()])


def test_one_name_in_two_modules() -> None:
    twice = nn.ModuleDict({"left": Model(), "right": Model()})
    for hot_rows in (1, {"b": 1}):
        enumerator = HotColdEnumerator(topology(), 4, hot_rows, stats())
        with pytest.raises(PlanError, match=r"exists in module .*pooled' and in module .*pooled'"):
            enumerator.enumerate(twice, SHARDERS)
    no_replicas = HotColdEnumerator(topology(), 4, 0).enumerate(twice, SHARDERS)
    assert len(no_replicas) == 6
    assert all(isinstance(option.cache_params, HotColdParams) for option in no_replicas)


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
    bytes_per_row += HOT_ROW_BYTES
    without = row_wise_option({"b": 0}, model, device)
    half = row_wise_option({"b": 50}, model, device)
    assert replica_bytes(half) == 50 * bytes_per_row
    assert replica_bytes(without) == 0
    for before, after in zip(without.shards, half.shards, strict=True):
        grown = {
            kind: getattr(after.storage, kind) - getattr(before.storage, kind)
            for kind in ("hbm", "ddr", "ssd")
        }
        counts = 4 * before.size[0]  # uses of each home row, which hot rows need
        assert grown == {"hbm": 0, "ddr": 0, "ssd": 0} | {memory: 50 * bytes_per_row + counts}


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


def test_options_have_the_prices_of_the_cost_model() -> None:
    """A cost is a mean over two ranks, so the shards of an option have twice as much."""
    curves = CommCurves.assumed(2, gbytes_per_s=100.0)
    enumerator = HotColdEnumerator(topology(), 4, {"c": 0}, stats(), curves)
    space = enumerator.enumerate(Model(), [AbleSharder()])
    prices = dict(zip(ROWS, enumerator.decision.stock_costs))
    priced = [option for option in space if option.sharding_type in prices[option.name]]
    assert {option.sharding_type for option in priced} >= {"table_wise", "row_wise"}
    for option in priced:
        cost = prices[option.name][option.sharding_type]
        work_ms, ids_ms = cost.forward_ms + cost.backward_ms, cost.ids_ms + cost.ids_wire_ms
        expected = work_ms + ids_ms + cost.forward_wire_ms + cost.backward_wire_ms
        assert sum(each.perf.total for each in option.shards) == pytest.approx(2 * expected)


@pytest.mark.parametrize("hot_rows", [None, {"c": 2}])
@pytest.mark.parametrize(
    ("optimizer", "named", "offered"),
    [
        (torch.optim.SGD, False, True),
        (torchrec.optim.RowWiseAdagrad, False, False),
        (torchrec.optim.RowWiseAdagrad, True, True),
    ],
)
def test_types_that_train_another_model_must_be_named(
    optimizer: type, named: bool, offered: bool, hot_rows: dict[str, int] | None
) -> None:
    model = Model()
    apply_optimizer_in_backward(optimizer, model.parameters(), {"lr": 0.1})
    types = ParameterConstraints(sharding_types=["column_wise", "table_wise"])
    constraints = {"a": types} if named else None
    enumerator = HotColdEnumerator(topology(), 4, hot_rows, stats(), constraints=constraints)
    found = kinds(enumerator.enumerate(model, [AbleSharder()]))
    by_name = {table.load.name: table.stock_types for table in enumerator.decision.tables}
    assert ("column_wise" in by_name["a"]) == offered
    assert ("column_wise" in by_name["b"]) == (optimizer is torch.optim.SGD)
    assert not any("data_parallel" in types for types in by_name.values())
    if hot_rows is not None:  # a mapping leaves a to be stock
        assert ("column_wise" in {kind[0] for kind in found["a"]}) == offered


def _decided(**constraint: Any) -> Decision:
    """With a constraint on every table."""
    constraints = {name: ParameterConstraints(**constraint) for name in ROWS}
    enumerator = HotColdEnumerator(topology(), 4, None, constraints=constraints)
    enumerator.enumerate(Model(), [AbleSharder()])
    assert enumerator.decision is not None
    return enumerator.decision


def test_the_only_type_that_constraints_leave_has_a_price() -> None:
    decision = _decided(compute_kernels=["dense"])
    assert {table.stock_types for table in decision.tables} == {("data_parallel",)}
    assert set(decision.stock_types) == {"data_parallel"}
    assert decision.stock is not None


def test_lookups_are_those_of_the_constraints() -> None:
    usual = _decided(pooling_factors=[3.0])
    more = _decided(pooling_factors=[3.0], batch_sizes=[10], num_poolings=[2.0])
    for one, other in zip(usual.tables, more.tables):
        assert (one.load.bags, one.load.lookups) == (4.0, 12.0)
        assert (other.load.bags, other.load.lookups) == (20.0, 60.0)


def test_statistics_count_the_lookups_of_whole_samples() -> None:
    """A sample of a batch with own batch sizes may share its lookups with others, so the number of
    bags says nothing of lookups that were counted."""
    counted = dataclasses.replace(stats(), num_samples=11)
    constraints = {name: ParameterConstraints(batch_sizes=[10]) for name in ROWS}
    enumerator = HotColdEnumerator(topology(), 4, None, counted, constraints=constraints)
    enumerator.enumerate(Model(), [AbleSharder()])
    loads = {table.load.name: table.load for table in enumerator.decision.tables}
    assert loads["b"].lookups == pytest.approx(4 * 22 / 11)
    assert loads["b"].bags == 10.0


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


def test_constraints_without_row_wise_are_refused() -> None:
    message = r"table 'b' .* \[\('table_wise', 'fused'\)\]; either its constraints exclude it"
    with pytest.raises(PlanError, match=message):
        row_wise_option({"b": 1}, Model(), sharding_types=["table_wise"])
