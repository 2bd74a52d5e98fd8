"""Orders of hosts: the ring that is chosen, ranks that are numbered by it, what is refused.

Ranks of the same number train the same bits wherever they are, so a new order is compared exactly.
"""

import contextlib
import io
import itertools
import json
import os
import random
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.app.runs.tiny import tiny_run
from tests.support.hosts import pretend_hosts
from tests.support.refusals import refusal
from torchrec_picasso.app.cli.launcher import join_torchrun
from torchrec_picasso.app.cli.main import main
from torchrec_picasso.app.config import PipelineConfig
from torchrec_picasso.app.launch.host_ring import (
    HostRing,
    best_ring,
    measure_hosts,
    pair_times,
    tournament,
)
from torchrec_picasso.app.launch.rank_order import new_ranks
from torchrec_picasso.app.launch.run_ranks import run_ranks
from torchrec_picasso.app.runs.trainer import Trainer
from torchrec_picasso.app.zoo.registry import make_source
from torchrec_picasso.errors import ConfigError

TIMEOUT_S = 120.0


def times_of(racks: list[int], noise: float = 0.0) -> list[list[float]]:
    """Milliseconds of pairs: between racks twice those inside."""
    drawn = random.Random(0)
    times = [[0.0] * len(racks) for _ in racks]
    for host in range(len(racks)):
        for other in range(host):
            time = 10.0 * (1 + (racks[host] != racks[other])) * drawn.uniform(1, 1 + noise)
            times[host][other] = times[other][host] = time
    return times


@pytest.mark.parametrize("num_hosts", [4, 5, 8, 9, 16])
@pytest.mark.parametrize("num_racks", [2, 3])
def test_racks_are_found(num_hosts: int, num_racks: int) -> None:
    racks = [host % num_racks for host in range(num_hosts)]
    times = times_of(racks, noise=0.3)
    ring = best_ring(times)
    assert sorted(ring) == list(range(num_hosts))
    assert ring[0] == 0
    crossings = sum(racks[a] != racks[b] for a, b in zip(ring, ring[1:] + ring[:1]))
    assert crossings == num_racks

    def length(ring: list[int]) -> float:
        return sum(times[a][b] for a, b in zip(ring, ring[1:] + ring[:1]))

    for i, j in itertools.combinations(range(1, num_hosts + 1), 2):
        assert length(ring) < length(ring[:i] + ring[i:j][::-1] + ring[j:]) + 1e-6


@pytest.mark.parametrize("num_hosts", [4, 8, 9, 16])
def test_even_links_keep_the_order(num_hosts: int) -> None:
    assert best_ring(times_of([0] * num_hosts)) == list(range(num_hosts))
    half = num_hosts // 2
    assert best_ring(times_of([0] * half + [1] * (num_hosts - half))) == list(range(num_hosts))


@pytest.mark.parametrize(
    ("best_ms", "order"),
    [
        ([9.0, 9.4, 5.0], ["a", "c", "b", "d"]),
        ([9.6, 9.6, 9.6], ["a", "b", "c", "d"]),
        ([5.0, 5.0, 9.6], ["a", "b", "c", "d"]),  # one round may be chance
        ([], ["a", "b", "c", "d"]),
    ],
)
def test_noise_keeps_the_order(best_ms: list[float], order: list[str]) -> None:
    given_ms = [10.0] * len(best_ms)
    ring = HostRing(
        hosts=("a", "b", "c", "d"),
        num_bytes=1000,
        ring=[0, 2, 1, 3],
        given_ms=given_ms,
        best_ms=best_ms,
    )
    assert ring.order == order
    # of 4 ranks each sends 6/4 of the sum
    assert ring.sum_ms([10.0, 20.0, 90.0], num_bytes=2000, world_size=4) == 60.0


