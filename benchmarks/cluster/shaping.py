"""How one end of a link is held to its rate: a token bucket's size, and the packets it lets pass.

A bucket passes its content at once after a pause, so a large one makes small exchanges too cheap; a
bucket smaller than an offloaded packet (up to 64 KiB) is worse: the kernel cuts every packet into
frames, and that CPU time is taken from the ranks. So the bucket is 1 ms of the link's rate, at
least 32 KiB, and packets are limited to half of it. Measured, gloo all-reduce of 16 MB, 2 hosts:

    Mbit/s   bucket   packet   MB/s   CPU ms / MB
      1000   32 KiB   64 KiB     33   4.1           cut into frames
      1000  125 KiB   64 KiB    119   1.3
       100   32 KiB   64 KiB     11   9.7           cut into frames
       100   32 KiB   16 KiB     12   2.3
"""

from __future__ import annotations

from dataclasses import dataclass

_MIN_BURST_BYTES = 32 << 10
_BURST_S = 0.001
_MAX_PACKET_BYTES = 65536 - 1500  # the kernel's largest, less headers
_QUEUE_MS = 50  # above it packets are dropped, and TCP slows down


@dataclass(frozen=True, kw_only=True)
class LinkShape:
    """Settings of one end of a link.

    Args:
        rate_bit: Bits per second; ``None`` = as fast as the machine.
        burst_bytes: Bytes that pass at once after a pause.
        packet_bytes: Largest packet that TCP hands down in one piece.
    """

    rate_bit: int | None
    burst_bytes: int
    packet_bytes: int

    def commands(self, interface: str) -> list[tuple[str, ...]]:
        """Commands that shape what leaves ``interface``, and count it frame by frame."""
        if self.rate_bit is None:
            # a queue that only counts: without one, an offloaded packet counts as a single frame
            return [("tc", "qdisc", "add", "dev", interface, "root", "pfifo", "limit", "10000")]
        bucket = ("rate", f"{self.rate_bit}bit", "burst", f"{self.burst_bytes}b")
        queue = ("latency", f"{_QUEUE_MS}ms")
        return [
            ("ip", "link", "set", "dev", interface, "gso_max_size", str(self.packet_bytes)),
            ("tc", "qdisc", "add", "dev", interface, "root", "tbf", *bucket, *queue),
        ]


def link_shape(rate_mbit: float | None) -> LinkShape:
    """The shape of a link's ends for a rate.

    Raises:
        ValueError: If the rate is not positive.
    """
    if rate_mbit is None:
        return LinkShape(rate_bit=None, burst_bytes=0, packet_bytes=_MAX_PACKET_BYTES)
    rate_bit = int(rate_mbit * 1_000_000)
    if rate_bit < 8:
        raise ValueError(f"rate_mbit is {rate_mbit}; a link's rate is more than 0, None = unshaped")
    burst_bytes = max(_MIN_BURST_BYTES, int(rate_bit / 8 * _BURST_S))
    packet_bytes = min(_MAX_PACKET_BYTES, burst_bytes // 2)
    return LinkShape(rate_bit=rate_bit, burst_bytes=burst_bytes, packet_bytes=packet_bytes)
