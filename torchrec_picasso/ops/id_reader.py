"""Ids of a batch, as far as the plan alone decides: the unique rows, and the lookups of each.

Of all work on ids this takes most of the time. It depends neither on the hot set nor on other
ranks, so a data loader may do it ahead of the step, in another process.

Shape letters: F features, K micro-batches, N lookups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_picasso.ops.bags import Bags, bag_order, reorder_bags, segment_edges
from torchrec_picasso.ops.ids import IdSpace, counting
from torchrec_picasso.ops.pack_plan import PackPlan
from torchrec_picasso.ops.row_order import UniqueRows, unique_rows
from torchrec_picasso.ops.streams import kept_by_stream


@dataclass(frozen=True, kw_only=True)
class ReadIds:
    """The ids of the features of one route in a batch."""

    bags: Bags
    rows: UniqueRows
    outside_ids: Tensor
    """Number of lookups outside their table, 0-d integer."""
    sizes: tuple[int, ...]
    """Samples that the order of bags depends on."""


@dataclass(frozen=True)
class PreparedIds:
    """The ids of a batch in one tensor, which another process receives in a third of the time. All
    integers have the type of the linear ids, since each megabyte costs 0.4 ms."""

    values: Tensor
    lengths: tuple[int, ...]
    """Number of values of each part, in the order of :meth:`from_read`."""
    sizes: tuple[int, ...]
    digest: int
    """Of the features that were read, to see whether they changed."""

    @staticmethod
    def from_read(ids: ReadIds, features: KeyedJaggedTensor) -> PreparedIds:
        """Joins ids that were read from features."""
        rows = ids.rows
        parts = [rows.ids_U, rows.counts, rows.row_of_lookup_N, rows.lookups_by_row_N]
        parts += [ids.bags.offsets_S1, ids.outside_ids.view(1)]
        parts += [] if ids.bags.source_N is None else [ids.bags.source_N]
        values, lengths = [part.to(rows.ids_U.dtype) for part in parts], tuple(map(len, parts))
        return PreparedIds(torch.cat(values), lengths, ids.sizes, _digest(features))

    def split(self) -> ReadIds:
        """Returns the ids by their meaning."""
        ids_U, *others = self.values.split(self.lengths)
        others = [part.to(torch.int64) for part in others]
        counts_U, row_N, lookups_N, offsets_S1, outside, *source = others
        return ReadIds(
            bags=Bags(offsets_S1=offsets_S1, source_N=source[0] if source else None),
            rows=UniqueRows(ids_U, row_N, lookups_N, counts_U),
            outside_ids=outside.squeeze(0),
            sizes=self.sizes,
        )


@dataclass(frozen=True)
class IdReader:
    """Reads the ids of the tables of one route; CPU tensors if the ids are on the CPU."""

    space: IdSpace
    plan: PackPlan

    @cached_property
    def _bag_order(self) -> Callable[[torch.device, tuple[int, ...]], Tensor]:
        """The permutation of bags, kept for batches of the same sizes."""
        return kept_by_stream(partial(bag_order, self.plan), maxsize=2)

    def read(
        self, features: KeyedJaggedTensor, sizes_K: Sequence[int | None], is_weighted: bool
    ) -> ReadIds:
        """Finds the unique rows of a batch, with per-sample weights or without. No collective.

        Features are in the order of the tables, with valid lengths; ``sizes_K`` are the samples of
        each micro-batch, one ``None`` if every feature has its own size.
        """
        # Linear ids (N,) -> bag order (N,) -> unique rows (U,).
        lengths_S, offsets_S1 = features.lengths(), features.offsets()
        edges_F1 = segment_edges(offsets_S1, features.stride_per_key())
        linear_N, outside_ids = self.space.linearize(features.values(), edges_F1[1:])
        source_N = None
        if is_weighted and self.plan.has_pooling:
            source_N = counting(linear_N.device, linear_N.numel())
        if sizes := self._sizes(sizes_K):
            order_S = self._bag_order(linear_N.device, sizes)
            ids_N, bags = reorder_bags(linear_N, lengths_S, order_S, source_N, offsets_S1)
        else:
            ids_N, bags = linear_N, Bags(offsets_S1.to(torch.int64), source_N)
        return ReadIds(bags=bags, rows=unique_rows(ids_N), outside_ids=outside_ids, sizes=sizes)

    def can_use(
        self,
        ids: PreparedIds,
        features: KeyedJaggedTensor,
        sizes_K: Sequence[int | None],
        is_weighted: bool,
    ) -> bool:
        """Whether ids read before are what :meth:`read` would find; one host sync on CUDA."""
        _, _, _, _, num_offsets, _, *num_sources = ids.lengths
        return (
            ids.sizes == self._sizes(sizes_K)
            and bool(num_sources) == (is_weighted and self.plan.has_pooling)
            and num_offsets == features.lengths().numel() + 1
            and ids.digest == _digest(features)
        )

    def _sizes(self, sizes_K: Sequence[int | None]) -> tuple[int, ...]:
        """Samples that the order of bags depends on; empty = bags keep their order."""
        sizes = tuple(size for size in sizes_K if size is not None)
        if not self.plan.has_pooling and len(sizes) == 1:
            return ()
        # the order of pooled bags does not depend on the split
        return sizes if any(self.plan.is_sequence_M) or not sizes else (sum(sizes),)


def _digest(features: KeyedJaggedTensor) -> int:
    """Sums ids and lengths times random factors, modulo 2^64. Other ids or lengths have the same
    sum with a chance below 1e-9."""
    numbers = torch.cat([features.lengths().long(), features.values().long()])
    factors = _factors(1 << numbers.numel().bit_length(), numbers.device)
    return int(numbers.mul_(factors[: numbers.numel()]).sum())


@cache
def _factors(num: int, device: torch.device) -> Tensor:
    """Random integers, the same in every process."""
    return torch.randint(1 << 62, (num,), generator=torch.Generator().manual_seed(0)).to(device)
