"""The placement of one table in the sharding plan: hot rows, exchange and wave.

The placement is stored in ``ParameterSharding.cache_params``, the one field that survives
TorchRec's planner, its broadcast to all ranks and ``shard()``. ``sharding_type`` stays
``row_wise``, or ``table_wise`` for owner-pooled tables, and ``compute_kernel`` stays a stock
kernel, so all of TorchRec keeps working on the plan.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Literal

import torch
from torch import Tensor
from torchrec.distributed.types import CacheParams, ShardingType

from torchrec_picasso.errors import PlanError

Form = Literal["rows", "bags", "node_rows"]
"""Name of a table's route (``rows/route.py``): ``"rows"`` = row-exchanged, distinct rows are sent
and pooled on the rank of the batch; ``"bags"`` = owner-pooled, the home rank of the table sends one
vector per bag; ``"node_rows"`` = row-exchanged by host, a row crosses once per host."""


@dataclass(frozen=True, kw_only=True)
class FormTraits:
    """Properties of a form that plans and shardings read."""

    sends_bags: bool = False
    """Whether the only home rank of a table sends vectors of bags; then it has no replicas."""
    by_module: bool = False
    """Whether all hot/cold tables of a module have the form, or none."""

    @property
    def sharding_type(self) -> str:
        """TorchRec's sharding type: owned by all ranks, or by the rank that pools."""
        return (ShardingType.TABLE_WISE if self.sends_bags else ShardingType.ROW_WISE).value


FORMS: Mapping[str, FormTraits] = {
    "rows": FormTraits(),
    "bags": FormTraits(sends_bags=True),
    "node_rows": FormTraits(by_module=True),
}
"""The forms; packs, and the features of a batch, are in this order."""

_MOST_POOLED_WAVES = 4  # more waves send more messages and hide less


def pack_key(form: Form, wave: int, dim: int, memory: Hashable) -> tuple[int, int, int, Hashable]:
    """Returns what the tables of one pack have in common.

    Bags ignore the wave of the placement: they are spread over waves by pack instead. ``memory`` is
    what is equal in one FBGEMM table: compute kernel and data type.
    """
    return list(FORMS).index(form), 0 if FORMS[form].sends_bags else wave, dim, memory


