"""Which tables get hot/cold options, in which order, and what is refused."""

from typing import Any

import pytest
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.types import ShardingOption

from tests.planner.samples import AbleSharder, Model, RowWiseOnCpuSharder, stats, topology
from torchrec_picasso.errors import PlanError
from torchrec_picasso.placement import HotColdParams
from torchrec_picasso.planner import HotColdEnumerator

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


def test_a_mapping_leaves_other_tables_stock() -> None:
    model = Model(sequence=True)
    found = kinds(HotColdEnumerator(topology(), 4, {"c": 2}, stats()).enumerate(model, SHARDERS))
    assert found == stock_kinds(model) | {"c": {("row_wise", "fused", (0, 1))}}


def test_the_stored_space_is_a_copy_with_the_hot_rows() -> None:
    enumerator = HotColdEnumerator(topology(), 4, 3, stats())
    assert enumerator.last_stored_search_space is None
    space = enumerator.enumerate(Model(), SHARDERS)
    stored = enumerator.last_stored_search_space
    assert stored is not None
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

    assert storage(ours) == storage(stock)


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
