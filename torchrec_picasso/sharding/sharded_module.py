"""What sharded modules of both kinds give a schedule: their tables, and what a batch looks up.

A schedule drives the exchange of hot/cold tables. Where a module has stock tables beside them, it
comes :meth:`apart <HotColdModule.apart>`: two modules over the same rows, one of each kind, whose
outputs are put together again.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torchrec.distributed.types import LazyAwaitable, ShardingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

from torchrec_picasso._torchrec import EmbeddingShardingInfo
from torchrec_picasso.errors import PlanError
from torchrec_picasso.placement import Form, HotColdParams
from torchrec_picasso.rows.batch_rows import PartRows
from torchrec_picasso.rows.group import RowGroup
from torchrec_picasso.rows.sound_features import sound_features
from torchrec_picasso.sharding.delta_tracker import lookup_tracker
from torchrec_picasso.sharding.table_sharding import HotColdEmbeddingSharding

__all__ = ["GROUP", "HotColdModule", "apart_from_stock", "is_hot_cold", "twin_of"]

_PLACED: Mapping[Form, ShardingType] = {
    "rows": ShardingType.ROW_WISE,
    "bags": ShardingType.TABLE_WISE,
}

GROUP = "hot_cold"
"""The name of the hot/cold tables where TorchRec groups tables by sharding type."""


class HotColdModule(ABC):
    """A sharded module of TorchRec's in which marked tables are hot/cold."""

    _has_uninitialized_input_dist: bool
    _create_input_dist: Callable[..., None]
    _is_checked = False
    """Whether hot/cold tables look the same features up, and tell all ranks of bad ones."""
    module_sharding_plan: Any
    preprocess_input: Callable[..., Any]

    _lookups: list[Any]
    _tracked: dict[str, Any]
    """What a delta tracker registered, which parts of the module share however old they are."""

    @abstractmethod
    def table_shardings(self) -> Sequence[Any]:
        """TorchRec's shardings, one per way to place tables."""

    @abstractmethod
    def in_table_order(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Features in the order of the tables, once input dists are made."""

    @abstractmethod
    def output(self, rows: PartRows) -> LazyAwaitable[Any]:
        """The module's output for one part of a batch whose exchange a schedule drives."""

    @abstractmethod
    def with_shardings(self, positions: Sequence[int]) -> HotColdModule:
        """The same module with some of its shardings; it shares their rows.

        Input dists are made anew, with the first batch.

        Args:
            positions: Which, ascending.
        """

    @abstractmethod
    def join(self, parts: Sequence[LazyAwaitable[Any]]) -> LazyAwaitable[Any]:
        """The module's output from those of its parts, in the order of :meth:`apart`."""

    @property
    def has_hot_cold(self) -> bool:
        """Whether any table is hot/cold."""
        return bool(self._positions(hot_cold=True))

    @property
    def is_all_hot_cold(self) -> bool:
        """Whether all tables are hot/cold, so that no exchange is TorchRec's."""
        return self.has_hot_cold and len(self.table_shardings()) == 1

    def apart(self) -> tuple[HotColdModule, HotColdModule]:
        """Hot/cold tables and stock ones, each as a module of its own; both kinds are there."""
        hot_cold, stock = (
            self.with_shardings(self._positions(hot_cold=kind)) for kind in (True, False)
        )
        stock._is_checked = True
        return hot_cold, stock

    def _positions(self, *, hot_cold: bool) -> list[int]:
        return [
            position
            for position, sharding in enumerate(self.table_shardings())
            if isinstance(sharding, HotColdEmbeddingSharding) == hot_cold
        ]

    # dynamo cannot trace messages; where TorchRec is compiled as well, the graph breaks here
    @torch.compiler.disable
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """TorchRec's forward, outside compiled graphs. Collective."""
        return super().forward(*args, **kwargs)  # type: ignore[misc]

    def input_dist(self, ctx: Any, features: Any) -> Any:
        """Starts TorchRec's input dist, of features whose lengths fit. Collective."""
        if self.has_hot_cold or self._is_checked:
            features = sound_features(maybe_td_to_kjt(features, None))
            for sharding in self.table_shardings():
                if isinstance(sharding, HotColdEmbeddingSharding):
                    sharding.request_dist.sound = [features]
        return super().input_dist(ctx, features)  # type: ignore[misc]

    @property
    def post_lookup_tracker_fn(self) -> Callable[..., None] | None:
        """What TorchRec calls after a lookup."""
        return self._tracked.get("lookup")

    @post_lookup_tracker_fn.setter
    def post_lookup_tracker_fn(self, record: Callable[..., None] | None) -> None:
        vars(self).setdefault("_tracked", {})["lookup"] = record

    @property
    def post_odist_tracker_fn(self) -> Callable[..., None] | None:
        """What TorchRec calls after it has started an output dist."""
        return self._tracked.get("odist")

    @post_odist_tracker_fn.setter
    def post_odist_tracker_fn(self, record: Callable[..., None] | None) -> None:
        vars(self).setdefault("_tracked", {})["odist"] = record

    def register_post_lookup_tracker_fn(self, record_fn: Callable[..., None]) -> None:
        """Takes TorchRec's delta tracker; see ``delta_tracker.py``."""
        for position in self._positions(hot_cold=True):
            group = self.table_shardings()[position].group
            kernels = list(self._lookups[position]._emb_modules)
            record_fn = lookup_tracker(record_fn, group, kernels)
        super().register_post_lookup_tracker_fn(record_fn)  # type: ignore[misc]

    @property
    def group(self) -> RowGroup:
        """The tables of a module that has hot/cold ones only."""
        (sharding,) = self.table_shardings()
        group: RowGroup = sharding.group
        return group

    def features_of(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """What the module looks up of its input, in the order of its tables.

        Args:
            features: The input, with lengths that fit.
        """
        if self._has_uninitialized_input_dist:
            self._create_input_dist(features.keys())
            self._has_uninitialized_input_dist = False
        with torch.no_grad():
            ordered = self.in_table_order(features)
        num_features = sum(self.group.plan.features_M)
        if len(ordered.keys()) == num_features:
            return ordered
        # those that it does not look up come last, where TorchRec found nothing to reorder
        (own,) = ordered.split([num_features])
        return own


def twin_of(module: nn.Module) -> Any:
    """A module of the same parts, to which other parts may be given without a change to it."""
    twin = copy.copy(module)
    # what assigning to a module writes into
    vars(twin).update(_buffers=dict(module._buffers), _modules=dict(module._modules))
    return twin


def is_hot_cold(info: EmbeddingShardingInfo) -> bool:
    """Whether the plan marks a table.

    Raises:
        PlanError: If it places a marked one in another way.
    """
    sharding = info.param_sharding
    if not isinstance(sharding.cache_params, HotColdParams):
        return False
    form = sharding.cache_params.form
    expected = _PLACED[form].value
    if sharding.sharding_type != expected:
        raise PlanError(
            f"table {info.embedding_config.name!r} carries HotColdParams(form={form!r}) but is "
            f"placed {sharding.sharding_type!r}; hot/cold tables of this form are placed "
            f"{expected!r}"
        )
    return True


def apart_from_stock(
    stock_groups: dict[str, list[EmbeddingShardingInfo]],
) -> dict[str, list[EmbeddingShardingInfo]]:
    """TorchRec's groups of tables by sharding type, marked ones in a group of their own."""
    groups: dict[str, list[EmbeddingShardingInfo]] = {}
    for sharding_type, infos in stock_groups.items():
        for info in infos:
            groups.setdefault(GROUP if is_hot_cold(info) else sharding_type, []).append(info)
    return groups