def owner_pooled_waves(num_packs: int) -> list[slice]:
    """Returns the packs of each wave of bags: neighbours, sizes differing by at most one. Bags are
    never fetched ahead, so only the update of other packs can hide their exchange."""
    num_waves = min(num_packs, _MOST_POOLED_WAVES)
    edges = [num_packs * wave // num_waves for wave in range(num_waves)]
    return list(map(slice, edges, [*edges[1:], num_packs]))


@dataclass(eq=False, repr=False)
class HotColdParams(CacheParams):
    """Marks a table for the packed unique exchange and names its hot rows.

    Args:
        hot_rows: Row ids of the table that get a replica on every rank, any integer sequence or
            tensor; stored as an ascending int64 tensor of shape ``(H,)``. Empty means the packed
            unique exchange without replicas.
        wave: Tables of a module with the same number share a wave; an interleaved pipeline
            staggers waves in ascending order. Any number from 0; owner-pooled tables follow.
        form: Name of the table's route. ``"rows"``: each distinct row is sent once; the table is
            placed row-wise. ``"bags"``: one pooled vector is sent for each bag; the table is placed
            table-wise, on its home rank, and has no hot rows. Cheaper if bags are large and rows
            rarely repeat. ``"node_rows"``: as ``"rows"``, once per host; for all hot/cold tables of
            a module, with several ranks on each of several hosts.
        num_micro_batches: Number of micro-batches that the plan was priced for, equal on all its
            tables: an interleaved pipeline starts its autotuning there. ``None`` = not known.

    Raises:
        PlanError: If an id is negative or repeated, the wave is negative, the form is unknown, an
            owner-pooled table has hot rows, or the number of micro-batches is less than 1.

    Source:
        PICASSO (arXiv 2204.04903), HybridHash; TorchRec ``distributed/types.py`` ``CacheParams``.
    """

    hot_rows: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    wave: int = 0
    form: Form = "rows"
    num_micro_batches: int | None = None

    def __post_init__(self) -> None:
        self.hot_rows = _ascending_ids(self.hot_rows)
        if self.form not in FORMS:
            forms = ", ".join(map(repr, FORMS))
            raise PlanError(f"form {self.form!r} is unknown; the forms are {forms}")
        if FORMS[self.form].sends_bags and self.num_hot_rows:
            raise PlanError(
                f"{self.num_hot_rows} hot rows were given with form='bags'; owner-pooled tables "
                "have no replicas: leave out hot_rows, or use form='rows'"
            )
        if self.wave < 0:
            raise PlanError(f"wave {self.wave} is negative; waves count from 0")
        if self.num_micro_batches is not None and self.num_micro_batches < 1:
            raise PlanError(
                f"num_micro_batches is {self.num_micro_batches}; expected at least 1, or None "
                "if the plan has no price"
            )

    @property
    def num_hot_rows(self) -> int:
        """Number of the table's rows that are replicated."""
        return self.hot_rows.numel()

    def check(self, table: str, num_embeddings: int) -> None:
        """Raises PlanError if a table with ``num_embeddings`` rows cannot hold the hot set."""
        if self.num_hot_rows > num_embeddings:
            raise PlanError(
                f"table {table!r} has {num_embeddings} rows, but {self.num_hot_rows} hot rows were "
                f"requested; request at most {num_embeddings}"
            )
        if self.num_hot_rows and int(self.hot_rows[-1]) >= num_embeddings:
            raise PlanError(
                f"hot row {int(self.hot_rows[-1])} lies outside table {table!r}, whose rows are "
                f"0..{num_embeddings - 1}; choose hot rows for this model"
            )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, HotColdParams):
            return False
        return self.stable_fingerprint() == other.stable_fingerprint()

    def __hash__(self) -> int:
        return hash(self.stable_fingerprint())

    def __repr__(self) -> str:
        # a digest: TorchRec distinguishes plans by this text, and tensors print shortened
        return (
            f"HotColdParams(num_hot_rows={self.num_hot_rows}, "
            f"hot_rows=sha256:{self._rows_digest()[:16]}, wave={self.wave}, "
            f"form={self.form!r}, num_micro_batches={self.num_micro_batches})"
        )

    def stable_fingerprint(self) -> tuple[object, ...]:
        """Describes the placement, equal in every process; TorchRec 1.9 keys its plan caches by it.

        Returns:
            A name, a version, a digest of the hot rows, the wave, the form, the micro-batches, and
            the cache settings: the parent's fingerprint, or its fields if TorchRec has none yet.

        Source:
            TorchRec ``distributed/types.py`` ``CacheParams.stable_fingerprint``.
        """
        # Before 1.9: TorchRec's own fields as text, those that it compares itself.
        names = [f.name for f in fields(CacheParams) if f.name != "stats"]
        cache_settings = tuple(f"{name}={getattr(self, name)!r}" for name in names)
        parent_fingerprint = getattr(super(), "stable_fingerprint", lambda: cache_settings)
        own = (self._rows_digest(), self.wave, self.form, self.num_micro_batches)
        return ("hot_cold_params", 3, *own, parent_fingerprint())

    def _rows_digest(self) -> str:
        return hashlib.sha256(self.hot_rows.numpy().tobytes()).hexdigest()


def _ascending_ids(rows: Tensor | Iterable[int]) -> Tensor:
    """Sorts row ids, int64, ``(H,)``; refuses negative and repeated ids."""
    ids = rows if isinstance(rows, Tensor) else torch.tensor(list(rows), dtype=torch.int64)
    ids = ids.detach().to("cpu", torch.int64).flatten().sort().values
    if ids.numel() and int(ids[0]) < 0:
        raise PlanError(f"hot row {int(ids[0])} is negative; row ids start at 0")
    # in ascending order a repeated id is its own neighbour
    repeated = ids[1:][ids[1:] == ids[:-1]]
    if repeated.numel():
        raise PlanError(f"hot row {int(repeated[0])} is named twice; name each hot row once")
    return ids
