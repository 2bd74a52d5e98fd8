"""Measures an emulated link: does it give its rate, and at what cost.

    python -m benchmarks.cluster --hosts 2 --rate-mbit 1000 -o cluster.json

Rates are per host and direction, of payload: 1 Gbit/s of full TCP frames carries 119.6 MB/s. CPU
seconds are those of a host's ranks, with the kernel's work for their packets. wire/payload is what
the link counted over what was handed in: headers, mostly. Dropped packets found a queue full.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.cluster.awake import cores_awake
from benchmarks.cluster.emulated import EmulatedCluster
from benchmarks.cluster.link_speed import TRANSFERS, TransferTime, link_bytes, time_transfer
from benchmarks.cluster.namespaces import ClusterError
from benchmarks.command import add_numbers, command_parser
from torchrec_picasso.app.cli.outputs import write_result
from torchrec_picasso.app.launch.run_ranks import run_ranks

_TIMEOUT_S = 600.0
_MB = 1_000_000
_HEADER = f"{'':12}{'MB/s':>8}{'worst':>8}{'CPU s/MB':>10}{'wire/payload':>14}{'dropped':>9}"


@dataclass(frozen=True, kw_only=True)
class LinkUse:
    """One kind of transfer over the links.

    Args:
        transfer: Kind of the transfer.
        median_mb_per_s: Payload per host and direction, median of the repeats.
        worst_mb_per_s: Payload rate of the slowest repeat.
        cpu_s_per_mb: CPU seconds of a host's ranks, with the kernel's work for their packets.
        wire_over_payload: Bytes that the link counted over bytes handed in.
        dropped_packets: Packets that the queues of all hosts dropped.
    """

    transfer: str
    median_mb_per_s: float
    worst_mb_per_s: float
    cpu_s_per_mb: float
    wire_over_payload: float
    dropped_packets: int


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table; returns 2 where the machine or the options allow no cluster."""
    options = _parser().parse_args(argv)
    try:
        hosts = EmulatedCluster(options.hosts, options.rate_mbit, options.ranks_per_host)
        with cores_awake(), hosts as cluster:
            rate = f"{cluster.rate_mbit:g} Mbit/s" if cluster.rate_mbit else "not shaped"
            print(f"{cluster.num_hosts} hosts x {cluster.ranks_per_host} ranks, {rate}")
            print(_HEADER)
            found = []
            for transfer in TRANSFERS:
                found.append(_measure(cluster, transfer, options.megabytes, options.repeats))
                print(_line(found[-1]), flush=True)
    except (ClusterError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.out is not None:
        question = {name: value for name, value in vars(options).items() if name != "out"}
        write_result({"question": question, "transfers": list(map(asdict, found))}, options.out)
    return 0


def _measure(cluster: EmulatedCluster, transfer: str, megabytes: int, repeats: int) -> LinkUse:
    align = 4 * cluster.world_size
    num_bytes = megabytes * _MB // align * align
    before = cluster.link_counters()
    times: list[TransferTime] = run_ranks(
        time_transfer,
        cluster.world_size,
        transfer,
        num_bytes,
        repeats,
        timeout_s=_TIMEOUT_S,
        on_start=cluster.on_start,
    )
    after = cluster.link_counters()
    payload = link_bytes(transfer, num_bytes, cluster.num_hosts, cluster.ranks_per_host)
    # the slowest rank's clock; the wire also carried the warm-up
    median_s, worst_s = max(t.median_s for t in times), max(t.worst_s for t in times)
    cpu_s = sum(t.cpu_s for t in times) / cluster.num_hosts
    wire = sum(a.sent_bytes - b.sent_bytes for a, b in zip(after, before)) / cluster.num_hosts
    dropped = sum(a.dropped_packets - b.dropped_packets for a, b in zip(after, before))
    return LinkUse(
        transfer=transfer,
        median_mb_per_s=payload / median_s / _MB,
        worst_mb_per_s=payload / worst_s / _MB,
        cpu_s_per_mb=cpu_s / payload * _MB,
        wire_over_payload=wire / payload / (repeats + 1),
        dropped_packets=dropped,
    )


def _line(use: LinkUse) -> str:
    return (
        f"{use.transfer:12}{use.median_mb_per_s:8.1f}{use.worst_mb_per_s:8.1f}"
        f"{use.cpu_s_per_mb:10.5f}{use.wire_over_payload:14.4f}{use.dropped_packets:9d}"
    )


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("benchmarks.cluster", __doc__)
    parser.add_argument("--rate-mbit", type=float, help="rate of each link (default: not shaped)")
    parser.add_argument("-o", "--out", type=Path, metavar="FILE", help="write all numbers as JSON")
    add_numbers(
        parser,
        ("--hosts", 2, 2, "hosts"),
        ("--ranks-per-host", 1, 1, "ranks that share a host's link"),
        ("--megabytes", 16, 1, "input of each rank"),
        ("--repeats", 5, 1, "timed repeats"),
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
