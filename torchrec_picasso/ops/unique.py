"""Unique rows of a batch, with both directions of the lookup-to-row map.

One sort gives all results: the distinct ids, the row of every lookup (forward gather) and the
lookups of every row (backward reduction). ``torch.unique`` sorts too but discards the second map,
and backward then needs another sort or scattered adds: on one core, 106,496 Criteo lookups of D=128
took 23 ms by ``index_add_`` and 10 ms by the gather over this map.

Source: PICASSO (arXiv 2204.04903), Unique&Partition.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torchrec_picasso.ops.order import nonzero_indices, sort_with_tags

__all__ = ["UniqueRows", "first_of_runs", "unique_rows"]


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
