"""Sorts of integers, on the CPU by the faster one of numpy and torch, and unique rows by one sort.

A million int32 with their positions take 30 to 55 ms by ``torch.sort`` and 16 ms as 64-bit words by
numpy on one core of a 2.5 GHz Xeon, where numpy sorts with AVX-512; on one of an EPYC 12 and 50 ms.
Both are stable, so they give the same order.

One sort of a batch's ids gives the distinct ids, the row of every lookup (forward gather) and the
lookups of every row (backward reduction). ``torch.unique`` sorts too but discards the second map,
and backward then needs another sort or scattered adds: on one core, 106,496 Criteo lookups of D=128
took 23 ms by ``index_add_`` and 10 ms by the gather over this map.

Source: PICASSO (arXiv 2204.04903), Unique&Partition.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

_LEAST_RADIX = 1 << 15
"""torch sorts at least so many integers by radix, fewer by comparison."""
_RADIX_KEYS = {2**8: torch.uint8, 2**15: torch.int16}
_WORD_BITS = 63
_KEY_BITS = {torch.uint8: 8, torch.int16: 15, torch.int32: 31}


@cache
def is_intel() -> bool:
    """Whether the processor is one of Intel's; ``False`` where the system does not say.

    There numpy's sorts run on AVX-512 and outrun torch's, and FBGEMM's row-wise Adagrad mixes SSE
    with AVX instructions, which stalls. On AMD's processors torch and FBGEMM are faster, or as fast
    from D=128 on (docs/decisions/cpu_updates.md).
    """
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.is_file() and "GenuineIntel" in cpuinfo.read_text()


def stable_order(keys_n: Tensor, num_keys: int) -> Tensor:
    """Computes the permutation, int64, that sorts integers ``0 .. num_keys - 1`` stably.

    On the CPU this is an O(n) radix sort by numpy, which torch lacks for small integers: 0.1
    instead of 1.3 ms for 22,000 keys below 9.
    """
    if keys_n.device.type == "cpu":
        # numpy sorts 8-bit and 16-bit integers by radix, wider ones by comparison.
        for limit, dtype in _RADIX_KEYS.items():
            if num_keys <= limit:
                keys = keys_n.to(dtype).numpy()
                return torch.from_numpy(np.argsort(keys, kind="stable"))
    return torch.argsort(keys_n, stable=True)


def sort_with_tags(keys_N: Tensor, tags_N: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Sorts integers, none below 0, that each carry a tag; equal integers are ordered by tag.

    Tags are int64 and ascend from 0; ``None`` = the positions ``0 .. N - 1``. Returns the sorted
    integers, in their own type, and their tags. On the CPU 64-bit words are sorted if keys and tags
    fit into these and torch's sort is not faster.
    """
    torch_is_faster = keys_N.numel() >= _LEAST_RADIX and not is_intel()
    fits, tag_bits = keys_N.device.type == "cpu" and not torch_is_faster, 0
    if fits and keys_N.numel():
        # Tags ascend, so the last tag is the largest and determines the number of tag bits.
        last = keys_N.numel() - 1 if tags_N is None else int(tags_N[-1])
        tag_bits = last.bit_length()
        fits = _KEY_BITS.get(keys_N.dtype, 64) + tag_bits <= _WORD_BITS
    if not fits:
        sorted_N, order_N = torch.sort(keys_N, stable=True)
        return sorted_N, order_N if tags_N is None else tags_N.index_select(0, order_N)
    # word = key << tag_bits | tag: sorting the words sorts by key, then tag, and needs no stable
    # sort.
    words = keys_N.numpy().astype(np.int64)
    words <<= tag_bits
    words |= np.arange(len(words)) if tags_N is None else tags_N.numpy()
    words.sort()
    tags = words & ((1 << tag_bits) - 1)
    words >>= tag_bits
    return torch.from_numpy(words).to(keys_N.dtype), torch.from_numpy(tags)


def nonzero_indices(mask_N: Tensor) -> Tensor:
    """Returns the indices where a mask is true: ascending int64; one host sync on CUDA."""
    if mask_N.device.type == "cpu":
        return torch.from_numpy(np.flatnonzero(mask_N.numpy()))
    return mask_N.nonzero().squeeze(1)


@dataclass(frozen=True)
class UniqueRows:
    """Distinct ids of a batch and the maps between lookups and rows."""

    ids_U: Tensor
    """Distinct ids, ascending, in the input's type."""
    row_of_lookup_N: Tensor
    """Index into ``ids_U`` of each lookup, int64."""
    lookups_by_row_N: Tensor
    """Lookups grouped by row: a permutation of ``0..N-1``, int64."""
    counts_U: Tensor
    """Number of lookups of each row, int64."""


def first_of_runs(sorted_N: Tensor) -> Tensor:
    """Marks the first entry of each run of equal values."""
    first_N = torch.ones_like(sorted_N, dtype=torch.bool)
    torch.ne(sorted_N[1:], sorted_N[:-1], out=first_N[1:])
    return first_N


def unique_rows(ids_N: Tensor) -> UniqueRows:
    """Finds the distinct ids of a batch: int32 or int64, none below 0, possibly no ids at all.

    Costs one sort of N, and one host sync on CUDA for U.
    """
    sorted_N, lookups_by_row_N = sort_with_tags(ids_N)
    first_N = first_of_runs(sorted_N)
    start_U = nonzero_indices(first_N)
    # row_N: index of the row for each lookup in sorted order, shape (N,). The scatter moves it back
    # to the input order of the lookups.
    row_N = first_N.cumsum(0).sub_(1)
    row_of_lookup_N = torch.empty_like(row_N).scatter_(0, lookups_by_row_N, row_N)
    end = start_U.new_full((1,), ids_N.numel())
    return UniqueRows(
        ids_U=sorted_N.index_select(0, start_U),
        row_of_lookup_N=row_of_lookup_N,
        lookups_by_row_N=lookups_by_row_N,
        counts_U=torch.diff(start_U, append=end),
    )
