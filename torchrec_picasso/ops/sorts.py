"""Sorts of integers, and what follows from a sorted order.

Shape letters: N lookups, or other integers; n integers of a few values.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from torchrec_picasso.ops.ids import counting
from torchrec_picasso.ops.streams import kept_by_stream

_LEAST_RADIX = 1 << 15
"""torch sorts at least so many integers by radix, fewer by comparison."""
_RADIX_KEYS = {2**8 - 1: torch.uint8, 2**15 - 1: torch.int16}
"""Numbers of keys, and types that hold the keys and their number."""
_NUMPY_TYPES: dict[torch.dtype, type[np.generic]] = {
    torch.uint8: np.uint8,
    torch.int16: np.int16,
    torch.int64: np.int64,
}
_WORD_BITS = 63
_KEY_BITS = {torch.uint8: 8, torch.int16: 15, torch.int32: 31}


@cache
def is_intel() -> bool:
    """Whether the processor is one of Intel's; ``False`` where the system does not say.

    There numpy sorts with AVX-512: a million int32 with their positions take 30 to 55 ms by
    ``torch.sort`` and 16 ms as 64-bit words by numpy on one core of a 2.5 GHz Xeon, on one of an
    EPYC 12 and 50 ms.
    """
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.is_file() and "GenuineIntel" in cpuinfo.read_text()


def small_keys(keys_n: Tensor, num_keys: int) -> Tensor:
    """Converts integers ``0 .. num_keys - 1`` to the type that is sorted fastest."""
    # numpy sorts 8-bit and 16-bit integers by radix, wider ones by comparison; a GPU makes a pass
    # over the keys for each of their bytes.
    return keys_n.to(_radix_type(num_keys, keys_n.dtype))


def key_type(num_keys: int) -> type[np.generic]:
    """The type of numpy to which :func:`small_keys` converts, int64 for many keys."""
    return _NUMPY_TYPES[_radix_type(num_keys, torch.int64)]


def _radix_type(num_keys: int, otherwise: torch.dtype) -> torch.dtype:
    return next((dtype for most, dtype in _RADIX_KEYS.items() if num_keys <= most), otherwise)


def stable_order(keys_n: Tensor, num_keys: int) -> Tensor:
    """Computes the permutation, int64, that sorts integers ``0 .. num_keys - 1`` stably.

    On the CPU this is an O(n) radix sort by numpy, which torch lacks for small integers: 0.1
    instead of 1.3 ms for 22,000 keys below 9.
    """
    keys_n = small_keys(keys_n, num_keys)
    if keys_n.device.type == "cpu" and keys_n.dtype in _RADIX_KEYS.values():
        return torch.from_numpy(np.argsort(keys_n.numpy(), kind="stable"))
    return torch.argsort(keys_n, stable=True)


def sort_with_tags(keys_N: Tensor, tags_N: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Sorts integers, none below 0, that each carry a tag; equal integers are ordered by tag.

    Tags are int64 and ascend from 0; ``None`` = the positions ``0 .. N - 1``. Returns the sorted
    integers, in their own type, and their tags. On the CPU numpy sorts 64-bit words if keys and
    tags fit into these and torch is not faster; both are stable, so they give the same order.
    """
    torch_is_faster = keys_N.numel() >= _LEAST_RADIX and not is_intel()
    fits = keys_N.device.type == "cpu" and not torch_is_faster
    tag_bits = 0
    if fits and keys_N.numel():
        # Tags ascend, so the last tag is the largest and determines the number of tag bits.
        last = keys_N.numel() - 1 if tags_N is None else int(tags_N[-1])
        tag_bits = last.bit_length()
        fits = _KEY_BITS.get(keys_N.dtype, 64) + tag_bits <= _WORD_BITS
    if not fits:
        sorted_N, order_N = torch.sort(keys_N, stable=True)
        return sorted_N, order_N if tags_N is None else tags_N.index_select(0, order_N)
    # word = key << tag_bits | tag: a sort of words, stable or not, sorts by key, then tag.
    words = keys_N.numpy().astype(np.int64)
    words <<= tag_bits
    words |= np.arange(len(words)) if tags_N is None else tags_N.numpy()
    words.sort()
    tags = words & ((1 << tag_bits) - 1)
    words >>= tag_bits
    words = words.astype(keys_N.numpy().dtype, copy=False)
    return torch.from_numpy(words), torch.from_numpy(tags)


def first_of_runs(sorted_N: Tensor) -> Tensor:
    """Marks the first entry of each run of equal values, and the end: bool, ``(N + 1,)``."""
    first_N1 = torch.ones(sorted_N.numel() + 1, dtype=torch.bool, device=sorted_N.device)
    torch.ne(sorted_N[1:], sorted_N[:-1], out=first_N1[1:-1])
    return first_N1


def positions_of(order_n: Tensor) -> Tensor:
    """Returns the inverse of a permutation, int64: the position of each entry."""
    counting_n = counting(order_n.device, order_n.numel())
    return torch.empty_like(order_n).scatter_(0, order_n, counting_n)


def sort_by_segment(segment_n: Tensor, num_segments: int) -> tuple[Tensor, Tensor]:
    """Sorts rows stably by segment; returns their order and the count of each segment, int64."""
    keys_n = small_keys(segment_n, num_segments)
    if keys_n.device.type == "cpu":
        return stable_order(keys_n, num_segments), torch.bincount(keys_n, minlength=num_segments)
    sorted_n, order_n = torch.sort(keys_n, stable=True)
    # Differences of the segments' edges in the sorted segments; bincount would sync the host.
    edges = _edges_of_segments(segment_n.device, num_segments)
    return order_n, torch.diff(torch.searchsorted(sorted_n, edges))


@kept_by_stream
def _edges_of_segments(device: torch.device, num_segments: int) -> Tensor:
    return small_keys(torch.arange(num_segments + 1, device=device), num_segments)
