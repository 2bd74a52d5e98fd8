"""Which ranks can exchange by host, and which tables; all others are refused by name."""

import os
from typing import Any

import pytest
import torch.distributed as dist
from torchrec.distributed.sharding_plan import row_wise, table_wise

from tests.support.hosts import pretend_hosts
from tests.support.placing import CPU, place, wire_codecs, world_env
from tests.support.refusals import refusal
from tests.support.tables import Table, bags_of
from torchrec_picasso import CompatError, HotColdEmbeddingBagCollectionSharder, HotColdParams
from torchrec_picasso.app.launch.run_ranks import run_ranks
from torchrec_picasso.exchange.by_host import connect_hosts, why_no_hosts

BY_HOST = HotColdParams(form="node_rows")


@pytest.mark.parametrize(
    ("by_rank", "told"),
    [
        ([(2, 0), (2, 1), (2, 0), (2, 1)], None),
        ([(2, 0), (2, 1), (-1, 0), (2, 1)], "LOCAL_WORLD_SIZE is not set on all ranks"),
        ([(1, 0)] * 4, "each host has one rank"),
        ([(4, place) for place in range(4)], "all ranks are on one host"),
        ([(1, 0), (3, 0), (3, 1), (3, 2)], "hosts have 1 or 3 ranks"),
        ([(2, 0), (2, 0), (2, 1), (2, 1)], "ranks are not numbered host by host, 2 on each"),
        ([(3, 0), (3, 1), (3, 2), (3, 0)], "ranks are not numbered host by host, 3 on each"),
    ],
)
def test_ranks_that_exchange_by_host(by_rank: Any, told: str | None) -> None:
    found = why_no_hosts(by_rank)
    assert found is None if told is None else (found or "").startswith(told)


def _shard(params: dict[str, HotColdParams], wire: str | None = None) -> object:
    module = bags_of([Table("t", 8, 10, ("f",)), Table("u", 8, 10, ("g",))])
    sharder = HotColdEmbeddingBagCollectionSharder(qcomm_codecs_registry=wire_codecs(wire))
    ways = {
        name: table_wise(rank=0) if name in params and params[name].form == "bags" else row_wise()
        for name in ("t", "u")
    }
    plan = place(module, sharder, ways, params)
    return sharder.shard(module, plan, world_env(), CPU, "tables")


def _refuse(rank: int, world_size: int) -> dict[str, str]:
    all_by_host = {"t": BY_HOST, "u": BY_HOST}
    told = {}
    pretend_hosts(rank, 2)
    for name, args in {
        "rows beside": ({"t": BY_HOST, "u": HotColdParams()},),
        "bags beside": ({"t": BY_HOST, "u": HotColdParams(form="bags")},),
        "half wire": (all_by_host, "fp16"),
    }.items():
        told[name] = refusal(CompatError, _shard, *args)
    pretend_hosts(rank, 4)
    told["one host"] = refusal(CompatError, _shard, all_by_host)
    if rank == 3:  # all ranks are told, not only this one
        os.environ.pop("LOCAL_WORLD_SIZE")
    told["not set"] = refusal(CompatError, _shard, all_by_host)
    told["no CPU"] = refusal(CompatError, connect_hosts, dist.group.WORLD, None)
    return told


def test_what_is_not_built_is_refused_on_all_ranks() -> None:
    by_rank = run_ranks(_refuse, 4, timeout_s=60)
    beside = "table 't' has form='node_rows', table 'u' of the same module form="
    wire = "table 't' has form='node_rows', and its module a codec for rows or gradients"
    expected = {
        "rows beside": f"{beside}'rows'",
        "bags beside": f"{beside}'bags'",
        "half wire": wire,
        "one host": "form='node_rows' was given, but all ranks are on one host: use form='rows'",
        "not set": "form='node_rows' was given, but LOCAL_WORLD_SIZE is not set on all ranks",
        "no CPU": "form='node_rows' was given for tables on None; it is built and tested for",
    }
    for told in by_rank:
        for name, start in expected.items():
            assert told[name].startswith(start), told[name]
