"""Makes and removes namespaces, their links and the bridge between them, by the ``ip`` command.

Names carry the maker's process id, so two clusters never collide, and what a killed process left
behind can be told from what is in use and swept at the next start.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

__all__ = ["ClusterError", "HOST_INTERFACE", "add_host", "host_name", "remove_all", "sweep"]

HOST_INTERFACE = "eth0"
"""Name of the one link inside every host."""

_PREFIX = "tpc"
_NAME = re.compile(rf"{_PREFIX}(\d+)[hbv]\d*")
_BITS_PER_MBIT = 1_000_000
# A bucket must hold what arrives between two timer ticks, and at least one offloaded 64 KiB packet
_MIN_BURST_BYTES = 128 << 10
_BURST_S = 0.002
_QUEUE_MS = 50


class ClusterError(RuntimeError):
    """The emulated cluster cannot be made; the message says what is missing."""


def why_unavailable() -> str | None:
    """What keeps this machine from emulating a cluster, or ``None``."""
    if os.name != "posix" or not Path("/proc/self/ns/net").exists():
        return "network namespaces are a feature of Linux"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not found; install iproute2"
    if os.geteuid() != 0:
        return "making network namespaces needs root"
    probe = f"{_PREFIX}{os.getpid()}h999"
    try:
        run("ip", "netns", "add", probe)
        run("ip", "-n", probe, "link", "set", "lo", "up")
        run("ip", "netns", "exec", probe, "tc", *_shaper("lo", 1000.0))
    except ClusterError as error:
        return str(error)
    finally:
        subprocess.run(["ip", "netns", "del", probe], capture_output=True, check=False)
    return None


def host_name(index: int) -> str:
    """Namespace of this process's host ``index``."""
    return f"{_PREFIX}{os.getpid()}h{index}"


def add_bridge() -> None:
    """Makes the switch that all hosts hang on."""
    run("ip", "link", "add", _bridge(), "type", "bridge")
    run("ip", "link", "set", _bridge(), "up")


def add_host(index: int, rate_mbit: float | None) -> None:
    """Makes one host with a link to the switch, shaped in both directions.

    Args:
        index: Host number; its address ends in ``index + 1``.
        rate_mbit: Link rate, Mbit/s; ``None`` = not shaped.
    """
    name, port = host_name(index), f"{_PREFIX}{os.getpid()}v{index}"
    run("ip", "netns", "add", name)
    run("ip", "link", "add", port, "type", "veth", "peer", "name", HOST_INTERFACE, "netns", name)
    run("ip", "link", "set", port, "master", _bridge(), "up")
    run("ip", "-n", name, "link", "set", "lo", "up")
    address = f"10.77.{index // 250}.{index % 250 + 1}/16"
    run("ip", "-n", name, "addr", "add", address, "dev", HOST_INTERFACE)
    run("ip", "-n", name, "link", "set", HOST_INTERFACE, "up")
    if rate_mbit is not None:
        run("ip", "netns", "exec", name, "tc", *_shaper(HOST_INTERFACE, rate_mbit))
        run("tc", *_shaper(port, rate_mbit))


def sent_bytes(index: int) -> int:
    """Bytes that a host put on its link so far, by the interface's counter, headers included."""
    path = f"/sys/class/net/{HOST_INTERFACE}/statistics/tx_bytes"
    # /sys shows the namespace of whoever mounted it; ip netns exec mounts its own
    return int(run("ip", "netns", "exec", host_name(index), "cat", path))


def remove_all(owner: int | None = None) -> None:
    """Removes everything a process made; its own by default. Never fails."""
    owner = owner or os.getpid()
    for name in _names("ip", "-o", "netns", "list"):
        if _owner(name) == owner:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    for name in _links():
        if _owner(name) == owner:
            subprocess.run(["ip", "link", "del", name], capture_output=True, check=False)


def sweep() -> None:
    """Removes what processes that no longer exist left behind."""
    names = [*_names("ip", "-o", "netns", "list"), *_links()]
    for owner in {_owner(name) for name in names} - {None}:
        assert owner is not None
        if not Path(f"/proc/{owner}").exists():
            remove_all(owner)


def run(*command: str) -> str:
    """Runs a command and returns its output.

    Raises:
        ClusterError: If it fails, with its own words.
    """
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        words = (done.stderr or done.stdout).strip().splitlines()
        raise ClusterError(
            f"`{' '.join(command)}` failed: {words[0] if words else done.returncode}"
        )
    return done.stdout


def _shaper(interface: str, rate_mbit: float) -> list[str]:
    burst = max(_MIN_BURST_BYTES, int(rate_mbit * _BITS_PER_MBIT / 8 * _BURST_S))
    rate = f"{int(rate_mbit * _BITS_PER_MBIT)}bit"
    return [
        *("qdisc", "add", "dev", interface, "root", "tbf"),
        *("rate", rate, "burst", str(burst), "latency", f"{_QUEUE_MS}ms"),
    ]


def _bridge() -> str:
    return f"{_PREFIX}{os.getpid()}b"


def _owner(name: str) -> int | None:
    found = _NAME.fullmatch(name)
    return int(found.group(1)) if found else None


def _names(*command: str) -> list[str]:
    try:
        return [line.split()[0] for line in run(*command).splitlines() if line.strip()]
    except (ClusterError, OSError):
        return []


def _links() -> list[str]:
    return [path.name for path in Path("/sys/class/net").iterdir()]
