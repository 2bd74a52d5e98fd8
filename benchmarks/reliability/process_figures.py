"""Resources of a process: memory, Python objects, file descriptors, threads; their growth.

Read from ``/proc`` and the garbage collector, so it asks nothing of what is measured. Linux only.
"""

from __future__ import annotations

import ctypes
import gc
import os
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch

FIGURES = ("rss_kib", "heap_kib", "objects", "tensors", "descriptors", "threads")
"""Names of the :func:`figures`, in their order."""

Held = dict[str, Counter[str]]
"""Descriptors and threads, by what they are."""


class _MallocInfo(ctypes.Structure):
    """glibc's ``struct mallinfo2``."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


_LIBC = ctypes.CDLL(None)
if hasattr(_LIBC, "mallinfo2"):
    _LIBC.mallinfo2.restype = _MallocInfo

_STILL_TRIES, _STILL_S = 40, 0.05
_PAGE_KIB = os.sysconf("SC_PAGE_SIZE") / 1024


def figures() -> tuple[float, ...]:
    """Resident KiB; then, with garbage collected, heap, objects, tensors, descriptors, threads."""
    resident_kib = rss_kib()
    gc.collect()
    used_kib = heap_kib()
    objects = gc.get_objects()
    num_tensors = sum(issubclass(type(one), torch.Tensor) for one in objects)
    held = sum(open_files().values()), sum(threads().values())
    return resident_kib, used_kib, float(len(objects)), float(num_tensors), *map(float, held)


def rss_kib() -> float:
    """Memory of this process that is resident."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_KIB


def heap_kib() -> float:
    """Memory that malloc has given out, 0 where it does not tell (glibc before 2.33, others).

    Freed memory that is still resident is left out, and Python's own small objects.
    """
    if not hasattr(_LIBC, "mallinfo2"):
        return 0.0
    info = _LIBC.mallinfo2()
    return float(info.uordblks + info.hblkhd) / 1024


def open_files() -> Counter[str]:
    """Open file descriptors by what they are: ``socket``, ``pipe``, a file's name, ..."""
    found: Counter[str] = Counter()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:  # the listing's own
            continue
        found[Path(target).name if target.startswith("/") else target.split(":[")[0]] += 1
    return found


def threads() -> Counter[str]:
    """Threads by name, without autograd's: a torch with CUDA keeps some from a first use on."""
    found: Counter[str] = Counter()
    for folder in Path("/proc/self/task").iterdir():
        try:
            found[(folder / "comm").read_text().strip()] += 1
        except (FileNotFoundError, ProcessLookupError):  # it has just ended
            continue
    return Counter({name: n for name, n in found.items() if not name.startswith("pt_autograd_")})


def held() -> Held:
    """Open descriptors and running threads, as soon as nothing changes for a moment.

    A thread that has done its work takes one to end.
    """
    found: Held = {}
    for _ in range(_STILL_TRIES):
        before, found = found, {"descriptors": open_files(), "threads": threads()}
        if found == before:
            break
        time.sleep(_STILL_S)
    return found


def slope(at: Sequence[float], values: Sequence[float]) -> float:
    """Growth per step, by least squares."""
    at_n = torch.tensor(at, dtype=torch.float64)
    values_n = torch.tensor(values, dtype=torch.float64)
    from_mean_n = at_n - at_n.mean()
    return float((from_mean_n * (values_n - values_n.mean())).sum() / from_mean_n.square().sum())