@pytest.mark.parametrize("capacity", [1, 2])
def test_a_link_that_only_many_hosts_fill_is_found(capacity: int) -> None:
    """Between racks, pairs share a link that as many as its capacity leave at full speed."""
    racks = [0, 1, 0, 1, 1, 1, 0, 0]

    def measure(exchanges: list[list[int]]) -> list[list[float]]:
        ms = []
        for partners in exchanges:
            crosses = [racks[host] != racks[other] for host, other in enumerate(partners)]
            slower = max(1.0, sum(crosses) / 2 / capacity)
            ms.append([10 * slower if cross else 10 for cross in crosses])
        return ms

    ring = best_ring(pair_times(8, measure))
    assert sum(racks[a] != racks[b] for a, b in zip(ring, ring[1:] + ring[:1])) == 2


@pytest.mark.parametrize("num_hosts", [2, 3, 4, 7, 8])
def test_each_two_hosts_meet_once(num_hosts: int) -> None:
    rounds = tournament(num_hosts)
    hosts = range(num_hosts)
    assert all(partners[partners[host]] == host for partners in rounds for host in hosts)
    for host in hosts:
        met = [partners[host] for partners in rounds if partners[host] != host]
        assert sorted(met) == [other for other in hosts if other != host]
        assert num_hosts % 2 or len(met) == len(rounds)


def answers(*hosts: str, order: list[str] | None = None) -> list[dict[str, Any]]:
    """Returns what ranks on these hosts tell."""
    return [
        {"host": host, "place": hosts[:rank].count(host), "order": order}
        for rank, host in enumerate(hosts)
    ]


def test_ranks_of_a_host_move_together() -> None:
    assert new_ranks(answers("a", "a", "b", "b", "b", "c")) == [0, 1, 2, 3, 4, 5]
    ranks = new_ranks(answers("a", "a", "b", "b", "b", "c", order=["c", "a", "b"]))
    assert ranks == [1, 2, 3, 4, 5, 0]


def test_what_does_not_fit_is_named() -> None:
    other = answers("a", "b", order=["a", "b"])
    other[1]["order"] = None
    twice = answers("a", "b", "b", order=["b", "a"])
    twice[2]["place"] = 0
    unread = answers("a", "b", order=["a", "b"])
    unread[1] = {"problem": "no such file"}
    found = [
        refusal(ConfigError, new_ranks, case)
        for case in (
            other,
            unread,
            twice,
            answers("a", "b", order=["a"]),
            answers("a", "b", order=["a", "b", "c"]),
        )
    ]
    advice = "; run `torchrec-picasso order` on the hosts at hand"
    assert [message.removeprefix("--rank-order: ") for message in found] == [
        "rank 1 has no order, rank 0 a, b; give all ranks the same file",
        "rank 1: no such file",
        "order of hosts: ranks of host b have LOCAL_RANK [0, 0], expected 0 to 1; start them with "
        "torchrun, and give each host a name of its own",
        "the file orders a, but this job has b" + advice,
        "the file orders a, b, c, but this job lacks c" + advice,
    ]


def trained(kind: str) -> list[float]:
    """Losses of this rank; a stock plan and pipeline, or ours."""
    pipeline = PipelineConfig(kind=kind, **({"num_micro_batches": 2} if kind != STOCK else {}))
    config = tiny_run(pipeline=pipeline)
    source = make_source(config.data, config.seed)
    trainer = Trainer(config, source, placement="row_wise" if kind == STOCK else None)
    batches = source.batches(dist.get_rank(), dist.get_world_size())
    return trainer.train(batches, 4).tolist()


STOCK = "sparse_dist"


def leave_group(rank: int, ranks_per_host: int) -> None:
    """Leaves the group, with the variables of torchrun on hosts named host0, host1 ..."""
    pretend_hosts(rank, ranks_per_host)
    socket.gethostname = lambda: f"host{rank // ranks_per_host}"
    port = [0]
    if rank == 0:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = [server.getsockname()[1]]
    dist.broadcast_object_list(port)
    dist.barrier()
    dist.destroy_process_group()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port[0]))


