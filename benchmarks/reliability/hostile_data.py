"""The jagged batches of a hostile case, and what makes one of them bad."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torchrec import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from benchmarks.reliability.hostile_cases import Case, Fault, TableSpec

__all__ = ["HostileBatch", "make_batch"]

_MILLION = 1_000_000
_MOST_IDS = 4


@dataclass
class HostileBatch(Pipelineable):
    """Ids of pooled tables, ids of sequences, labels and what samples count, shape ``(B,)``."""

    bags: KeyedJaggedTensor
    sequences: KeyedJaggedTensor
    labels: Tensor
    counts: Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> HostileBatch:
        """The batch on a device."""
        return HostileBatch(
            self.bags.to(device, non_blocking),
            self.sequences.to(device, non_blocking),
            self.labels.to(device, non_blocking=non_blocking),
            self.counts.to(device, non_blocking=non_blocking),
        )

    def record_stream(self, stream: torch.Stream) -> None:
        """Nothing: batches stay on the CPU."""

    def pin_memory(self) -> HostileBatch:
        """The batch itself."""
        return self


def make_batch(
    case: Case, step: int, rank: int, fault: Fault | None = None, as_stock: bool = False
) -> HostileBatch:
    """A rank's batch.

    Args:
        case: Which.
        step: Which of its batches.
        rank: Whose.
        fault: What to spoil in it, if anything.
        as_stock: Whether ids and lengths are int64, whatever the case says, and a batch without
            samples has one that counts nothing.
    """
    generator = torch.Generator().manual_seed(_seed_of(case.seed, step, rank))
    kind, size = case.kinds_SW[step][rank], case.sizes_SW[step][rank]
    if kind == "no samples" or step >= case.ends_W[rank]:
        kind, size = "no samples", 0
    elif not size:
        size = 1
    counts = torch.ones(size)
    if as_stock and not size:  # its sequences take no empty batch, but one of nothing that counts
        kind, size, counts = "no ids", 1, torch.zeros(1)
    return HostileBatch(
        _features(case, case.bags, kind, size, generator, fault, as_stock),
        _features(case, case.sequences, kind, size, generator, fault, as_stock),
        torch.randn(size, generator=generator),
        counts,
    )


def _seed_of(seed: str, *numbers: int) -> int:
    """A seed of a part of a case, the same in every process."""
    total = 17
    for code in (*seed.encode(), *numbers):
        total = (total * 1_000_003 + code) % (2**31)
    return total


def _features(
    case: Case,
    tables: Sequence[TableSpec],
    kind: str,
    size: int,
    generator: torch.Generator,
    fault: Fault | None,
    as_stock: bool,
) -> KeyedJaggedTensor:
    ids, lengths, keys = [], [], []
    is_weighted = case.weighted and tables is case.bags
    index_dtype = torch.int64 if as_stock else getattr(torch, case.index_dtype)
    for table in tables:
        for name in table.features:
            ids_N, lengths_B = _lookups(kind, table.rows, size, generator)
            if fault is not None and fault.feature == name and not ids_N.numel():
                ids_N, lengths_B = torch.zeros(size).long(), torch.ones(size).long()
            keys.append(name)
            ids.append(ids_N)
            lengths.append(lengths_B)
            kind = "one id" if kind == "million" else kind
    counts = [ids_N.numel() for ids_N in ids]
    weights_N = torch.rand(sum(counts), generator=generator) if is_weighted else None
    values_N, lengths_S = torch.cat(ids), torch.cat(lengths)
    if fault is not None and fault.feature in keys:
        place = keys.index(fault.feature)
        rows = next(table.rows for table in tables if fault.feature in table.features)
        first, first_bag = sum(counts[:place]), place * size
        values_N, lengths_S, weights_N = _spoil(
            fault, rows, index_dtype, values_N, lengths_S, weights_N, first, first_bag
        )
    length_dtype = torch.int64 if as_stock else getattr(torch, case.length_dtype)
    return KeyedJaggedTensor(
        keys=keys,
        values=values_N.to(index_dtype),
        lengths=lengths_S.to(length_dtype),
        weights=weights_N,
        stride=size,
    )


def _spoil(
    fault: Fault,
    rows: int,
    index_dtype: torch.dtype,
    values_N: Tensor,
    lengths_S: Tensor,
    weights_N: Tensor | None,
    first: int,
    first_bag: int,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Makes a feature's lookups bad; its first lookup and its first bag are given."""
    limits = torch.iinfo(index_dtype)
    bad_ids = {
        "id -1": -1,
        "id num_rows": rows,
        "largest id": limits.max,
        "smallest id": limits.min,
    }
    if fault.kind in bad_ids:
        values_N[first] = bad_ids[fault.kind]
    elif fault.kind == "value missing":
        values_N = values_N[:-1]
        weights_N = None if weights_N is None else weights_N[:-1]
    elif fault.kind == "value too many":
        values_N = torch.cat([values_N, values_N[:1]])
        weights_N = None if weights_N is None else torch.cat([weights_N, weights_N[:1]])
    elif fault.kind == "length missing":
        lengths_S = lengths_S[:-1]
    elif fault.kind == "length negative":
        lengths_S[first_bag] = -2
    elif fault.kind == "lengths negative, sum right":
        lengths_S[first_bag + 1] += lengths_S[first_bag] + 1
        lengths_S[first_bag] = -1
    elif weights_N is not None:
        if fault.kind == "weight missing":
            return values_N, lengths_S, weights_N[:-1]
        weights_N[first] = torch.nan if fault.kind == "weight nan" else torch.inf
    return values_N, lengths_S, weights_N


def _lookups(kind: str, rows: int, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Ids of a feature and lengths of its bags, both int64."""
    lengths_B = torch.randint(0, _MOST_IDS + 1, (size,), generator=generator)
    if kind in ("no samples", "no ids"):
        lengths_B = torch.zeros(size, dtype=torch.int64)
    if kind == "all ids":
        lengths_B[0] = rows
        return torch.cat(
            [torch.randperm(rows, generator=generator), _any(rows, lengths_B[1:], generator)]
        ), lengths_B
    if kind == "million":
        lengths_B[0] = _MILLION
    ids_N = _any(rows, lengths_B, generator)
    if kind == "one id":
        ids_N = torch.full_like(ids_N, int(torch.randint(rows, (1,), generator=generator)))
    if kind == "ends":
        ids_N = torch.where(ids_N % 2 == 0, 0, rows - 1)
    return ids_N, lengths_B


def _any(rows: int, lengths_B: Tensor, generator: torch.Generator) -> Tensor:
    """Ids skewed to low ones."""
    return (torch.rand(int(lengths_B.sum()), generator=generator) ** 3 * rows).long()
