"""Ranks and tables that can exchange by host; all others are refused by name.

Words, sums and flags by host: what arrives, and what crosses hosts.
"""

import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchrec.distributed.sharding_plan import row_wise, table_wise

from tests.support.hosts import pretend_hosts
from tests.support.placing import CPU, place, wire_codecs, world_env
from tests.support.refusals import refusal
from tests.support.shared_run import run_once
from tests.support.tables import Table, bags_of
from tests.support.wire import MessageRecorder
from torchrec_picasso import CompatError, HotColdEmbeddingBagCollectionSharder, HotColdParams
from torchrec_picasso.app.launch.run_ranks import run_ranks
from torchrec_picasso.exchange.agreement import Flags
from torchrec_picasso.exchange.all_to_all import Ranks, connect
from torchrec_picasso.exchange.by_host import (
    FlagsAgreement,
    HostExchanges,
    connect_hosts,
    why_no_hosts,
)

BY_HOST = HotColdParams(form="node_rows")


@pytest.mark.parametrize(
    ("by_rank", "reason"),
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
def test_ranks_that_exchange_by_host(by_rank: Any, reason: str | None) -> None:
    found = why_no_hosts(by_rank)
    assert found is None if reason is None else (found or "").startswith(reason)


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
    messages = {}
    pretend_hosts(rank, 2)
    for name, args in {
        "rows beside": ({"t": BY_HOST, "u": HotColdParams()},),
        "bags beside": ({"t": BY_HOST, "u": HotColdParams(form="bags")},),
        "half wire": (all_by_host, "fp16"),
    }.items():
        messages[name] = refusal(CompatError, _shard, *args)
    pretend_hosts(rank, 4)
    messages["one host"] = refusal(CompatError, _shard, all_by_host)
    if rank == 3:  # all ranks are told, not only this one
        os.environ.pop("LOCAL_WORLD_SIZE")
    messages["not set"] = refusal(CompatError, _shard, all_by_host)
    messages["no CPU"] = refusal(CompatError, connect_hosts, dist.group.WORLD, None)
    return messages


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
    for messages in by_rank:
        for name, start in expected.items():
            assert messages[name].startswith(start), messages[name]


HOSTS = ((2, 2), (2, 4), (4, 2))
"""Numbers of hosts, and of ranks on each."""
SIZES = (1, 6, 1_003, 300_001)
"""Values of sums that are in progress together: fewer than places, uneven pieces, messages."""
NUM_WORDS = 75


def _values(rank: int, size: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(1000 * rank + size))


def _words(rank: int, world_size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(1 << 60, (world_size, NUM_WORDS), generator=generator)


def _exchange(rank: int, world_size: int, num_places: int) -> dict[str, Any]:
    pretend_hosts(rank, num_places)
    pg = dist.group.WORLD
    assert pg is not None
    connect(pg)
    connect_hosts(pg, CPU)
    exchanges, sums = HostExchanges(Ranks(pg)), []
    found: dict[str, Any] = {}
    for late in (0, world_size - 1):  # one rank comes late
        values = [_values(rank, size) for size in SIZES]
        with MessageRecorder() as recorder:
            pending = [exchanges.start_sum(value) for value in values]
            time.sleep(0.2 * (rank == late))
            for each in (*pending, *pending):
                each.wait()
        sums.append(values)
    found |= {"sums": sums, "sum messages": recorder.messages}
    with MessageRecorder() as recorder:
        words, found["words"] = exchanges.send_words(_words(rank, world_size))
        words.wait()
    found["word messages"] = recorder.messages
    with MessageRecorder() as recorder:
        found["flags"] = [
            _agree(exchanges, pg, rank, speaking, late)
            for late, speaking in enumerate([None, *range(world_size)], -1)
        ]
    return found | {"flag messages": recorder.messages}


def _agree(
    exchanges: HostExchanges, pg: dist.ProcessGroup, rank: int, speaking: int | None, late: int
) -> Flags:
    """Two ranks speak, or none, and one comes late; words in between start the second part."""
    time.sleep(0.02 * (rank == late))
    last = speaking is not None and rank == pg.size() - 1
    asked = FlagsAgreement(pg, CPU, Flags(homes_written=rank == speaking, refused=last))
    words, _ = exchanges.send_words(_words(rank, pg.size()).float())
    flags = asked.wait()
    words.wait()
    assert asked.wait() == flags, "once is enough"
    return flags


@pytest.mark.parametrize("hosts", HOSTS)
def test_sums_are_equal_on_all_ranks_and_cross_once_per_host(hosts: tuple[int, int]) -> None:
    (num_hosts, num_places), world_size = hosts, hosts[0] * hosts[1]
    by_rank = run_once(_exchange, world_size, num_places)
    first, *others = [each for found in by_rank for each in found["sums"]]
    for other in others:
        assert all(map(torch.equal, other, first))
    for size, values in zip(SIZES, first):
        expected = torch.stack([_values(rank, size) for rank in range(world_size)]).double().sum(0)
        torch.testing.assert_close(values, expected.float())
    reduced = inside = 0
    for rank, found in enumerate(by_rank):
        for message in found["sum messages"]:
            reduced += message.num_elements if message.to < 0 else 0
            inside += message.num_elements if message.to >= 0 else 0
            assert message.to < 0 or message.to // num_places == rank // num_places
    # over hosts each value is reduced once, by the ranks of one place; a ring of all ranks would
    # carry (W - 1) / W of it instead of (Y - 1) / Y out of each host
    assert reduced == num_hosts * sum(SIZES)
    # in each host a piece from each rank to each place, and back
    assert inside == num_hosts * 2 * (num_places - 1) * sum(SIZES)


@pytest.mark.parametrize("hosts", HOSTS)
def test_words_pass_relays(hosts: tuple[int, int]) -> None:
    (num_hosts, num_places), world_size = hosts, hosts[0] * hosts[1]
    sent = torch.stack([_words(rank, world_size) for rank in range(world_size)])
    for rank, found in enumerate(run_once(_exchange, world_size, num_places)):
        assert torch.equal(found["words"][:world_size], sent[:, rank])
        crossing = sum(
            message.num_elements
            for message in found["word messages"]
            if message.to // num_places != rank // num_places
        )
        assert crossing == (num_hosts - 1) * num_places * NUM_WORDS


@pytest.mark.parametrize("hosts", HOSTS)
def test_flags_are_equal_on_all_ranks_and_go_to_the_host_and_one_rank_of_each_other(
    hosts: tuple[int, int],
) -> None:
    (num_hosts, num_places), world_size = hosts, hosts[0] * hosts[1]
    for rank, found in enumerate(run_once(_exchange, world_size, num_places)):
        spoken = Flags(homes_written=True, refused=True)
        assert found["flags"] == [Flags(), *[spoken] * world_size]
        flags = [each for each in found["flag messages"] if each.dtype == "int64"]  # not words
        peers = {peer for peer in range(world_size) if peer // num_places == rank // num_places}
        peers |= set(range(rank % num_places, world_size, num_places))
        assert {each.to for each in flags} == peers - {rank}
        assert len(flags) == (1 + world_size) * (num_places + num_hosts - 2)