def in_orders(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    """Joins in the given order, another and ones that do not fit; by torchrun's number."""
    leave_group(rank, 2)
    found: dict[str, Any] = {}
    for name in ("given", "turned", "missing", "lacking"):
        os.environ["RANK"] = str(rank)
        file = {"given": None, "missing": str(folder / f"order{rank}.json")}
        try:
            join_torchrun(TIMEOUT_S, file.get(name, str(folder / f"{name}.json")))
        except ConfigError as error:
            found[name] = str(error)
            continue
        runs = [trained(kind) for kind in (STOCK, "interleaved")]
        found[name] = (dist.get_rank(), int(os.environ["RANK"]), runs)
        dist.barrier()
        dist.destroy_process_group()
    return found


def test_ranks_train_the_same_in_any_order(tmp_path: Path) -> None:
    for name, order in {"turned": ["host1", "host0"], "lacking": ["host0"]}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps({"order": order}))
    for rank in range(3):
        (tmp_path / f"order{rank}.json").write_text(json.dumps({"order": ["host0", "host1"]}))
    ranks = run_ranks(in_orders, 4, tmp_path, timeout_s=TIMEOUT_S)
    assert [found["given"][:2] for found in ranks] == [(0, 0), (1, 1), (2, 2), (3, 3)]
    assert [found["turned"][:2] for found in ranks] == [(2, 2), (3, 3), (0, 0), (1, 1)]
    assert [found["turned"][2] for found in ranks] == [
        ranks[(number + 2) % 4]["given"][2] for number in range(4)
    ]
    for name, words in (
        ("missing", "--rank-order: rank 3: "),
        ("lacking", "--rank-order: the file orders host0, but this job has host1"),
    ):
        (message,) = {found[name] for found in ranks}
        assert message.startswith(words)


def measured(rank: int, world_size: int, folder: Path) -> tuple[HostRing, list[int], str]:
    """Measures four hosts; returns the exit codes of ``order`` there, on two hosts and on four of
    one name, and what it printed."""
    ring = measure_hosts([f"host{host}" for host in range(world_size)], 4096)
    codes, printed = [], io.StringIO()
    for ranks_per_host in (1, 2):
        leave_group(rank, ranks_per_host)
        os.environ["RANK"] = str(rank)
        out = str(folder / f"{ranks_per_host}.json")
        with contextlib.redirect_stdout(printed):
            codes.append(main(["order", "-o", out, "--mib", "0.01"]))
        join_torchrun(TIMEOUT_S, out)
    leave_group(rank, 1)
    os.environ["RANK"], socket.gethostname = str(rank), lambda: "host"
    codes.append(main(["order", "-o", str(folder / "one name.json")]))
    return ring, codes, printed.getvalue()


def test_the_command_writes_an_order_that_ranks_join_in(tmp_path: Path) -> None:
    rings, codes, printed = zip(*run_ranks(measured, 4, tmp_path, timeout_s=TIMEOUT_S))
    assert codes == ([0, 0, 2],) * 4
    assert not (tmp_path / "one name.json").exists()
    assert rings.count(rings[0]) == 4
    pair_ms = torch.tensor(rings[0].pair_ms_YY)
    assert torch.equal(pair_ms, pair_ms.T)
    assert torch.equal(pair_ms == 0, torch.eye(4, dtype=torch.bool))
    assert len(rings[0].given_ms) == len(rings[0].best_ms) == 5
    text = "".join(printed)
    assert "ring of 4 hosts, 4 ranks" in text
    written = json.loads((tmp_path / "1.json").read_text())
    assert sorted(written["order"]) == [f"host{host}" for host in range(4)]
    assert f"wrote {tmp_path / '1.json'}: {', '.join(written['order'])}" in text
    assert "2 hosts: fewer than four have one ring, so their order stays" in text
    assert json.loads((tmp_path / "2.json").read_text())["order"] == ["host0", "host1"]
