"""The emulated cluster keeps its rate, counts its bytes, and leaves nothing behind."""

import json
import os
import signal
import socket
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.cluster import ClusterError, EmulatedCluster, why_unavailable
from benchmarks.cluster import namespaces as namespaces_module
from benchmarks.cluster.__main__ import main
from benchmarks.cluster.awake import cores_awake
from benchmarks.cluster.link_speed import TRANSFERS, link_bytes, time_transfer
from benchmarks.cluster.namespaces import tool_path
from benchmarks.cluster.shaping import link_shape
from tests.support.processes import wait_until
from torchrec_picasso.app.launch.run_ranks import RankError, run_ranks

TIMEOUT_S = 60.0
MISSING = why_unavailable()
needs_cluster = pytest.mark.skipif(MISSING is not None, reason=f"emulates no cluster: {MISSING}")

# Full Ethernet frames: 1448 bytes of payload, 66 of headers
HEADERS = 1514 / 1448


def whereabouts(rank: int, world_size: int) -> dict[str, Any]:
    total = torch.tensor([float(rank)])
    dist.all_reduce(total)
    return {
        "namespace": os.stat("/proc/thread-self/ns/net").st_ino,
        "local": (os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"]),
        "cores": os.sched_getaffinity(0),
        "total": total.item(),
    }


def last_rank_is_killed(rank: int, world_size: int) -> None:
    if rank == world_size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def wait_forever(rank: int, world_size: int) -> None:
    signal.pause()


def hold_a_cluster(connection: Connection) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a background process
    with EmulatedCluster(num_hosts=2, rate_mbit=100) as cluster:
        connection.send(namespaces(cluster))
        run_ranks(wait_forever, 2, timeout_s=TIMEOUT_S, on_start=cluster.on_start)


def namespaces(cluster: EmulatedCluster) -> set[int]:
    return {os.stat(host).st_ino for host in cluster.on_start.hosts}


def holders(inodes: set[int]) -> list[str]:
    """Processes inside the namespaces and descriptors of them; the kernel keeps no other."""
    found = []
    links = (f"net:[{inode}]" for inode in inodes)
    held = set(links)
    for process in Path("/proc").glob("[0-9]*"):
        for pattern in ("task/*/ns/net", "fd/*"):
            with suppress(OSError):  # it ended meanwhile
                for path in process.glob(pattern):
                    with suppress(OSError):
                        found += [str(path)] if os.readlink(path) in held else []
    return found


@needs_cluster
def test_ranks_live_on_their_hosts_and_reach_each_other() -> None:
    with EmulatedCluster(num_hosts=2, ranks_per_host=2) as cluster:
        results = run_ranks(whereabouts, 4, timeout_s=TIMEOUT_S, on_start=cluster.on_start)
        assert {result["namespace"] for result in results} == namespaces(cluster)
    assert [result["total"] for result in results] == [6.0] * 4
    assert [result["local"] for result in results] == [("0", "2"), ("1", "2")] * 2
    homes = [result["namespace"] for result in results]
    assert homes[0] == homes[1] != homes[2] == homes[3]
    assert os.stat("/proc/thread-self/ns/net").st_ino not in homes
    assert all(len(result["cores"]) == 1 for result in results)
    if len(os.sched_getaffinity(0)) >= 2:
        assert results[0]["cores"] != results[3]["cores"]


@needs_cluster
@pytest.mark.parametrize("transfer", ["sockets", "all-reduce"])
def test_a_link_keeps_its_rate_in_both_directions(transfer: str) -> None:
    rate_mbit, num_bytes, repeats = 100, 2_000_000, 9
    with EmulatedCluster(num_hosts=2, rate_mbit=rate_mbit) as cluster:
        run = (transfer, num_bytes, repeats)
        times = run_ranks(time_transfer, 2, *run, timeout_s=TIMEOUT_S, on_start=cluster.on_start)
        sent_bytes = cluster.sent_bytes()
    payload = link_bytes(transfer, num_bytes, num_hosts=2, ranks_per_host=1)
    ideal_s = payload * HEADERS * 8 / (rate_mbit * 1_000_000)
    # faster only by the bucket's 32 KiB, 1.6 % of the payload; slower where cores are shared
    median_s = max(time.median_s for time in times)
    assert 0.97 * ideal_s < median_s < 3 * ideal_s
    # above full frames: the handshake, acknowledgements, barriers, ends of messages
    wire = payload * HEADERS * (1 + repeats)
    assert all(wire <= sent < 1.03 * wire for sent in sent_bytes), (wire, sent_bytes)


def ring(rank: int, world_size: int, order: list[int]) -> str:
    """Sends 1 MB to the next rank of an order of ranks; returns the name of this host."""
    place = order.index(rank)
    sent = torch.zeros(250_000)
    sending = dist.isend(sent, order[(place + 1) % world_size])
    dist.recv(sent, order[place - 1])
    assert sending is not None
    sending.wait()
    dist.barrier()
    return socket.gethostname()


@needs_cluster
@pytest.mark.parametrize(("order", "crossings"), [([0, 1, 2, 3], 2), ([0, 2, 1, 3], 1)])
def test_racks_share_one_link(order: list[int], crossings: int) -> None:
    with EmulatedCluster(num_hosts=4, rate_mbit=200, racks=[0, 1, 0, 1]) as cluster:
        names = run_ranks(ring, 4, order, timeout_s=TIMEOUT_S, on_start=cluster.on_start)
        crossed = cluster.uplink_bytes()
    assert names == [f"host{host}" for host in range(4)]
    # both ways, with acknowledgements and what connecting took
    assert all(1e6 * HEADERS <= sent / crossings < 1.1e6 * HEADERS for sent in crossed), crossed


@needs_cluster
def test_nothing_is_left_after_a_rank_died() -> None:
    held: set[int] = set()
    clusters = []

    def kill_a_rank() -> None:
        with EmulatedCluster(num_hosts=2) as cluster:
            clusters.append(cluster)
            held.update(namespaces(cluster))
            assert holders(held)
            run_ranks(last_rank_is_killed, 2, timeout_s=TIMEOUT_S, on_start=cluster.on_start)

    with pytest.raises(RankError, match="rank 1 died"):
        kill_a_rank()
    assert held
    # the kernel may take a moment to end a thread that was joined
    wait_until(lambda: not holders(held), "namespaces let go")
    with pytest.raises(ClusterError, match="is not up; use it inside its `with` block"):
        clusters[0].sent_bytes()


@needs_cluster
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_when_the_maker_is_killed(end: signal.Signals) -> None:
    context = mp.get_context("forkserver")
    ours, theirs = context.Pipe()
    maker = context.Process(target=hold_a_cluster, args=(theirs,))
    maker.start()
    held = ours.recv()

    def inside() -> int:
        return sum("/ns/" in path for path in holders(held))

    wait_until(lambda: inside() >= 2, "both ranks are on their hosts")
    assert maker.pid is not None
    os.kill(maker.pid, end)
    maker.join(TIMEOUT_S)
    wait_until(lambda: not holders(held), "ranks and descriptors are gone")


@needs_cluster
def test_two_clusters_at_once_do_not_meet() -> None:
    with EmulatedCluster(num_hosts=2) as first:
        with EmulatedCluster(num_hosts=2) as second:
            assert not namespaces(first) & namespaces(second)
            run_ranks(whereabouts, 2, timeout_s=TIMEOUT_S, on_start=second.on_start)
            assert first.sent_bytes() == [0, 0]
            assert all(sent > 0 for sent in second.sent_bytes())
        run_ranks(whereabouts, 2, timeout_s=TIMEOUT_S, on_start=first.on_start)
        assert all(sent > 0 for sent in first.sent_bytes())


@needs_cluster
def test_missing_tools_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    descriptors = os.listdir("/proc/self/fd")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(namespaces_module, "_ADMIN_FOLDERS", ())
    assert why_unavailable() == "'ip' is not installed; install iproute2"
    assert os.listdir("/proc/self/fd") == descriptors


def test_a_tool_on_the_path_comes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for folder in ("path", "admin"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "tc").touch(0o755)
    (tmp_path / "admin" / "ip").touch(0o755)
    (tmp_path / "path" / "ip").touch(0o644)  # not a program
    (tmp_path / "path" / "bridge").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.setattr(namespaces_module, "_ADMIN_FOLDERS", (str(tmp_path / "admin"),))
    assert tool_path("tc") == str(tmp_path / "path" / "tc")
    assert tool_path("ip") == str(tmp_path / "admin" / "ip")
    with pytest.raises(ClusterError, match="'bridge' is not installed; install iproute2"):
        tool_path("bridge")


@needs_cluster
def test_a_missing_right_is_named() -> None:
    os.seteuid(65534)
    try:
        reason = why_unavailable()
    finally:
        os.seteuid(0)
    assert reason.startswith("cannot make a network namespace:")
    assert reason.endswith("; run as root")


@needs_cluster
def test_the_command_tells_all_transfers(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "cluster.json"
    options = ["--rate-mbit", "200", "--megabytes", "1", "--repeats", "1", "-o", str(file)]
    assert main(options) == 0
    written = json.loads(file.read_text())
    assert [each["transfer"] for each in written["transfers"]] == list(TRANSFERS)
    assert all(each["median_mb_per_s"] > 0 for each in written["transfers"])
    assert written["environment"]["date_utc"]
    assert written["question"]["rate_mbit"] == 200
    lines = capfd.readouterr().out.splitlines()
    assert lines[0] == "2 hosts x 1 ranks, 200 Mbit/s"
    assert [line.split()[0] for line in lines[2:]] == ["sockets", "all-to-all", "all-reduce"]


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"num_hosts": 0}, "num_hosts is 0; a cluster has 1 to 250 hosts"),
        ({"num_hosts": 2, "ranks_per_host": 0}, "ranks_per_host is 0; a host runs at least 1 rank"),
        ({"num_hosts": 2, "racks": [0, 2]}, "each of 2 hosts is in rack 0 or 1"),
        ({"num_hosts": 2, "rate_mbit": -1}, "rate_mbit is -1; a link's rate is more than 0"),
    ],
)
def test_impossible_clusters_are_refused(settings: dict[str, Any], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        EmulatedCluster(**settings)


@pytest.mark.parametrize("rate_mbit", [1, 100, 1000, 100_000])
def test_two_packets_fit_a_bucket(rate_mbit: int) -> None:
    shape = link_shape(rate_mbit)
    assert shape.rate_bit == rate_mbit * 1_000_000
    assert 2 * shape.packet_bytes <= shape.burst_bytes
    assert shape.burst_bytes <= max(32768, rate_mbit * 125)


@pytest.mark.parametrize(
    ("transfer", "hosts", "ranks_per_host", "expected"),
    [
        ("sockets", 2, 2, 16.0),
        ("all-to-all", 2, 1, 4.0),
        ("all-to-all", 2, 2, 8.0),
        ("all-reduce", 2, 1, 8.0),
        ("all-reduce", 4, 1, 12.0),
        ("all-to-all", 1, 4, 0.0),
    ],
)
def test_payload_of_a_link(transfer: str, hosts: int, ranks_per_host: int, expected: float) -> None:
    assert link_bytes(transfer, 8, hosts, ranks_per_host) == expected


def test_cores_stay_awake_and_nothing_is_left() -> None:
    if not hasattr(os, "SCHED_IDLE"):
        pytest.skip("this system has no SCHED_IDLE")
    with cores_awake() as pids:
        assert len(pids) == len(os.sched_getaffinity(0))
        idle = os.SCHED_IDLE
        wait_until(
            lambda: all(os.sched_getscheduler(pid) == idle for pid in pids),
            "they only run when nothing else wants to",
        )
        assert {core for pid in pids for core in os.sched_getaffinity(pid)} == (
            os.sched_getaffinity(0)
        )
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
